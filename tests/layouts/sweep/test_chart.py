"""A sweep as rows of a table and as a chart."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.layout import Layout
from paceline.layouts.sweep.chart import front_chart
from paceline.layouts.sweep.result import Prediction, SweepResult, SweepRow, marked
from paceline.layouts.sweep.table import memory_note, memory_text, notes, sweep_rows
from paceline.report.theme import EXPORT, ON_PAGE

EXPECTED = Prediction(step_time_s=2.0, low_s=1.5, high_s=2.5, memory_bytes=3e9, p_oom=0.4)


def row(
    micro_batch: int, status: str = "ok", speed: float | None = None, **fields: Any
) -> SweepRow:
    return SweepRow.model_validate(
        {
            "settings": {"layout.micro_batch": str(micro_batch)},
            "status": status,
            "layout": Layout(micro_batch=micro_batch, tp=2),
            "tokens_per_s": speed,
            "step_time_s": 1.0 if speed else None,
            "memory_kind": "resident" if speed else None,
            "memory_bytes": 2.0**30 * micro_batch if speed else None,
            **fields,
        }
    )


def result(*rows: SweepRow) -> SweepResult:
    return SweepResult(
        name="s",
        recipe="r",
        dimensions={"layout.micro_batch": ("1",)},
        flops_convention="six-n",
        rows=marked(rows),
    )


def test_a_row_is_flat_with_layout_prediction_and_error():
    (flat,) = sweep_rows(result(row(4, speed=100.0, prediction=EXPECTED, runs=("a", "b"))))
    assert (flat["tp"], flat["micro_batch"], flat["tokens_per_s"]) == (2, 4, 100.0)
    assert (flat["predicted_s"], flat["prediction_error"]) == (2.0, pytest.approx(1.0))
    assert flat["runs"] == "a b" and flat["notes"] == "best, on the front"
    assert not any(isinstance(value, dict) for value in flat.values())


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (row(1, "oom", reason="no room"), "OOM: no room"),
        (row(1, "nan"), "NaN"),
        (row(1, "oom", reason="x" * 99), "OOM: " + "x" * 80 + "..."),
        (row(1, "refused", reason="x" * 99), "refused: " + "x" * 99),
        (row(1, "refused", reason="tp 3 divides nothing"), "refused: tp 3 divides nothing"),
        (row(1, "waiting"), "waiting"),
        (row(1, "waiting", prediction=EXPECTED), "waiting, out of memory with 40%"),
        (row(1, "ok", 5.0), ""),
        (row(1, "ok", 5.0, level=True), "level with the best"),
        (row(1, "ok", 5.0, best=True, pareto=True), "best, on the front"),
    ],
)
def test_notes_say_why_there_is_no_figure_or_what_sets_a_row_apart(one: SweepRow, words: str):
    assert notes(one) == words


def test_the_chart_shows_every_row_with_speed_and_memory_and_joins_the_front():
    drawn = front_chart(
        result(row(1, speed=50.0), row(2, speed=80.0), row(4, speed=70.0), row(8, "oom")), EXPORT
    )
    assert drawn is not None
    layers = {layer["name"]: layer["data"]["values"] for layer in drawn.to_dict()["layer"]}
    assert len(layers["layouts"]) == 3
    assert [point["label"] for point in layers["front"]] == ["mbs 1", "mbs 2"]


def test_one_row_makes_no_chart():
    assert front_chart(result(row(1, speed=50.0), row(8, "oom")), ON_PAGE) is None


def test_memory_names_its_kind():
    assert (
        memory_note(result(row(1, speed=5.0)))
        == "Memory: peak resident set of the process, largest rank."
    )
    assert memory_note(result(row(1, "oom"))) == ""
    assert memory_text(None) == "-" and memory_text(2.0**30 * 1.5) == "1.50"
