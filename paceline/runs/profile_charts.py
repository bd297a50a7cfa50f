"""Charts of a profile: the step by category and rank, and memory over a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt

from paceline.core.units import MIB, percent, pluralize
from paceline.profiles.breakdown import TITLES, MeanBreakdown
from paceline.profiles.profile import Profile, RankCurve
from paceline.report.step_charts import finish_chart
from paceline.report.theme import ChartTheme
from paceline.report.waterfall import waterfall_chart

MAX_RANKS = 32
ROW_HEIGHT = 26
COLOURS = {
    "gemm": "steady",
    "attention": "steady_soft",
    "memory_bound": "band",
    "optimizer": "good",
    "communication_exposed": "accent",
    "bubble": "good_soft",
    "data_wait": "ink",
    "host_gap": "warmup",
    "other": "warmup_soft",
}
"""Palette colour of each category, in the order of the bars."""
MAX_CURVES = 4
CURVE_HEIGHT = 220


def profile_charts(profile: Profile, name: str, theme: ChartTheme) -> dict[str, alt.LayerChart]:
    """Return the charts of step categories, MFU waterfall and memory, as far as known."""
    charts: dict[str, alt.LayerChart] = {}
    if profile.breakdowns:
        charts["categories"] = categories_chart(profile, name, theme)
    if profile.waterfall:
        peak = f"the peak ({profile.peak_source})" if profile.peak_source else "the peak"
        charts["waterfall"] = waterfall_chart(profile.waterfall, theme, name, peak)
    if any(curve.curve for curve in profile.memory):
        charts["memory"] = memory_chart(profile.memory, name, theme)
    return charts


def categories_chart(profile: Profile, name: str, theme: ChartTheme) -> alt.LayerChart:
    """Return a chart with one bar per rank: its mean step by category."""
    ranks = profile.ranks[:MAX_RANKS]
    rows = [row for rank in ranks for row in _segments(profile, rank)]
    shown_parts = [part for part in COLOURS if any(row["part"] == TITLES[part] for row in rows)]
    colours = [getattr(theme.palette, COLOURS[part]) for part in shown_parts]
    bars = (
        alt.Chart(alt.Data(values=rows), name="categories")
        .mark_bar(height=16, stroke=theme.palette.card, strokeWidth=1)
        .encode(
            x=alt.X("start:Q", title="step time (s)", axis=alt.Axis(grid=True, tickCount=6)),
            x2="end:Q",
            y=alt.Y(
                "rank:N",
                title=None,
                sort=[f"rank {rank}" for rank in ranks],
                axis=alt.Axis(grid=False),
            ),
            color=alt.Color(
                "part:N",
                scale=alt.Scale(domain=[TITLES[part] for part in shown_parts], range=colours),
                legend=alt.Legend(columns=3),
            ),
            tooltip=[
                alt.Tooltip("rank:N"),
                alt.Tooltip("part:N"),
                alt.Tooltip("seconds:Q", format=".4~f"),
                alt.Tooltip("share:N", title="of the step"),
            ],
        )
    )
    notes = ["Mean of the profiled steps. All time of a step belongs to exactly one category."]
    if len(profile.ranks) > MAX_RANKS:
        notes.append(f"The first {MAX_RANKS} of {len(profile.ranks):,} ranks.")
    return finish_chart(
        [bars], theme, "Step time by category", notes, 80 + ROW_HEIGHT * len(ranks), name
    )


def _segments(profile: Profile, rank: int) -> Iterator[dict[str, Any]]:
    mean = MeanBreakdown.of([each for each in profile.breakdowns if each.rank == rank])
    start = 0.0
    for part in COLOURS:
        if part_s := mean.parts[part]:
            yield {
                "rank": f"rank {rank}",
                "part": TITLES[part],
                "start": start,
                "end": start + part_s,
                "seconds": part_s,
                "share": percent(part_s / mean.step_time_s),
            }
            start += part_s


def memory_chart(curves: Sequence[RankCurve], name: str, theme: ChartTheme) -> alt.LayerChart:
    """Return memory over the step with the peak, one line for each of the highest ranks."""
    highest = sorted(curves, key=lambda curve: -curve.peak_bytes)[:MAX_CURVES]
    rows = [
        {"rank": f"rank {curve.rank}", "at": point.at_s, "memory": point.bytes / MIB}
        for curve in highest
        for point in curve.curve
    ]
    palette = theme.palette
    colours = [palette.steady, palette.accent, palette.good, palette.warmup]
    lines = (
        alt.Chart(alt.Data(values=rows), name="memory")
        .mark_line(interpolate="step-after", strokeWidth=1.5)
        .encode(
            x=alt.X("at:Q", title="time since the step started (s)"),
            y=alt.Y("memory:Q", title="MiB", scale=alt.Scale(zero=False)),
            color=alt.Color(
                "rank:N",
                scale=alt.Scale(domain=[f"rank {c.rank}" for c in highest], range=colours),
                legend=alt.Legend(symbolStrokeWidth=2),
            ),
        )
    )
    notes = [f"{highest[0].kind.capitalize()} memory in the step with each rank's peak."]
    if len(curves) > len(highest):
        notes.append(f"The {MAX_CURVES} highest of {pluralize(len(curves), 'rank')}.")
    return finish_chart([lines], theme, "Memory over a step", notes, CURVE_HEIGHT, name)
