"""The charts of a comparison: every run as a dot, every metric's change with its interval."""

from __future__ import annotations

from typing import Any

import altair as alt

from paceline.compare.judgement import (
    Comparison,
    SideFigure,
    SideSummary,
    independent_metrics,
    lead_metric,
)
from paceline.core.text import one_line
from paceline.core.units import percent
from paceline.report.step_charts import finish_chart
from paceline.report.theme import ChartTheme

ROW_HEIGHT = 26
SIDES = ("baseline", "candidate")


def comparison_charts(comparison: Comparison, look: ChartTheme) -> dict[str, alt.LayerChart]:
    """The runs of both sides, and the changes of all metrics, where there is enough to draw."""
    charts = {"sides": sides_chart(comparison, look), "changes": changes_chart(comparison, look)}
    return {name: chart for name, chart in charts.items() if chart is not None}


def sides_chart(comparison: Comparison, look: ChartTheme) -> alt.LayerChart | None:
    """The figure of every run, one row of dots a side; None without figures of both."""
    lead = lead_metric(comparison)
    if lead is None:
        return None
    rows = [
        *_run_rows(SIDES[0], lead.baseline, comparison.baseline),
        *_run_rows(SIDES[1], lead.candidate, comparison.candidate),
    ]
    if {row["side"] for row in rows} != set(SIDES):
        return None
    y = alt.Y("side:N", title=None, sort=list(SIDES), axis=alt.Axis(labelLimit=180))
    title = f"{lead.metric} ({lead.unit})"
    x = alt.X("value:Q", title=title, scale=alt.Scale(zero=False, padding=18))
    base = alt.Chart(alt.Data(values=rows))
    dots = (
        base.properties(name="runs")
        .mark_circle(opacity=0.7, size=80)
        .encode(
            x=x,
            y=y,
            color=alt.Color(
                "side:N",
                legend=None,
                scale=alt.Scale(
                    domain=list(SIDES), range=[look.palette.steady, look.palette.accent]
                ),
            ),
            tooltip=[alt.Tooltip("run:N"), alt.Tooltip("value:Q", title=title, format=".5~g")],
        )
    )
    middles = [
        {"side": side, "value": figure.value}
        for side, figure in zip(SIDES, (lead.baseline, lead.candidate), strict=True)
        if figure.value is not None
    ]
    marks = (
        alt.Chart(alt.Data(values=middles), name="means")
        .mark_tick(color=look.palette.ink, thickness=2, size=34)
        .encode(x=x, y=y)
    )
    note = "Dot: one run, the median of its steady steps. Mark: geometric mean of the side."
    return finish_chart(
        [dots, marks],
        look,
        "Every run",
        [note],
        max(150, _changes_height(comparison)),
        comparison.title,
    )


def _run_rows(side: str, figure: SideFigure, summary: SideSummary) -> list[dict[str, Any]]:
    """A row for each run of a side, or one for a figure whose runs are not known."""
    values = figure.values or ((figure.value,) if figure.value is not None else ())
    names = summary.runs if len(summary.runs) == len(values) else [summary.name] * len(values)
    return [
        {"side": side, "value": value, "run": one_line(name)}
        for value, name in zip(values, names, strict=True)
    ]


def changes_chart(comparison: Comparison, look: ChartTheme) -> alt.LayerChart | None:
    """Change of each metric with its interval; None where no metric has a ratio."""
    rows = [
        {
            "metric": metric.metric,
            "change": 100 * (metric.ratio - 1),
            "low": 100 * ((metric.low or metric.ratio) - 1),
            "high": 100 * ((metric.high or metric.ratio) - 1),
            "verdict": metric.verdict,
        }
        for metric in independent_metrics(comparison)
        if metric.ratio is not None
    ]
    if not rows:
        return None
    margin = 100 * comparison.margin
    y = alt.Y(
        "metric:N",
        title=None,
        sort=[row["metric"] for row in rows],
        axis=alt.Axis(labelLimit=190),
    )
    base = alt.Chart(alt.Data(values=rows)).encode(y=y)
    x = alt.X("low:Q", title="candidate against baseline (%)", axis=alt.Axis(grid=True))
    palette = look.palette
    band = (
        alt.Chart(alt.Data(values=[{"low": -margin, "high": margin}]), name="margin")
        .mark_rect(color=palette.shade)
        .encode(x=x, x2="high:Q")
    )
    bars = base.properties(name="intervals").mark_rule(color=palette.steady, strokeWidth=2)
    dots = base.properties(name="changes").mark_circle(opacity=1, size=80, color=palette.accent)
    tips = [
        alt.Tooltip("metric:N"),
        alt.Tooltip("change:Q", title="change (%)", format="+.2f"),
        alt.Tooltip("verdict:N"),
    ]
    layers = [
        band,
        bars.encode(x=x, x2="high:Q"),
        dots.encode(x=alt.X("change:Q"), tooltip=tips),
    ]
    note = f"Dot: change. Line: its 95% interval. Ground: the margin of {percent(margin / 100, 2)}."
    height = _changes_height(comparison)
    return finish_chart(layers, look, "Change of each figure", [note], height, comparison.title)


def _changes_height(comparison: Comparison) -> int:
    return 30 + ROW_HEIGHT * sum(
        metric.ratio is not None for metric in independent_metrics(comparison)
    )
