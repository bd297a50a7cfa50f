"""Charts of a scaling analysis: throughput, speed-up, efficiency, and speed of single nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import altair as alt

from paceline.core.node_groups import GroupThroughput, by_size
from paceline.core.text import printable
from paceline.report.step_charts import WHOLE_LABELS, finish_chart
from paceline.report.theme import ChartTheme
from paceline.scaling.analysis.result import ScaleResult
from paceline.scaling.campaigns.result import CampaignResult

HEIGHT = 260
MAX_NAMES = 8
T = TypeVar("T")
MAX_DOTS = 500
"""Maximum number of dots of one size, or of nodes; the extreme values are always included."""


def scaling_charts(
    result: ScaleResult,
    measured: Sequence[GroupThroughput],
    look: ChartTheme,
    reference: float | None = None,
    whose: str = "",
) -> dict[str, alt.LayerChart]:
    """Return the charts by name.

    `reference` is a healthy node's samples/s, known from elsewhere; `whose` names the results in
    the titles.
    """
    charts = {
        "throughput": throughput(result, measured, look, reference, whose),
        "efficiency": efficiency(result, measured, look, reference, whose),
    }
    if isinstance(result, CampaignResult) and len(result.sizes) + len(result.below_one_node) > 1:
        charts["speedup"] = speedup(result, look, whose)
    if len(result.nodes) > 1:
        charts["nodes"] = nodes(result, look, whose)
    return charts


def throughput(
    result: ScaleResult,
    measured: Sequence[GroupThroughput],
    look: ChartTheme,
    reference: float | None = None,
    whose: str = "",
) -> alt.LayerChart:
    """Chart samples/s over nodes on log axes: sub-clusters, and lines for ideal and reference."""
    y = alt.Y(
        "value:Q",
        title="throughput (samples/s)",
        scale=alt.Scale(type="log", nice=False),
        axis=alt.Axis(tickCount=5, format=",~r"),
    )
    per_node = result.base.value / result.base.nodes
    lines = [("ideal", per_node)] + ([("reference", reference)] if reference else [])
    ends = [result.sizes[0].nodes, result.sizes[-1].nodes]
    ideal = [
        _line(name, [{"nodes": n, "value": rate * n} for n in ends], y, look)
        for name, rate in lines
    ]
    return finish_chart(
        [*ideal, _dots(measured, y, look, 1.0)],
        look,
        "Throughput",
        [f"Dot: one sub-cluster. Dashed: {_ideal_words(result)}.{_reference_words(reference)}"],
        HEIGHT,
        whose,
    )


def efficiency(
    result: ScaleResult,
    measured: Sequence[GroupThroughput],
    look: ChartTheme,
    reference: float | None = None,
    whose: str = "",
) -> alt.LayerChart:
    """Chart the share of the ideal over nodes: sub-clusters, and each size's mean and interval."""
    per_node = result.base.value / result.base.nodes
    y = alt.Y("value:Q", title="efficiency (%)", scale=alt.Scale(zero=False, padding=14))
    rows: list[dict[str, Any]] = [
        {
            "nodes": size.nodes,
            "value": 100 * size.efficiency,
            "low": 100 * (size.low or size.efficiency),
            "high": 100 * (size.high or size.efficiency),
        }
        for size in result.sizes
    ]
    mean = alt.Chart(alt.Data(values=rows)).encode(x=_x(), y=y)
    ends = [result.sizes[0].nodes, result.sizes[-1].nodes]
    lines = [("ideal", 100.0)] + ([("reference", 100 * reference / per_node)] if reference else [])
    layers = [
        *(_line(name, [{"nodes": n, "value": v} for n in ends], y, look) for name, v in lines),
        _dots(measured, y, look, 100 / per_node, per_node=True),
        mean.properties(name="intervals")
        .mark_rule(color=look.palette.accent, strokeWidth=1.5)
        .encode(y="low:Q", y2="high:Q"),
        mean.properties(name="means")
        .mark_tick(color=look.palette.accent, thickness=2.5, width=16)
        .encode(tooltip=[alt.Tooltip("nodes:Q"), alt.Tooltip("value:Q", title="%", format=".2f")]),
    ]
    note = (
        f"Dot: one sub-cluster. Mark: mean of the size, line: its 95% interval. 100%: "
        f"{_ideal_words(result)}, {result.scaling} scaling.{_reference_words(reference)}"
    )
    return finish_chart(layers, look, "Efficiency", [note], HEIGHT, whose)


def speedup(result: CampaignResult, look: ChartTheme, whose: str = "") -> alt.LayerChart:
    """Chart samples/s over GPUs relative to the smallest measured number, with the ratios.

    Parts of a node come first, so a campaign with one GPU starts at a speed-up of 1.00.
    """
    gpus = result.devices_per_node
    values = {part.devices: part.value for part in result.below_one_node}
    values |= {size.nodes * gpus: size.value for size in result.sizes}
    smallest = min(values)
    rows = [{"gpus": n, "value": values[n] / values[smallest]} for n in sorted(values)]
    unit = "1 GPU" if smallest == 1 else f"{smallest} GPUs"
    y = alt.Y(
        "value:Q",
        title=f"speed-up over {unit}",
        scale=alt.Scale(type="log", nice=False, padding=14),
        axis=alt.Axis(tickCount=5, format=",~r"),
    )
    ideal = [{"gpus": n, "value": n / smallest} for n in (smallest, max(values))]
    base = alt.Chart(alt.Data(values=rows), name="speed-ups").encode(x=_x("gpus"), y=y)
    layers = [
        _line("ideal", ideal, y, look, "gpus"),
        base.mark_line(
            color=look.palette.accent,
            strokeWidth=1.5,
            point=alt.OverlayMarkDef(color=look.palette.accent),
        ),
        base.properties(name="ratios")
        .mark_text(color=look.palette.ink, align="right", dx=-6, dy=-8)
        .encode(text=alt.Text("value:Q", format=".2f")),
    ]
    note = f"Mean of each size. Dashed: ideal, {values[smallest]:.6g} samples/s on {unit}."
    return finish_chart(layers, look, "Speed-up", [note], HEIGHT, whose)


