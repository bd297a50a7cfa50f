"""The page of a comparison: the verdict, both sides, every run as a dot, every metric's change."""

from __future__ import annotations

from typing import Any

import altair as alt

from paceline.compare.judgement import Comparison, MetricComparison, SideFigure, SideSummary
from paceline.compare.phrases import signed
from paceline.core.text import one_line
from paceline.core.units import counted, percent
from paceline.report.figures import written
from paceline.report.head import Card, PageHead, Tone, card, unknown_card
from paceline.report.html import render_page
from paceline.report.step_charts import finish
from paceline.report.theme import ON_PAGE, Look
from paceline.runs.comparison_text import (
    HEAD,
    MARKS,
    finding_lines,
    metric_cells,
    p_text,
    repeats_text,
    shown,
    summary_lines,
)

ROW_HEIGHT = 26
LONGEST_NAME = 40
TONES: dict[str, Tone] = {"same": "good", "faster": "good", "better": "good", "undecided": "plain"}
"""Every other verdict fails the gate."""
SIDES = ("baseline", "candidate")


def comparison_html(comparison: Comparison) -> str:
    """The page of one comparison; it opens without a network, and what a user wrote is escaped."""
    return render_page(
        "comparison.html.j2",
        _head(comparison),
        comparison_charts(comparison, ON_PAGE),
        heads=HEAD,
        rows=[metric_cells(metric) for metric in shown(comparison)],
        summary=list(summary_lines(comparison)),
        findings=list(finding_lines(comparison)),
    )


def comparison_charts(comparison: Comparison, look: Look) -> dict[str, alt.LayerChart]:
    """The runs of both sides, and the changes of all metrics, where there is enough to draw."""
    charts = {"sides": sides_chart(comparison, look), "changes": changes_chart(comparison, look)}
    return {name: chart for name, chart in charts.items() if chart is not None}


def _head(comparison: Comparison) -> PageHead:
    verdict = comparison.verdict
    suspicious = ", suspicious" if comparison.too_good else ""
    low = " (low confidence)" if comparison.confidence == "low" else ""
    return PageHead(
        eyebrow="two sides compared",
        name=_whose(comparison),
        chip=f"{MARKS[verdict]} {verdict}{suspicious}{low}",
        tone=TONES.get(verdict, "alert"),
        setup=(
            f"margin {percent(comparison.margin, 2)}",
            f"n {comparison.n_a} and {comparison.n_b}",
        ),
        sentences=(one_line(comparison.sentence),),
        cards=comparison_cards(comparison),
    )


def comparison_cards(comparison: Comparison) -> tuple[Card, ...]:
    """The change with its interval, both sides' figures, and how sure the verdict is."""
    lead = lead_metric(comparison)
    return (
        _change_card(comparison, lead),
        _side_card("Baseline", comparison.baseline, lead and lead.baseline, lead),
        _side_card("Candidate", comparison.candidate, lead and lead.candidate, lead),
        _confidence_card(comparison),
    )


def lead_metric(comparison: Comparison) -> MetricComparison | None:
    """The metric that ratio and interval are of, None where nothing could be compared."""
    return next((each for each in comparison.metrics if each.metric == comparison.metric), None)


def _change_card(comparison: Comparison, lead: MetricComparison | None) -> Card:
    if lead is None or comparison.ratio is None:
        return unknown_card("Change", one_line(comparison.sentence))
    interval = "no interval: it takes three runs a side"
    if comparison.low is not None and comparison.high is not None:
        interval = f"{signed(comparison.low)} to {signed(comparison.high)} (95 %)"
    better = {"lower": "less is better", "higher": "more is better"}.get(lead.better or "", "")
    p = None if comparison.p is None else f"p {p_text(comparison.p)}"
    return card(f"Change of {lead.metric}", signed(comparison.ratio), interval, [better, p])


def _side_card(
    label: str, side: SideSummary, figure: SideFigure | None, lead: MetricComparison | None
) -> Card:
    runs = counted(len(side.runs), "run")
    name = _name(side)
    who = f"published: {side.source}" if side.kind == "reference" else runs
    left_out = f"{len(side.left_out)} left out" if side.left_out else None
    if figure is None or lead is None or figure.value is None:
        return unknown_card(label, "it has no such figure", [name, who, left_out])
    spread = "" if figure.spread is None else f"spread {percent(figure.spread, 2)} between runs"
    text = written(figure.value, lead.unit, 4)
    return card(label, text, spread, [name, f"{lead.metric}, {who}", left_out])


def _confidence_card(comparison: Comparison) -> Card:
    lines = [f"{comparison.n_a} and {counted(comparison.n_b, 'run')}", *comparison.why_low]
    if comparison.repeats_needed:
        lines.append(repeats_text(comparison))
    if comparison.differences:
        lines.append(counted(len(comparison.differences), "setting", "differ"))
    return card("Confidence", comparison.confidence, "", lines)


def sides_chart(comparison: Comparison, look: Look) -> alt.LayerChart | None:
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
    return finish(
        [dots, marks],
        look,
        "Every run",
        [note],
        max(150, _changes_height(comparison)),
        _whose(comparison),
    )


def _run_rows(side: str, figure: SideFigure, summary: SideSummary) -> list[dict[str, Any]]:
    """A row for each run of a side, or one for a figure whose runs are not known."""
    values = figure.values or ((figure.value,) if figure.value is not None else ())
    names = summary.runs if len(summary.runs) == len(values) else [summary.name] * len(values)
    return [
        {"side": side, "value": value, "run": one_line(name)}
        for value, name in zip(values, names, strict=True)
    ]


def changes_chart(comparison: Comparison, look: Look) -> alt.LayerChart | None:
    """Change of each metric with its interval; None where no metric has a ratio."""
    rows = [
        {
            "metric": metric.metric,
            "change": 100 * (metric.ratio - 1),
            "low": 100 * ((metric.low or metric.ratio) - 1),
            "high": 100 * ((metric.high or metric.ratio) - 1),
            "verdict": metric.verdict,
        }
        for metric in shown(comparison)
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
    note = (
        f"Dot: change. Line: its 95 % interval. Ground: the margin of {percent(margin / 100, 2)}."
    )
    height = _changes_height(comparison)
    return finish(layers, look, "Change of each figure", [note], height, _whose(comparison))


def _changes_height(comparison: Comparison) -> int:
    return 30 + ROW_HEIGHT * sum(metric.ratio is not None for metric in shown(comparison))


def _whose(comparison: Comparison) -> str:
    return f"{_name(comparison.candidate)} against {_name(comparison.baseline)}"


def _name(side: SideSummary) -> str:
    """The side's name; a list of runs by the first of them and their number."""
    first, *others = side.runs or (side.name,)
    if len(side.name) <= LONGEST_NAME or not others:
        return one_line(side.name)
    return one_line(f"{first} and {len(others)} more")
