"""Charts of a comparison: the runs of both sides, and the change of each metric."""

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


def comparison_charts(comparison: Comparison, theme: ChartTheme) -> dict[str, alt.LayerChart]:
    """Return the charts for which there is enough data, by name."""
    charts = {"sides": sides_chart(comparison, theme), "changes": changes_chart(comparison, theme)}
    return {name: chart for name, chart in charts.items() if chart is not None}


def sides_chart(comparison: Comparison, theme: ChartTheme) -> alt.LayerChart | None:
    """Return a chart with one dot per run and one row per side; None if a side has no values."""
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
                    domain=list(SIDES), range=[theme.palette.steady, theme.palette.accent]
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
        .mark_tick(color=theme.palette.ink, thickness=2, size=34)
        .encode(x=x, y=y)
    )
    note = "Dot: one run, the median of its steady steps. Mark: geometric mean of the side."
    return finish_chart(
        [dots, marks],
        theme,
        "All runs",
        [note],
        max(150, _changes_height(comparison)),
        comparison.title,
    )


def _run_rows(side: str, figure: SideFigure, summary: SideSummary) -> list[dict[str, Any]]:
    """Return one row for each run of a side, or one row if only the side's value is known."""
    values = figure.values or ((figure.value,) if figure.value is not None else ())
    names = summary.runs if len(summary.runs) == len(values) else [summary.name] * len(values)
    return [
        {"side": side, "value": value, "run": one_line(name)}
        for value, name in zip(values, names, strict=True)
    ]


def changes_chart(comparison: Comparison, theme: ChartTheme) -> alt.LayerChart | None:
    """Return a chart of each metric's change with its interval; None if no metric has a ratio."""
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
    palette = theme.palette
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
    note = f"Dot: change. Line: its 95% interval. Shaded: the margin of {percent(margin / 100, 2)}."
    height = _changes_height(comparison)
    return finish_chart(layers, theme, "Change of each metric", [note], height, comparison.title)


def _changes_height(comparison: Comparison) -> int:
    return 30 + ROW_HEIGHT * sum(
        metric.ratio is not None for metric in independent_metrics(comparison)
    )
