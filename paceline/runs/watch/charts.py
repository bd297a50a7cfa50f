"""Chart of a snapshot of a run: how each rank spends a recent step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import altair as alt

from paceline.core.units import pluralize
from paceline.report.step_charts import finish_chart
from paceline.report.theme import ChartTheme
from paceline.runs.watch.page import busiest_ranks, clean
from paceline.runs.watch.state import RankNow, WatchState

BAR_HEIGHT = 26
COLOURS = {"works": "steady", "waits for data": "accent", "waits for ranks": "good_soft"}
"""Palette colour of each part of a step."""


def snapshot_charts(state: WatchState, look: ChartTheme) -> dict[str, alt.LayerChart]:
    """Return a chart with one bar per rank, for the busiest ranks; {} before the first step."""
    rows = [row for rank in busiest_ranks(state) for row in _segments(rank)]
    if not rows:
        return {}
    names = [name for name in COLOURS if any(row["what"] == name for row in rows)]
    ranks = [_rank(rank) for rank in busiest_ranks(state)]
    bars = (
        alt.Chart(alt.Data(values=rows), name="ranks")
        .mark_bar(height=16, stroke=look.palette.card, strokeWidth=1)
        .encode(
            x=alt.X("start:Q", title="seconds of a step", axis=alt.Axis(grid=True, tickCount=6)),
            x2="end:Q",
            y=alt.Y("rank:N", sort=ranks, title=None, axis=alt.Axis(grid=False)),
            color=alt.Color(
                "what:N",
                scale=alt.Scale(
                    domain=names, range=[getattr(look.palette, COLOURS[name]) for name in names]
                ),
            ),
            tooltip=[
                alt.Tooltip("rank:N"),
                alt.Tooltip("what:N"),
                alt.Tooltip("seconds:Q", format=".4~f"),
            ],
        )
    )
    notes = [f"Medians of the last {pluralize(state.n, 'step')}, each part by itself."]
    if len(ranks) < len(state.ranks):
        notes.append(f"The {len(ranks)} busiest of {len(state.ranks):,} ranks.")
    height = 60 + BAR_HEIGHT * len(ranks)
    return {
        "ranks": finish_chart([bars], look, "Who waits for whom", notes, height, clean(state.run))
    }


def _segments(rank: RankNow) -> Iterator[dict[str, Any]]:
    start, data_s = 0.0, rank.data_wait_s or 0.0
    # Data wait counts as busy time, because it delays the other ranks as compute does.
    works_s = max(0.0, (rank.busy_time_s or 0.0) - data_s)
    for what, duration in zip(COLOURS, (works_s, data_s, rank.comm_wait_s), strict=True):
        if duration:
            yield {
                "rank": _rank(rank),
                "what": what,
                "start": start,
                "end": start + duration,
                "seconds": duration,
            }
            start += duration


def _rank(rank: RankNow) -> str:
    return f"rank {rank.rank}"
