"""The memory part of a profile's page: the curve of a step, and peaks by part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import altair as alt

from paceline.core.units import MIB, counted, percent
from paceline.profiles.profile import Profile, RankCurve
from paceline.profiles.text import memory_rows, size_text
from paceline.report.head import Card, card
from paceline.report.step_charts import finish
from paceline.report.theme import Look

MOST_CURVES = 4
HEIGHT = 220
HEADS = ("rank", "part", "at the peak", "share")


def memory_chart(curves: Sequence[RankCurve], name: str, look: Look) -> alt.LayerChart:
    """A line a rank over the step in which its peak is, of the ranks with the highest peaks."""
    shown = sorted(curves, key=lambda curve: -curve.peak_bytes)[:MOST_CURVES]
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
        notes.append(f"The {MOST_CURVES} highest of {counted(len(curves), 'rank')}.")
    return finish([lines], look, "Memory over a step", notes, HEIGHT, name)


def memory_cells(profile: Profile) -> list[list[str]]:
    """The peaks by part as a table's rows."""
    return [
        [f"rank {row['rank']}", row["part"], size_text(row["bytes"]), percent(row["share"])]
        for row in memory_rows(profile)
    ]


def memory_cards(profile: Profile) -> Iterator[Card]:
    """The highest peak, its largest part, and the empty share of the allocator's pool."""
    curve = max(profile.memory, key=lambda curve: curve.peak_bytes)
    yield card(
        "Highest peak",
        size_text(curve.peak_bytes),
        "",
        [
            f"{curve.kind}, rank {curve.rank}",
            f"step {curve.peak_step}, {percent(curve.peak_at, 0)}",
        ],
    )
    if curve.parts_bytes:
        name, size = max(curve.parts_bytes.items(), key=lambda part: part[1])
        share = percent(size / curve.peak_bytes) if curve.peak_bytes else ""
        yield card("Largest part", size_text(size), "", [name, f"{share} of the peak"])
    if curve.fragmentation is not None and curve.reserved_bytes is not None:
        reserved = f"{size_text(curve.reserved_bytes)} reserved"
        yield card("Fragmentation", percent(curve.fragmentation), "", [reserved])
