"""Numbers written for people keep their digits and their unit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.units import (
    all_steps_done,
    compact,
    count,
    days,
    gib,
    percent,
    pluralize,
    seconds,
    si,
    significant,
    step_seconds,
    there_are,
    verb_form,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [(9.9e11, "990 GFLOP/s"), (1.234e15, "1.23 PFLOP/s"), (12.0, "12.0 FLOP/s"), (0, "0 FLOP/s")],
)
def test_si_prefixes(value: float, text: str):
    assert si(value, "FLOP/s") == text


@pytest.mark.parametrize(
    ("value", "text"), [(70_553_706_496, "70.6B"), (3_410_176, "3.41M"), (950, "950")]
)
def test_counts(value: float, text: str):
    assert count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.56, "1,234.6 days"), (1.0, "1.0 days"), (0.0714, "0.071 days"), (0.0, "0 days")],
)
def test_a_part_of_a_day_is_not_none(value: float, text: str):
    assert days(value) == text


def test_a_noun_agrees_with_its_number():
    counts = [pluralize(n, "node") for n in (0, 1, 2, 2048)]
    assert counts == ["0 nodes", "1 node", "2 nodes", "2,048 nodes"]
    assert (pluralize(1, "process"), pluralize(2, "process")) == ("1 process", "2 processes")
    assert [pluralize(n, "log", "are") for n in (1, 2)] == ["1 log is", "2 logs are"]
    assert [pluralize(n, "step", "save") for n in (1, 2)] == ["1 step saves", "2 steps save"]
    assert [pluralize(n, "layer", "have") for n in (1, 2)] == ["1 layer has", "2 layers have"]
    assert [pluralize(n, "row", "do") for n in (1, 2)] == ["1 row does", "2 rows do"]
    assert [verb_form(n, "were") for n in (0, 1, 2)] == ["were", "was", "were"]
    assert pluralize(2, "micro-batch") == "2 micro-batches"
    assert [all_steps_done(n) for n in (1, 2000)] == [
        "the only step is done",
        "all 2,000 steps are done",
    ]
    assert there_are(1, "host") == "there is 1 host" and there_are(2, "host").startswith(
        "there are"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.2310, "0.2310 s"), (12.5, "12.5 s"), (125, "2 min 05 s"), (7260, "2 h 01 min")],
)
def test_seconds(value: float, text: str):
    assert seconds(value) == text


def test_gib_is_not_gb():
    assert gib(2**30) == "1.00 GiB"


def test_percent_takes_a_fraction():
    assert percent(0.3617, 2) == "36.17%"


@given(st.floats(1e-9, 1e12))
def test_significant_digits_keep_the_value(value: float):
    assert float(significant(value, 4).replace(",", "")) == pytest.approx(value, rel=1e-3)


def test_seconds_of_a_step_keep_four_digits_and_are_never_in_exponent_form():
    shown = ["12,340", "123.4", "12.40", "0.01234", "0.00001234", "0"]
    assert [step_seconds(value) for value in (12_340.4, 123.4, 12.4, 0.01234, 1.234e-5, 0)] == shown


def test_a_trimmed_value_ends_in_no_zeros_behind_the_point():
    values = (0.5, 0.04567891, 43.2, 10.0, 1200.0, 123_456.7, 1e-5, 0.0)
    shown = ["0.5", "0.04568", "43.2", "10", "1,200", "123,457", "0.00001", "0"]
    assert [compact(value) for value in values] == shown
