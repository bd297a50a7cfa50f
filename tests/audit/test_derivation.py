"""Cells follow from their row's step time, within its rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.audit.derivation import (
    COLUMNS,
    Cell,
    Inputs,
    Relation,
    RowSpeed,
    implied_step_times,
    judge,
    missing,
    relation,
    speed_of,
)
from paceline.core import rates
from paceline.core.printed import Interval, exactly, read_printed

INPUTS = Inputs(
    seq_len=8192,
    global_batch=128,
    num_devices=64,
    flops_per_sample=exactly(3.94e15),
    peak_flops_per_s=1979e12,
    total_tokens=1e12,
    timed_steps=100,
    base_num_devices=8,
    base_samples_per_s=exactly(1.5),
    settings={"dp": exactly(2)},
)


def cell(column: str, text: str, unit: float = 1.0) -> Cell:
    printed = read_printed(text)
    assert printed is not None
    return Cell(column, printed, unit)


def how(column: str, inputs: Inputs = INPUTS) -> Relation:
    derived = relation(column, inputs)
    assert derived is not None
    return derived


def test_every_column_is_what_the_rates_say():
    t = 11.01
    expected = {
        "step_time_s": t,
        "samples_per_s": rates.samples_per_s(128, t),
        "tokens_per_s": rates.tokens_per_s(8192, 128, t),
        "tokens_per_s_per_device": rates.tokens_per_s(8192, 128, t) / 64,
        "flops_per_s_per_device": rates.flops_per_s_per_device(3.94e15, 128, t, 64),
        "mfu": rates.flops_per_s_per_device(3.94e15, 128, t, 64) / 1979e12,
        "days": rates.days(1e12, rates.tokens_per_s(8192, 128, t)),
        "execution_time_s": 100 * t,
        "speedup": 128 / t / 1.5,
        "scaling_efficiency": 128 / t / 64 / (1.5 / 8),
    }
    assert {c: how(c).at(t) for c in expected} == pytest.approx(expected)
    assert set(COLUMNS) - set(expected) == {"samples_per_s_unrounded"}


@given(st.sampled_from(sorted(COLUMNS)), st.floats(0.01, 1000), st.floats(0, 0.1))
def test_a_value_gives_back_the_step_times_it_came_from(column: str, t: float, width: float):
    times = Interval(t, t * (1 + width))
    back = how(column).step_times(how(column).over(times))
    assert back is not None
    assert (back.low, back.high) == pytest.approx((times.low, times.high))


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("36.17%", "follows"),
        ("36.16%", "cut"),
        ("36.15%", "follows"),
        ("36.14%", "cut"),
        ("36.13%", "fails"),
        ("36.20%", "fails"),
        ("over 36%", "follows"),
        ("over 37%", "fails"),
    ],
)
def test_any_step_time_that_rounds_to_the_printed_one_will_do(text: str, state: str):
    speed = RowSpeed(11.01, Interval(11.005, 11.015))
    assert judge(cell("mfu", text, 0.01), how("mfu"), speed) == state


def test_cut_digits_are_told_from_rounded_ones():
    tflops = Relation(exactly(1022.36e12), -1)
    speed = RowSpeed(23, Interval(22.9999, 23.0001))
    assert judge(cell("flops_per_s_per_device", "44.4", 1e12), tflops, speed) == "cut"
    assert judge(cell("flops_per_s_per_device", "44.5", 1e12), tflops, speed) == "follows"


def test_a_setting_needs_no_step_time():
    assert how("dp").power == 0
    assert judge(cell("dp", "2"), how("dp"), None) == "follows"
    assert judge(cell("dp", "4"), how("dp"), None) == "fails"
    assert how("dp").step_times(exactly(2)) is None


def test_an_uncertain_input_widens_what_follows():
    wide = replace(INPUTS, flops_per_sample=Interval(3.90e15, 3.98e15))
    assert how("mfu", wide).coefficient.relative_width == pytest.approx(0.02, rel=0.05)
    speed = RowSpeed(11.01, exactly(11.01))
    assert judge(cell("mfu", "36.3%", 0.01), how("mfu"), speed) == "fails"
    assert judge(cell("mfu", "36.3%", 0.01), how("mfu", wide), speed) == "follows"


def test_what_is_missing_is_named():
    bare = Inputs(seq_len=8192, global_batch=128)
    assert relation("mfu", bare) is None
    assert missing("mfu", bare) == ("flops_per_sample", "num_devices", "peak_flops_per_s")
    assert relation("something else", INPUTS) is None


def test_the_printed_step_time_goes_before_any_other_speed():
    cells = {
        c: cell(c, text) for c, text in {"tokens_per_s": "95239", "step_time_s": "11.0"}.items()
    }
    column, speed = speed_of(cells, INPUTS) or ("", RowSpeed(0, exactly(0)))
    assert (column, speed.step_time_s) == ("step_time_s", 11.0)
    assert (speed.interval.low, speed.interval.high) == pytest.approx((10.95, 11.05))


def test_without_a_step_time_the_throughput_is_the_speed():
    speed = speed_of({"tokens_per_s": cell("tokens_per_s", "95239")}, INPUTS)
    assert speed and speed[0] == "tokens_per_s"
    assert speed[1].step_time_s == pytest.approx(8192 * 128 / 95239)


@pytest.mark.parametrize("text", ["over 98%", "0"])
def test_a_bound_or_a_zero_is_no_speed(text: str):
    assert speed_of({"samples_per_s": cell("samples_per_s", text)}, INPUTS) is None


def test_implied_step_times_allow_for_rounding_and_cutting():
    span = implied_step_times(cell("tokens_per_s", "95239"), how("tokens_per_s"))
    assert span is not None
    for tokens in (95238.51, 95239.99):
        assert span.meets(exactly(8192 * 128 / tokens))
    assert not span.meets(exactly(8192 * 128 / 95240.1))
