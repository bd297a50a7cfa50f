"""Rows of a sweep: the best, who is level with it, and the front of speed and memory."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.layout import Layout
from paceline.core.result import Metric
from paceline.layouts.sweep.result import (
    Prediction,
    SweepRow,
    figure_fields,
    label,
    mark_rows,
    sentences,
    status_counts,
)


def row(
    name: str, speed: float | None = None, memory: float | None = None, **fields: Any
) -> SweepRow:
    """A row that has run, or one without a speed."""
    values: dict[str, Any] = {
        "settings": {"layout.tp": name},
        "layout": Layout(),
        "status": "ok" if speed else "oom",
        "tokens_per_s": speed,
        "step_time_s": 1000 / speed if speed else None,
        "memory_bytes": memory,
    }
    return SweepRow.model_validate({**values, **fields})


def names(rows: tuple[SweepRow, ...], mark: str) -> str:
    return "".join(r.settings["layout.tp"] for r in rows if getattr(r, mark))


def test_the_best_is_the_fastest_and_of_equals_the_one_with_less_memory():
    assert names(mark_rows([row("a", 90), row("b", 100), row("c")]), "best") == "b"
    assert names(mark_rows([row("a", 100, 5.0), row("b", 100, 4.0)]), "best") == "b"


def test_without_any_speed_nothing_is_marked():
    rows = [row("a"), row("b", status="refused")]
    assert mark_rows(rows) == tuple(rows)
    assert list(sentences(rows)) == ["2 combinations: 1 oom, 1 refused"]


def test_rows_within_the_margin_or_their_intervals_are_level_with_the_best():
    wide = {"low_s": 8.0, "high_s": 14.0}
    rows = mark_rows([row("a", 100), row("b", 99.5), row("c", 90), row("d", 90, **wide)])
    assert names(rows, "tied_with_best") == "bd"


def repeated(name: str, speed: float, *shares: float) -> SweepRow:
    """A row whose runs took these multiples of its step time."""
    return row(name, speed, run_step_times_s=tuple(share * 1000 / speed for share in shares))


def test_the_best_of_repeated_rows_comes_with_its_probability():
    rows = mark_rows(
        [
            repeated("a", 100, 0.99, 1, 1.01),
            repeated("b", 98.6, 0.99, 1, 1.01),
            repeated("c", 80, 1),
        ]
    )
    assert names(rows, "tied_with_best") == "b"
    chances = [r.p_best or 0.0 for r in rows]
    assert sum(chances) == pytest.approx(1.0) and 0.7 < chances[0] < 0.99 > chances[1] > 0.02
    first = next(sentences(rows))
    assert f"the fastest with {chances[0]:.0%} probability; within noise" in first


def test_rows_that_ran_once_say_that_nobody_knows_how_sure_the_best_is():
    rows = mark_rows([repeated("a", 100, 1.0), repeated("b", 90, 1.0)])
    assert rows[0].p_best is None
    assert any("each layout ran once" in sentence for sentence in sentences(rows))


def test_the_front_holds_what_nothing_beats_in_both():
    rows = mark_rows(
        [
            row("a", 100, 9.0),
            row("b", 80, 5.0),
            row("c", 80, 6.0),
            row("d", 70, 7.0),
            row("e", 20, 1.0),
            row("f", 100),
            row("g"),
        ]
    )
    assert names(rows, "pareto") == "abe"


def test_two_rows_that_are_alike_stand_both_on_the_front():
    assert names(mark_rows([row("a", 80, 5.0), row("b", 80, 5.0)]), "pareto") == "ab"


def test_sentences_name_the_best_and_count_the_others():
    lines = list(
        sentences(mark_rows([row("1", 100), row("2", 99.9), row("4"), row("8", status="refused")]))
    )
    assert lines[0] == "best: tp 1, 100 tokens/s, 10.00 s per step; within noise of it: tp 2"
    assert lines[1] == "4 combinations: 2 ok, 1 oom, 1 refused"


def test_predictions_are_held_against_what_was_measured():
    expected = Prediction(
        step_time_s=11.0, low_s=9, high_s=13, memory_bytes=1e9, p_oom=0.05, memory="fits"
    )
    rows = [row("a", 100, prediction=expected), row("b", prediction=expected)]
    assert rows[0].prediction_error == pytest.approx(0.1)
    assert rows[1].prediction_error is None
    assert "median error 9.5%" in list(sentences(rows))[-1]


def test_settings_are_named_in_short():
    fields = {
        "layout.tp": "2",
        "layout.micro_batch": "4",
        "layout.zero_stage": "1",
        "training.lr": "1e-3",
    }
    assert label(fields) == "tp 2 mbs 4 zero 1 lr 1e-3"


def test_statuses_are_counted_with_answers_first():
    rows = [
        row("a", status="refused"),
        row("b"),
        row("c", 1.0),
        row("d", status="waiting"),
        row("e"),
    ]
    assert status_counts(rows) == "5 combinations: 1 ok, 2 oom, 1 waiting, 1 refused"


def test_memory_is_that_of_the_device_where_it_is_known_and_says_its_kind():
    figures = {
        "step_time_s": Metric(value=0.5, unit="s", n=9, low=0.4, high=0.6, spread=0.1),
        "padded_tokens_per_s": Metric(value=2000.0, unit="tokens/s"),
        "tokens_per_s": Metric(value=1500.0, unit="tokens/s"),
        "memory_resident_bytes": Metric(value=3e9, unit="B"),
        "memory_reserved_bytes": Metric(value=2e9, unit="B"),
        "memory_device_used_bytes": Metric(value=None, unit="B", note="unknown"),
    }
    fields = figure_fields(figures)
    assert (fields["memory_bytes"], fields["memory_kind"]) == (2e9, "reserved")
    assert fields["tokens_per_s"] == 2000.0 and fields["mfu"] is None
    assert (fields["step_time_s"], fields["low_s"], fields["n"]) == (0.5, 0.4, 9)


def test_a_run_without_figures_gives_none():
    assert {*figure_fields({}).values()} == {None}
