"""Figures are written with their unit, and unknown ones say why."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.result import Metric, Straggler
from paceline.core.text import printable
from paceline.report import figures
from tests.report.example import report


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (17731.4, "tokens/s", "17,731 tokens/s"),
        (72.713, "samples/s", "72.71 samples/s"),
        (0.2310, "s", "0.2310 s"),
        (0.004123, "s", "0.004123 s"),
        (3725.0, "s", "1 h 02 min"),
        (0.4137, "fraction", "41.4%"),
        (0.00031, "fraction", "0.031%"),
        (-2.0e-7, "fraction", "0.0%"),
        (9.9e11, "FLOP/s", "990 GFLOP/s"),
        (2**30 * 0.61, "bytes", "0.61 GiB"),
        (2**20 * 12.5, "bytes", "12.5 MiB"),
        (121.53, "days", "121.5 days"),
    ],
)
def test_a_value_is_written_with_its_unit(value: float, unit: str, text: str) -> None:
    assert figures.format_value(value, unit) == text


def test_one_observation_is_not_written_with_the_digits_of_a_median() -> None:
    assert figures.value_text(Metric(value=2.3104, unit="s", n=1)) == "2.31 s"
    assert figures.value_text(Metric(value=2.3104, unit="s", n=52)) == "2.3104 s"


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_an_unknown_value_says_why(value: float | None) -> None:
    metric = Metric(value=value, unit="fraction", note="no data-sheet peak for cpu")
    assert figures.finite_value(metric) is None
    assert figures.value_text(metric) == "none: no data-sheet peak for cpu"
    assert figures.value_text(None) == "none: not measured"


def test_plus_minus_takes_the_wider_side_of_the_interval() -> None:
    assert figures.plus_minus(Metric(value=100, unit="s", low=99, high=103)) == "± 3.0%"
    assert figures.plus_minus(Metric(value=100, unit="s", low=99.99, high=100)) == "± < 0.1%"
    assert figures.plus_minus(Metric(value=100, unit="s")) is None
    assert figures.plus_minus(Metric(value=0, unit="s", low=0, high=1)) is None


def test_an_interval_names_its_unit_once_where_both_ends_share_it() -> None:
    same = Metric(value=0.5, unit="s", low=0.4, high=0.6)
    apart = Metric(value=1e9, unit="FLOP/s", low=9.5e8, high=1.05e9)
    assert figures.interval_text(same) == "0.4000 to 0.6000 s"
    assert figures.interval_text(apart) == "950.0 MFLOP/s to 1.050 GFLOP/s"
    assert figures.interval_text(Metric(value=1, unit="s")) is None


def test_only_figures_over_steps_name_the_window() -> None:
    result = report().result
    assert result.window is not None
    steps = f"{result.window.first_step}-{result.window.last_step}"
    assert figures.window_text(result, "tokens_per_s") == steps
    assert figures.window_text(result, "memory_resident_bytes") is None


def test_the_headline_falls_back_to_samples() -> None:
    result = report().result
    some = {"samples_per_s": result.metrics["samples_per_s"]}
    headline = figures.throughput(result.model_copy(update={"metrics": some}))
    assert headline is not None and headline[0] == "samples_per_s"
    assert figures.throughput(result.model_copy(update={"metrics": {}})) is None


def test_memory_names_its_kinds_with_the_reserved_peak_first() -> None:
    metrics = {
        f"memory_{kind}_bytes": Metric(value=value, unit="bytes")
        for kind, value in (("allocated", 1e9), ("reserved", 2e9), ("resident", None))
    }
    result = report().result.model_copy(update={"metrics": metrics})
    assert list(figures.peak_memory_by_kind(result).items()) == [
        ("reserved", 2e9),
        ("allocated", 1e9),
    ]


def test_only_a_named_straggler_is_written() -> None:
    straggler = Straggler(rank=3, host="node-1", excess=0.021, share_of_steps=0.9, named=True)
    assert figures.straggler_text(straggler) == "rank 3 on node-1 busiest (+2.1%)"
    assert figures.straggler_text(straggler.model_copy(update={"named": False})) is None
    assert figures.straggler_text(None) is None


def test_terminal_sequences_and_direction_marks_are_taken_out() -> None:
    text = "\x1b[31mred\x1b[0m \x1b]0;title\x07\u202eab\x00\r\nnext\tcolumn"
    assert printable(text) == "red \ufffdab\ufffd\nnext\tcolumn"


@given(st.text())
def test_printable_text_has_no_control_characters(text: str) -> None:
    kept = printable(text)
    assert not any(ord(c) < 32 and c not in "\n\t" for c in kept)
    assert not set(kept) & set("\x1b\x7f\x9b\u202e")


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e18, max_value=1e18))
def test_every_finite_value_gets_its_unit(value: float) -> None:
    for unit, ending in (("tokens/s", "tokens/s"), ("fraction", "%"), ("s", ("s", "min"))):
        assert figures.format_value(value, unit).endswith(ending)
