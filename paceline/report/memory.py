"""Chart of each rank's memory by part at its peak, with the limit and the lower bound."""

from __future__ import annotations

from typing import Any

import altair as alt

from paceline.core.result import MemoryByPart, RankMemory
from paceline.core.run_report import RunReport
from paceline.core.units import GIB, MIB, percent
from paceline.report.figures import PART_COLOURS, format_value, memory_sentence, rank_parts
from paceline.report.step_charts import finish_chart
from paceline.report.theme import ChartTheme

MAX_DRAWN_RANKS = 16
MAX_LIMIT_RATIO = 4.0
"""A limit beyond this multiple of the longest bar is only given in the notes, not drawn."""

BOUND = "lower bound"


def memory_by_part_chart(report: RunReport, theme: ChartTheme) -> alt.LayerChart | None:
    """Return one bar per rank, divided into parts at the rank's peak, below the lower bound."""
    memory = report.result.memory
    if memory is None:
        return None
    ranks = largest_ranks(memory)
    bars = {f"rank {rank.rank}": rank_parts(rank, memory.limit_counts_context) for rank in ranks}
    if memory.bound_bytes:
        bound = dict(memory.bound_bytes)
        if not memory.limit_counts_context:
            bound.pop("context", None)
        bars = {BOUND: bound, **bars}
    longest = max(sum(parts.values()) for parts in bars.values())
    if longest == 0:
        return None
    drawn_limit = (
        memory.limit_bytes if (memory.limit_bytes or 0.0) <= MAX_LIMIT_RATIO * longest else None
    )
    reach = max(longest, drawn_limit or 0.0) * 1.06
    unit, divisor = ("GiB", GIB) if reach >= 0.1 * GIB else ("MiB", MIB)
    x_scale = alt.Scale(domain=[0, reach / divisor], nice=False)
    x_axis = alt.Axis(tickCount=5, grid=True)
    x = alt.X("start:Q", title=f"memory at the peak ({unit})", scale=x_scale, axis=x_axis)
    rows = [row for name, parts in bars.items() for row in _segments(name, parts, divisor)]
    y = alt.Y("bar:N", title=None, sort=list(bars), axis=alt.Axis(grid=False))
    parts_in_use = [part for part in PART_COLOURS if any(row["part"] == part for row in rows)]
    layers: list[alt.Chart] = [
        alt.Chart(alt.Data(values=rows), name="parts")
        .mark_bar(height=16, stroke=theme.palette.card, strokeWidth=1)
        .encode(
            x=x,
            x2="end:Q",
            y=y,
            color=_colours(parts_in_use, theme),
            tooltip=[
                alt.Tooltip("bar:N", title="rank"),
                alt.Tooltip("part:N"),
                alt.Tooltip("size:N", title="size"),
            ],
        )
    ]
    if drawn_limit:
        layers.append(
            alt.Chart(alt.Data(values=[{"start": drawn_limit / divisor}]), name="part-limit")
            .mark_rule(color=theme.palette.accent, strokeWidth=1.5)
            .encode(x=x)
        )
    notes, height = _notes(memory, drawn_limit), 74 + 26 * len(bars)
    return finish_chart(layers, theme, "Memory by part", notes, height, report.result.recipe)


def largest_ranks(memory: MemoryByPart) -> list[RankMemory]:
    """Return the largest ranks, ordered by rank."""
    largest = sorted(memory.ranks, key=lambda rank: rank.size_bytes, reverse=True)[:MAX_DRAWN_RANKS]
    return sorted(largest, key=lambda rank: rank.rank)


def _segments(bar: str, parts: dict[str, float], divisor: float) -> list[dict[str, Any]]:
    """Return one row per part with memory, stacked from left to right."""
    rows: list[dict[str, Any]] = []
    start = 0.0
    for part in PART_COLOURS:
        size = parts.get(part, 0.0)
        if size > 0:
            end = start + size
            rows.append(
                {
                    "bar": bar,
                    "part": part,
                    "start": start / divisor,
                    "end": end / divisor,
                    "size": format_value(size, "bytes"),
                }
            )
            start = end
    return rows


def _colours(parts: list[str], theme: ChartTheme) -> alt.Color:
    colours = [getattr(theme.palette, PART_COLOURS[part]) for part in parts]
    return alt.Color(
        "part:N", scale=alt.Scale(domain=parts, range=colours), legend=alt.Legend(columns=3)
    )


def _notes(memory: MemoryByPart, drawn_limit: float | None) -> list[str]:
    sentence = memory_sentence(memory)
    notes = [f"{sentence[0].upper()}{sentence[1:]}."]
    limit = memory.limit_bytes
    if limit:
        largest = next(rank for rank in memory.ranks if rank.rank == memory.largest_rank)
        share = sum(rank_parts(largest, memory.limit_counts_context).values()) / limit
        limit_place = "Line" if drawn_limit else "Beyond the axis"
        limit_text = f"{limit_place}: {format_value(limit, 'bytes')}, {memory.limit}"
        scope = "" if memory.limit_counts_context else " beyond the context"
        notes.append(
            f"{limit_text}{scope}; rank {memory.largest_rank} uses {percent(share)} of it."
        )
    if memory.limit_counts_context:
        notes.append("Unattributed: memory outside tensors, such as workspaces and cached blocks.")
    if memory.bound_bytes:
        notes.append("Lower bound: calculated minimum on the most loaded rank.")
    num_omitted = len(memory.ranks) - len(largest_ranks(memory))
    if num_omitted:
        notes.append(
            f"The {MAX_DRAWN_RANKS} largest ranks; {num_omitted:,} more are in result.json."
        )
    return notes
