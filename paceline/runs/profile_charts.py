"""The charts of a profile: the step by category and rank, memory over a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt

from paceline.core.units import MIB, counted, percent
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
"""The palette's colour of each category, in the order of the bars."""
MAX_CURVES = 4
CURVE_HEIGHT = 220


def profile_charts(profile: Profile, name: str, look: ChartTheme) -> dict[str, alt.LayerChart]:
    """The step by category of every rank, and the way from the peak, where they are known."""
    charts: dict[str, alt.LayerChart] = {}
    if profile.breakdowns:
        charts["categories"] = categories_chart(profile, name, look)
    if profile.waterfall:
        peak = f"the peak ({profile.peak_source})" if profile.peak_source else "the peak"
        charts["waterfall"] = waterfall_chart(profile.waterfall, look, name, peak)
    if any(curve.curve for curve in profile.memory):
        charts["memory"] = memory_chart(profile.memory, name, look)
    return charts


def categories_chart(profile: Profile, name: str, look: ChartTheme) -> alt.LayerChart:
    """A bar a rank: its mean step, cut into categories."""
    ranks = profile.ranks[:MAX_RANKS]
    rows = [row for rank in ranks for row in _segments(profile, rank)]
    used = [part for part in COLOURS if any(row["part"] == TITLES[part] for row in rows)]
    colours = [getattr(look.palette, COLOURS[part]) for part in used]
    bars = (
        alt.Chart(alt.Data(values=rows), name="categories")
        .mark_bar(height=16, stroke=look.palette.card, strokeWidth=1)
        .encode(
            x=alt.X("start:Q", title="seconds of a step", axis=alt.Axis(grid=True, tickCount=6)),
            x2="end:Q",
            y=alt.Y(
                "rank:N",
                title=None,
                sort=[f"rank {rank}" for rank in ranks],
                axis=alt.Axis(grid=False),
            ),
            color=alt.Color(
                "part:N",
                scale=alt.Scale(domain=[TITLES[part] for part in used], range=colours),
                legend=alt.Legend(columns=3),
            ),
            tooltip=[
                alt.Tooltip("rank:N", title="of"),
                alt.Tooltip("part:N"),
                alt.Tooltip("seconds:Q", format=".4~f"),
                alt.Tooltip("share:N", title="of the step"),
            ],
        )
    )
    notes = ["Mean of the profiled steps; every moment of a step belongs to one category."]
    if len(profile.ranks) > MAX_RANKS:
        notes.append(f"The first {MAX_RANKS} of {len(profile.ranks):,} ranks.")
    return finish_chart(
        [bars], look, "Where a step's time goes", notes, 80 + ROW_HEIGHT * len(ranks), name
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


def memory_chart(curves: Sequence[RankCurve], name: str, look: ChartTheme) -> alt.LayerChart:
    """A line a rank over the step in which its peak is, of the ranks with the highest peaks."""
    shown = sorted(curves, key=lambda curve: -curve.peak_bytes)[:MAX_CURVES]
    rows = [
        {"rank": f"rank {curve.rank}", "at": point.at_s, "memory": point.bytes / MIB}
        for curve in shown
        for point in curve.curve
    ]
    palette = look.palette
    colours = [palette.steady, palette.accent, palette.good, palette.warmup]
    lines = (
        alt.Chart(alt.Data(values=rows), name="memory")
        .mark_line(interpolate="step-after", strokeWidth=1.5)
        .encode(
            x=alt.X("at:Q", title="seconds since the step began"),
            y=alt.Y("memory:Q", title="MiB", scale=alt.Scale(zero=False)),
            color=alt.Color(
                "rank:N",
                scale=alt.Scale(domain=[f"rank {c.rank}" for c in shown], range=colours),
                legend=alt.Legend(symbolStrokeWidth=2),
            ),
        )
    )
    notes = [f"What is {shown[0].kind}, in the step with the peak of each rank."]
    if len(curves) > len(shown):
        notes.append(f"The {MAX_CURVES} highest of {counted(len(curves), 'rank')}.")
    return finish_chart([lines], look, "Memory over a step", notes, CURVE_HEIGHT, name)
