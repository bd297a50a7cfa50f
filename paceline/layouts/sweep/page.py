"""The columns of a sweep's table as people read it, and the page of a sweep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import altair as alt

from paceline.core.units import TERA, significant
from paceline.layouts.sweep.chart import HEIGHT, front_chart, memory_note, memory_text, sweep_rows
from paceline.layouts.sweep.result import SweepResult
from paceline.report.figures import one_line, printable
from paceline.report.html import render_page
from paceline.report.step_charts import finish
from paceline.report.theme import ON_PAGE, Look

NO_SPEED = "x"
"""Where a run ended without one."""
TRIED = ("oom", "nan", "timeout", "failed", "incomplete")
FIXED = ("layout.tp", "layout.pp", "layout.micro_batch", "layout.recompute")
"""Fields that every table shows."""
MOST_ROWS = 500


@dataclass(frozen=True)
class Shown:
    """One column: its key in the rows, its title, and how a value is written."""

    key: str
    title: str
    write: Callable[[Any], str] = str
    is_number: bool = True


def shown_columns(result: SweepResult) -> list[Shown]:
    """The columns of published studies, those of further settings that vary, and predictions if any."""
    short = (("nodes", "nodes"), ("tp", "TP"), ("pp", "PP"), ("dp", "DP"), ("micro_batch", "MBS"))
    columns = [Shown(key, title) for key, title in short]
    columns.append(Shown("recompute", "recompute", is_number=False))
    further = [name for name in result.dimensions if name not in FIXED]
    columns += [Shown(name, name.rpartition(".")[2]) for name in further]
    columns += [
        Shown("step_time_s", "s/iteration", _number),
        Shown("tokens_per_s", "tokens/s", lambda value: f"{value:,.0f}"),
        Shown("tflops", "TFLOP/s", _number),
        Shown("memory", "memory GiB"),
    ]
    if any(row.prediction for row in result.rows):
        columns += [
            Shown("predicted_s", "predicted s", _number),
            Shown("prediction_error", "error", lambda e: f"{100 * e:+.1f} %"),
            Shown("predicted_memory", "predicted GiB"),
        ]
    return [*columns, Shown("notes", "notes", is_number=False)]


def for_people(row: dict[str, Any]) -> dict[str, Any]:
    """The row with an x where a run ended without a speed, and in the units of the table."""
    flops, failed = row["hardware_flops_per_s_per_device"], row["status"] in TRIED
    return {
        **row,
        "step_time_s": NO_SPEED if failed else row["step_time_s"],
        "tflops": NO_SPEED if failed else flops and flops / TERA,
        "memory": memory_text(row["memory_bytes"]),
        "predicted_memory": memory_text(row["predicted_memory_bytes"]),
    }


def table_note(result: SweepResult) -> str:
    """What stands below the table: how FLOPs are counted, and of what the memory is."""
    counted = (
        f"TFLOP/s of a device, recomputation counted ({result.flops_convention}); "
        "layouts are ranked by tokens/s."
    )
    return f"{counted} {memory_note(result)}".strip()


def sweep_html(result: SweepResult) -> str:
    """The page of one sweep; it opens without a network, and whatever a user wrote is escaped."""
    columns = shown_columns(result)
    best = result.best
    varied = [f"{name}: {', '.join(values)}" for name, values in result.dimensions.items()]
    return render_page(
        "sweep.html.j2",
        sweep_charts(result, ON_PAGE),
        name=printable(result.name),
        chip=f"best: {one_line(best.label)}" if best else "no layout has a speed",
        tone="good" if best else "alert",
        setup=[one_line(part) for part in (result.recipe, *varied)],
        sentences=[one_line(sentence) for sentence in result.sentences],
        unfinished=printable(result.halted or ("broken off" if result.interrupted else "")),
        heads=[column.title for column in columns],
        rows=[[_cell(row, column) for column in columns] for row in _rows(result)],
        left_out=max(0, len(result.rows) - MOST_ROWS),
        note=table_note(result),
    )


def sweep_charts(result: SweepResult, look: Look) -> dict[str, alt.LayerChart]:
    """Speed over memory, and predicted over measured step time, where there is enough to draw."""
    charts = {"front": front_chart(result, look), "agreement": agreement_chart(result, look)}
    return {name: chart for name, chart in charts.items() if chart is not None}


def agreement_chart(result: SweepResult, look: Look) -> alt.LayerChart | None:
    """Predicted over measured step time with the 80 % intervals; None without any prediction."""
    points = [
        {
            "measured": row.step_time_s,
            "predicted": row.prediction.step_time_s,
            "low": row.prediction.low_s,
            "high": row.prediction.high_s,
            "label": row.label,
        }
        for row in result.rows
        if row.ok and row.step_time_s and row.prediction
    ]
    if not points:
        return None
    every = [
        value for one in points for name in ("measured", "low", "high") if (value := one[name])
    ]
    scale = alt.Scale(type="log", domain=[0.9 * min(every), 1.1 * max(every)], nice=False)
    x = alt.X("measured:Q", title="measured (s a step)", scale=scale)
    ends = [{"at": 0.9 * min(every)}, {"at": 1.1 * max(every)}]
    equal = (
        alt.Chart(alt.Data(values=ends), name="equal")
        .mark_line(color=look.palette.warmup, strokeDash=[4, 3])
        .encode(x=alt.X("at:Q", scale=scale), y=alt.Y("at:Q", scale=scale))
    )
    data = alt.Data(values=points)
    bars = (
        alt.Chart(data, name="intervals")
        .mark_rule(color=look.palette.steady, opacity=0.5)
        .encode(x=x, y=alt.Y("low:Q", title="predicted (s a step)", scale=scale), y2="high:Q")
    )
    dots = (
        alt.Chart(data, name="layouts")
        .mark_circle(opacity=1, size=60, color=look.palette.accent)
        .encode(
            x=x,
            y=alt.Y("predicted:Q", scale=scale),
            tooltip=[
                alt.Tooltip("label:N"),
                alt.Tooltip("measured:Q", format=".4g"),
                alt.Tooltip("predicted:Q", format=".4g"),
            ],
        )
    )
    note = "Dot: one layout. Bar: 80 % interval of the prediction. Dashed: predicted as measured."
    return finish([equal, bars, dots], look, "Predicted against measured", [note], HEIGHT)


def _rows(result: SweepResult) -> list[dict[str, Any]]:
    shown = result.model_copy(update={"rows": result.rows[:MOST_ROWS]})
    return [for_people(row) for row in sweep_rows(shown)]


def _cell(row: dict[str, Any], column: Shown) -> str:
    value = row.get(column.key)
    return "-" if value is None or value == "" else one_line(str(column.write(value)))


def _number(value: Any) -> str:
    return value if isinstance(value, str) else significant(value, 3)
