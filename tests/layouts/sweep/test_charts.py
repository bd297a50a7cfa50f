"""The chart of speed and memory."""

from __future__ import annotations

from typing import Any

from paceline.core.layout import Layout
from paceline.layouts.sweep.charts import front_chart
from paceline.layouts.sweep.result import Prediction, SweepResult, SweepRow, mark_rows
from paceline.report.theme import EXPORT, ON_PAGE

EXPECTED = Prediction(
    step_time_s=2.0, low_s=1.5, high_s=2.5, memory_bytes=3e9, p_oom=0.4, memory="borderline"
)


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
        rows=mark_rows(rows),
    )


def test_the_chart_shows_every_row_with_speed_and_memory_and_joins_the_front():
    drawn = front_chart(
        result(row(1, speed=50.0), row(2, speed=80.0), row(4, speed=70.0), row(8, "oom")),
        "",
        EXPORT,
    )
    assert drawn is not None
    layers = {layer["name"]: layer["data"]["values"] for layer in drawn.to_dict()["layer"]}
    assert len(layers["layouts"]) == 3
    assert [point["label"] for point in layers["front"]] == ["mbs 1", "mbs 2"]


def test_one_row_makes_no_chart():
    assert front_chart(result(row(1, speed=50.0), row(8, "oom")), "", ON_PAGE) is None