def nodes(result: ScaleResult, look: ChartTheme, whose: str = "") -> alt.LayerChart:
    """Chart every node alone, the slowest first; flagged nodes are labelled in another colour."""
    rows = [
        {
            "rank": at,
            "host": printable(node.host),
            "speed": node.value,
            "value": 100 * (1 - node.loss),
            "flagged": node.host in result.flagged,
        }
        for at, node in enumerate(result.nodes, start=1)
    ]
    num_nodes = len(rows)
    half = MAX_DOTS // 2
    # Keep the slow end complete: it is what the chart is for.
    rows = rows[:half] + _every(rows[half:], half) if num_nodes > MAX_DOTS else rows
    x = alt.X(
        "rank:Q",
        title="node, slowest first",
        axis=alt.Axis(format=",d", tickMinStep=1),
        scale=alt.Scale(domain=[0.5, num_nodes + 0.5], nice=False),
    )
    y = alt.Y(
        "value:Q", title="speed alone (% of reference)", scale=alt.Scale(zero=False, padding=14)
    )
    base = alt.Chart(alt.Data(values=rows), name="alone").encode(x=x, y=y)
    dots = base.mark_circle(opacity=1, size=60 if len(rows) <= 128 else 22).encode(
        color=alt.condition(
            alt.datum["flagged"], alt.value(look.palette.accent), alt.value(look.palette.steady)
        ),
        tooltip=[
            alt.Tooltip("host:N", title="node"),
            alt.Tooltip("speed:Q", title="alone (samples/s)", format=",.5~r"),
            alt.Tooltip("value:Q", title="of reference (%)", format=".2f"),
        ],
    )
    labels = [row for row in rows if row["flagged"]][:MAX_NAMES] or rows[:1]
    colour = look.palette.accent if labels[0]["flagged"] else look.palette.ink
    names = (
        alt.Chart(alt.Data(values=labels), name="names")
        .mark_text(color=colour, align="left", dx=8, fontWeight="bold", limit=220)
        .encode(x=x, y=y, text="host:N")
    )
    smallest = result.smallest_fault_found
    note = (
        "The smallest detectable fault is unknown."
        if smallest is None
        else f"A node {100 * smallest:.1f}% slower would be detected in 9 of 10 cases."
    )
    return finish_chart([dots, names], look, "Nodes alone", [note], HEIGHT, whose)


def _x(unit: str = "nodes") -> alt.X:
    return alt.X(
        f"{unit}:Q",
        title="GPUs" if unit == "gpus" else unit,
        scale=alt.Scale(type="log", base=2, padding=14),
        axis=alt.Axis(labelExpr=WHOLE_LABELS),
    )


def _dots(
    measured: Sequence[GroupThroughput],
    y: alt.Y,
    look: ChartTheme,
    times: float,
    per_node: bool = False,
) -> alt.Chart:
    rows = [
        {
            "nodes": size,
            "value": (group.samples_per_s or 0.0) * times / (size if per_node else 1),
            "hosts": printable(group.hosts[0]) + (f" and {size - 1} more" if size > 1 else ""),
        }
        for size, groups in by_size(measured).items()
        for group in _thin(groups)
    ]
    return (
        alt.Chart(alt.Data(values=rows), name="sub-clusters")
        .mark_circle(opacity=0.45, size=34, color=look.palette.steady)
        .encode(
            x=_x(),
            y=y,
            tooltip=[
                alt.Tooltip("hosts:N", title="on"),
                alt.Tooltip("nodes:Q"),
                alt.Tooltip("value:Q", title="%" if per_node else "samples/s", format=",.5~r"),
            ],
        )
    )


def _thin(groups: Sequence[GroupThroughput]) -> list[GroupThroughput]:
    return _every(sorted(groups, key=lambda group: group.samples_per_s or 0.0), MAX_DOTS)


def _every(items: Sequence[T], max_items: int) -> list[T]:
    """Return up to `most` items at equal distances, and the last."""
    step = -(-len(items) // max_items)
    return list(items[::step]) + ([items[-1]] if step > 1 else [])


def _line(
    name: str, rows: list[dict[str, float]], y: alt.Y, look: ChartTheme, unit: str = "nodes"
) -> alt.Chart:
    colour = look.palette.ink if name == "ideal" else look.palette.good
    return (
        alt.Chart(alt.Data(values=rows), name=name)
        .mark_line(color=colour, strokeDash=[4, 3], strokeWidth=1.2)
        .encode(x=_x(unit), y=y)
    )


def _ideal_words(result: ScaleResult) -> str:
    group = "" if result.base.nodes == 1 else f" of {result.base.nodes}"
    return f"ideal, {result.base.statistic}{group} ({result.base.value:.6g} samples/s)"


def _reference_words(reference: float | None) -> str:
    return f" Green: the reference, {reference:.6g} samples/s per node." if reference else ""
