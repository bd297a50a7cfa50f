"""The page of a profile: the step by category and rank, the way from the peak, kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt

from paceline.core.text import one_line, printable
from paceline.core.units import counted, percent, seconds, si, trimmed
from paceline.profiles.breakdown import CATEGORIES, MeanBreakdown
from paceline.profiles.profile import Hot, Profile
from paceline.profiles.text import TITLES, overhead_text, part_rows
from paceline.report.head import Card, PageHead, card, unknown_card
from paceline.report.html import render_page
from paceline.report.step_charts import finish
from paceline.report.theme import ON_PAGE, Look
from paceline.report.waterfall import waterfall_chart
from paceline.runs.profile_memory import HEADS, memory_cards, memory_cells, memory_chart

MOST_RANKS = 32
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
Table = tuple[str, tuple[str, ...], list[list[str]], str]


def profile_html(profile: Profile, name: str) -> str:
    """The page of one profile, which loads nothing; `name` says what was profiled."""
    return render_page(
        "tables.html.j2",
        _head(profile, name),
        profile_charts(profile, name, ON_PAGE),
        tables=list(_tables(profile)),
        notes=[one_line(note) for note in _notes(profile)],
    )


def profile_charts(profile: Profile, name: str, look: Look) -> dict[str, alt.LayerChart]:
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


def categories_chart(profile: Profile, name: str, look: Look) -> alt.LayerChart:
    """A bar a rank: its mean step, cut into categories."""
    ranks = profile.ranks[:MOST_RANKS]
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
    if len(profile.ranks) > MOST_RANKS:
        notes.append(f"The first {MOST_RANKS} of {len(profile.ranks):,} ranks.")
    return finish(
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


def _head(profile: Profile, name: str) -> PageHead:
    return PageHead(
        eyebrow="a profile: no measure of speed",
        name=one_line(name),
        chip=profile.tool,
        tone="plain",
        setup=(counted(len(profile.ranks), "rank"), counted(len(profile.steps), "step")),
        sentences=tuple(_answer(profile)),
        cards=tuple(_cards(profile)),
        title=one_line(name),
    )


def _answer(profile: Profile) -> Iterator[str]:
    lost = {part: s for part, s in profile.parts.items() if part in CATEGORIES and s}
    if lost and profile.step_time_s:
        largest = sorted(lost, key=lambda part: -lost[part])[:3]
        shares = (f"{TITLES[p]} {percent(lost[p] / profile.step_time_s)}" for p in largest)
        yield f"Of a step: {'; '.join(shares)}."
    if profile.overhead is not None:
        yield overhead_text(profile.overhead)


def _cards(profile: Profile) -> Iterator[Card]:
    step_s = profile.step_time_s
    if profile.memory:
        yield from memory_cards(profile)
        return
    if not step_s:
        yield unknown_card("Step", "the tool tells no times")
        return
    spread = "" if profile.spread is None else f"spread {percent(profile.spread)}"
    yield card("Profiled step", seconds(step_s), spread, [f"mean of {profile.n}"])
    for label, parts in (
        ("Products and attention", ("gemm", "attention")),
        ("Exposed communication", ("communication_exposed", "bubble")),
        ("Nothing runs", ("host_gap", "data_wait")),
    ):
        shares = [f"{TITLES[part]} {percent(profile.parts[part] / step_s)}" for part in parts]
        whole = sum(profile.parts[part] for part in parts)
        yield card(label, percent(whole / step_s), "", shares)


def _tables(profile: Profile) -> Iterator[Table]:
    if profile.parts:
        rows = [
            [row["part"], seconds(row["seconds"]), percent(row["share"] or 0), row["means"]]
            for row in part_rows(profile)
            if row["seconds"]
        ]
        note = "Categories add up to the step; communication behind computation is no part of it."
        yield "The step by category", ("part", "of a step", "share", "what it is"), rows, note
    if profile.memory:
        note = "Parts are of the step that the run has watched; the rest no part explains."
        yield "Peaks by part", HEADS, memory_cells(profile), note
    heads = ("name", "category", "times a step", "of a step", "share")
    if profile.kernels:
        note = "Kernels at the same time count all of them, so shares add up to more than 100 %."
        yield "Longest kernels or operations", heads, _hot_rows(profile.kernels), note
    if profile.critical_path:
        note = "What the end of the step waited for; each moment once, and of each rank alone."
        yield "Critical path", heads, _hot_rows(profile.critical_path), note
    if profile.waterfall:
        levels = [
            [
                level.name,
                percent(level.share),
                si(level.flops_per_s, "FLOP/s"),
                trimmed(level.lost_s),
            ]
            for level in profile.waterfall
        ]
        heads = ("cause", "left of the peak", "FLOP/s a device", "seconds of the step")
        yield "What each cause takes", heads, levels, "Of the profiled step, overhead included."


def _hot_rows(hot: Sequence[Hot]) -> list[list[str]]:
    return [
        [
            printable(each.name),
            each.label,
            f"{each.n:,}",
            seconds(each.seconds),
            percent(each.share),
        ]
        for each in hot
    ]


def _notes(profile: Profile) -> Iterator[str]:
    yield f"Read: {', '.join(profile.files)}"
    if profile.waterfall and profile.peak_source:
        yield f"The peak is {profile.peak_source}"
    yield "A profiler slows what it looks at: compare refuses such a run, history leaves it out."
    yield from profile.warnings
