"""Charts of a sweep: throughput over memory, and predicted over measured step time."""

from __future__ import annotations

import altair as alt

from paceline.core.units import GIB, pluralize
from paceline.layouts.sweep.result import SweepResult
from paceline.report.step_charts import finish_chart
from paceline.report.theme import ChartTheme

HEIGHT = 280


def sweep_charts(
    result: SweepResult, memory_note: str, look: ChartTheme
) -> dict[str, alt.LayerChart]:
    """Return the charts for which there are enough points."""
    charts = {
        "front": front_chart(result, memory_note, look),
        "agreement": agreement_chart(result, look),
    }
    return {name: chart for name, chart in charts.items() if chart is not None}


def front_chart(result: SweepResult, memory_note: str, look: ChartTheme) -> alt.LayerChart | None:
    """Return tokens/s over memory with the Pareto front; None with fewer than two points."""
    points = [
        {
            "memory": row.memory_bytes / GIB,
            "speed": row.tokens_per_s,
            "label": row.label,
            "pareto": row.pareto,
            "best": row.best,
        }
        for row in result.rows
        if row.ok and row.memory_bytes is not None
    ]
    if len(points) < 2:
        return None
    padded = alt.Scale(zero=False, padding=14)
    x = alt.X("memory:Q", title="memory of the fullest rank (GiB)", scale=padded)
    y = alt.Y("speed:Q", title="throughput (tokens/s)", scale=padded)
    front = [point for point in points if point["pareto"]]
    line = (
        alt.Chart(alt.Data(values=front), name="front")
        .mark_line(interpolate="step-after", color=look.palette.warmup, strokeDash=[4, 3])
        .encode(x=x, y=y)
    )
    dots = (
        alt.Chart(alt.Data(values=points), name="layouts")
        .mark_circle(opacity=1, size=60)
        .encode(
            x=x,
            y=y,
            color=alt.condition(
                alt.datum["pareto"], alt.value(look.palette.accent), alt.value(look.palette.steady)
            ),
            tooltip=[
                alt.Tooltip("label:N", title="layout"),
                alt.Tooltip("speed:Q", title="tokens/s", format=",.0f"),
                alt.Tooltip("memory:Q", title="GiB", format=".2f"),
            ],
        )
    )
    names = (
        alt.Chart(alt.Data(values=front), name="names")
        .mark_text(color=look.palette.accent, align="left", dx=8, dy=-8)
        .encode(x=x, y=y, text="label:N")
    )
    note = "Each dot is one layout. Orange: Pareto front of throughput and memory. "
    note += memory_note
    return finish_chart(
        [line, dots, names], look, "Throughput and memory", [note], HEIGHT, subject(result)
    )


def agreement_chart(result: SweepResult, look: ChartTheme) -> alt.LayerChart | None:
    """Return predicted over measured step time with 80% intervals; None without predictions."""
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
    seconds = [
        value for point in points for name in ("measured", "low", "high") if (value := point[name])
    ]
    first, last = 0.9 * min(seconds), 1.1 * max(seconds)
    scale = alt.Scale(type="log", domain=[first, last], nice=False)
    x = alt.X("measured:Q", title="measured (s per step)", scale=scale)
    diagonal = (
        alt.Chart(alt.Data(values=[{"at": first}, {"at": last}]), name="equal")
        .mark_line(color=look.palette.warmup, strokeDash=[4, 3])
        .encode(x=alt.X("at:Q", scale=scale), y=alt.Y("at:Q", scale=scale))
    )
    data = alt.Data(values=points)
    bars = (
        alt.Chart(data, name="intervals")
        .mark_rule(color=look.palette.steady, opacity=0.5)
        .encode(x=x, y=alt.Y("low:Q", title="predicted (s per step)", scale=scale), y2="high:Q")
    )
    dots = (
        alt.Chart(data, name="layouts")
        .mark_circle(opacity=1, size=60, color=look.palette.accent)
        .encode(
            x=x,
            y=alt.Y("predicted:Q", scale=scale),
            tooltip=[
                alt.Tooltip("label:N", title="layout"),
                alt.Tooltip("measured:Q", title="measured (s)", format=".4g"),
                alt.Tooltip("predicted:Q", title="predicted (s)", format=".4g"),
            ],
        )
    )
    note = (
        "Each dot is one layout with its 80% interval. Dashed line: prediction equals measurement."
    )
    layers, title = [diagonal, bars, dots], "Predicted vs measured step time"
    return finish_chart(layers, look, title, [note], HEIGHT, subject(result))


def subject(result: SweepResult) -> str:
    """Return the recipe and the number of devices that the charts show."""
    devices = {row.devices for row in result.rows if row.ok and row.devices}
    return (
        f"{result.recipe} on {pluralize(devices.pop(), 'device')}"
        if len(devices) == 1
        else result.recipe
    )
