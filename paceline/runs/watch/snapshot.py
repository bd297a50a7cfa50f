"""One moment of a run as a page that can be sent to somebody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import altair as alt

from paceline.core.units import counted, percent, seconds, significant
from paceline.report.head import Card, PageHead, Tone, card, unknown_card
from paceline.report.html import render_page
from paceline.report.step_charts import finish
from paceline.report.theme import ON_PAGE, Look
from paceline.runs.watch.page import (
    RANK_HEADS,
    SLOWER,
    busiest_ranks,
    clean,
    rank_cells,
    state_figures,
)
from paceline.runs.watch.state import RankNow, WatchState

BAR_HEIGHT = 26
COLOURS = {"works": "steady", "waits for data": "accent", "waits for ranks": "good_soft"}
"""The palette's colour of what a rank does with its step."""
Table = tuple[str, tuple[str, ...], list[list[str]], str]


def snapshot_html(state: WatchState) -> str:
    """The page of one moment, which loads nothing; names and reasons are escaped."""
    return render_page(
        "tables.html.j2",
        _head(state),
        snapshot_charts(state, ON_PAGE),
        tables=list(_tables(state)),
        notes=["The run has ended." if state.ended else "The run goes on: it has moved since."],
    )


def snapshot_charts(state: WatchState, look: Look) -> dict[str, alt.LayerChart]:
    """A bar a rank, the busiest: what it does with a recent step; none before there are steps."""
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
    notes = [f"Medians of the last {counted(state.n, 'step')}, each part by itself."]
    if len(ranks) < len(state.ranks):
        notes.append(f"The {len(ranks)} busiest of {len(state.ranks):,} ranks.")
    height = 60 + BAR_HEIGHT * len(ranks)
    return {"ranks": finish([bars], look, "Who waits for whom", notes, height, clean(state.run))}


def _segments(rank: RankNow) -> Iterator[dict[str, Any]]:
    start, data_s = 0.0, rank.data_wait_s or 0.0
    # Waiting for data counts as busy: it keeps the others waiting as work does.
    works_s = max(0.0, (rank.busy_time_s or 0.0) - data_s)
    for what, spent in zip(COLOURS, (works_s, data_s, rank.comm_wait_s), strict=True):
        if spent:
            yield {
                "rank": _rank(rank),
                "what": what,
                "start": start,
                "end": start + spent,
                "seconds": spent,
            }
            start += spent


def _head(state: WatchState) -> PageHead:
    asked = f" of {state.steps_asked:,}" if state.steps_asked else ""
    done = "no step yet" if state.step is None else f"step {state.step:,}{asked}"
    return PageHead(
        eyebrow="a run at one moment",
        name=clean(state.run),
        chip=state.status,
        tone=_tone(state),
        setup=(done,),
        sentences=(clean(state.reason),) if state.reason else (),
        cards=tuple(_cards(state)),
    )


def _tone(state: WatchState) -> Tone:
    if state.ended:
        return "good" if state.status == "ok" else "alert"
    return "alert" if state.ratio and state.ratio > SLOWER else "plain"


def _cards(state: WatchState) -> Iterator[Card]:
    if state.step_time_s is None:
        yield unknown_card("Step", "no step has a time yet")
    else:
        past = None
        if state.usual_s is not None and state.ratio is not None:
            usual = f"{significant(state.usual_s)} s before (n = {state.usual_n})"
            past = f"{state.ratio:.2f} times the {usual}"
        yield card("Step", f"{significant(state.step_time_s)} s", f"n = {state.n}", [past])
    if state.tokens_per_s:
        rate = f"{significant(state.samples_per_s)} samples/s" if state.samples_per_s else None
        mfu = f"MFU {percent(state.mfu)}" if state.mfu else None
        yield card("Throughput", f"{state.tokens_per_s:,.0f} tokens/s", "", [mfu, rate])
    else:
        yield unknown_card("Throughput", "the run tells no tokens")
    if state.comm_wait_fraction is None:
        yield unknown_card("Waits for ranks", "the run marks no waits for collectives")
    else:
        late = None if state.waited_for is None else f"the others wait for rank {state.waited_for}"
        yield card("Waits for ranks", percent(state.comm_wait_fraction), "of a step", [late])
    if state.eta_s is None:
        why = "the run has ended" if state.ended else "the pace or the number of steps is not known"
        yield unknown_card("Left", why)
    else:
        yield card("Left", seconds(state.eta_s), "at the recent pace")


def _tables(state: WatchState) -> Iterator[Table]:
    figures = [[name, value] for name, value in state_figures(state)]
    yield "The moment", ("figure", "value"), figures, ""
    if state.ranks:
        rows = [rank_cells(rank) for rank in busiest_ranks(state)]
        yield "Ranks", RANK_HEADS, rows, "Median seconds of a recent step."


def _rank(rank: RankNow) -> str:
    return f"rank {rank.rank}"
