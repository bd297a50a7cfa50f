"""Charts of one run by rank, kind of memory and reference."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import altair as alt

from paceline.core.result import MemoryByPart, RankMemory, RankSummary, Straggler
from paceline.core.run_report import RunReport
from paceline.core.text import printable
from paceline.core.units import GIB, MIB, percent
from paceline.report.figures import (
    PART_COLOURS,
    format_value,
    memory_sentence,
    peak_memory_by_kind,
    rank_parts,
)
from paceline.report.step_charts import finish_chart, integer_axis, value_scale
from paceline.report.theme import ChartTheme


def rank_chart(report: RunReport, theme: ChartTheme) -> alt.LayerChart | None:
    """Return a chart of each rank's busy time (dot) and waiting time (line up to the step time)."""
    rows = [row for rank in report.result.ranks if (row := _rank_row(rank)) is not None]
    if len(rows) < 2:
        return None
    straggler = report.result.straggler
    straggler_rank = straggler.rank if straggler is not None and straggler.named else None
    x = alt.X(
        "rank:Q",
        title="rank (number)",
        axis=integer_axis(rows[0]["rank"], rows[-1]["rank"]),
        scale=alt.Scale(domain=[rows[0]["rank"] - 0.5, rows[-1]["rank"] + 0.5], nice=False),
    )
    times = [row[key] for row in rows for key in ("busy", "until")]
    y = alt.Y("busy:Q", title="time in a step (s)", scale=value_scale(times))
    tooltip = [
        alt.Tooltip("rank:Q"),
        alt.Tooltip("host:N"),
        *([alt.Tooltip("stage:Q", title="pipeline stage")] if _has_stages(rows) else []),
        alt.Tooltip("busy:Q", title="busy (s)", format=".4~f"),
        alt.Tooltip("wait:Q", title="waiting (s)", format=".4~f"),
    ]
    base = alt.Chart(alt.Data(values=rows)).encode(x=x, y=y, tooltip=tooltip)
    layers = [
        _waiting(base, straggler_rank, len(rows), theme),
        _rank_dots(base, straggler_rank, len(rows), theme),
    ]
    if straggler is not None and straggler_rank is not None:
        layers.append(_rank_label(rows, straggler, x, theme))
    notes = [_ranks_sentence(straggler, _has_stages(rows))]
    if _has_stages(rows):
        layers += _stage_marks(rows, x, theme)
        notes.append("p0, p1, ...: pipeline stages; ranks are compared within their stage.")
    return finish_chart(layers, theme, "Ranks", notes, 210, report.result.recipe)


def peak_memory_chart(report: RunReport, theme: ChartTheme) -> alt.LayerChart | None:
    """Return a bar chart of the fullest rank's peak memory by kind, with the device's memory."""
    kinds = peak_memory_by_kind(report.result)
    if not kinds:
        return None
    rows = [
        {"kind": kind, "gib": value / GIB, "text": format_value(value, "bytes")}
        for kind, value in kinds.items()
    ]
    limit = report.facts.device_memory_bytes
    # Leave room for the value next to the longest bar.
    reach = max(1.35 * max(kinds.values()), 1.06 * (limit or 0.0)) / GIB
    x = alt.X(
        "gib:Q",
        title="peak memory of the fullest rank (GiB)",
        scale=alt.Scale(domain=[0, reach], nice=False),
        axis=alt.Axis(tickCount=5, grid=True),
    )
    y = alt.Y("kind:N", title=None, sort=None, axis=alt.Axis(grid=False))
    base = alt.Chart(alt.Data(values=rows)).encode(x=x, y=y)
    bars = base.properties(name="kinds").mark_bar(color=theme.palette.steady, height=14)
    layers = [bars, base.mark_text(align="left", dx=6).encode(text="text:N")]
    notes = [
        "Resident: CPU memory of the process. Reserved and allocated: the device's allocator. "
        "Device used: all programs on the device, including the driver's context."
    ]
    if limit:
        layers.append(_limit_rule(limit, x, theme))
        notes.append(f"Line: {format_value(limit, 'bytes')}, the memory of one device.")
    height = 44 + 34 * len(rows)
    return finish_chart(layers, theme, "Memory by kind", notes, height, report.result.recipe)


def reference_chart(report: RunReport, theme: ChartTheme) -> alt.LayerChart | None:
    """Return a chart of the ratio of this run to each reference."""
    rows: list[dict[str, Any]] = [
        {
            "row": number,
            "ratio": ref.ratio,
            "name": printable(ref.reference),
            "published": format_value(ref.reference_value, ref.unit),
            "kind": "comparable" if ref.comparable else "not comparable",
        }
        for number, ref in enumerate(report.result.references)
        if ref.ratio is not None
    ]
    if not rows:
        return None
    ratios = [row["ratio"] for row in rows]
    low, high = min(0.9, *ratios), max(1.1, *ratios)
    margin = 0.08 * (high - low)
    x = alt.X(
        "ratio:Q",
        title="this run / reference (ratio)",
        scale=alt.Scale(domain=[low - margin, high + margin], nice=False),
        axis=alt.Axis(grid=True, tickCount=5),
    )
    base = alt.Chart(alt.Data(values=rows)).encode(y=alt.Y("row:O", axis=None, title=None))
    names = base.mark_text(align="left", dy=-13, limit=280).encode(x=alt.value(0), text="name:N")
    layers = [_parity(theme, x), _reference_dots(base, x, theme), names]
    note = "Right of the line: faster than published. Hollow: not comparable."
    height = 30 + 46 * len(rows)
    return finish_chart(layers, theme, "Against references", [note], height, report.result.recipe)


def _rank_row(rank: RankSummary) -> dict[str, Any] | None:
    """Return the row of a rank with a busy time; waiting is the rest of the step."""
    if rank.busy_time_s is None:
        return None
    until = rank.step_time_s
    if until is None:
        until = rank.busy_time_s + (rank.comm_wait_s or 0.0)
    return {
        "rank": rank.rank,
        "host": printable(rank.host),
        "stage": rank.stage,
        "busy": rank.busy_time_s,
        "until": max(until, rank.busy_time_s),
        "wait": max(until - rank.busy_time_s, 0.0),
    }


def _has_stages(rows: list[dict[str, Any]]) -> bool:
    return len({row["stage"] for row in rows}) > 1


def _stage_marks(rows: list[dict[str, Any]], x: alt.X, theme: ChartTheme) -> list[alt.Chart]:
    """Return a label above the ranks of each pipeline stage, and lines between stages."""
    runs = [list(run) for _, run in groupby(rows, key=lambda row: row["stage"])]
    names = [
        {"rank": (run[0]["rank"] + run[-1]["rank"]) / 2, "text": f"p{run[0]['stage']}"}
        for run in runs
    ]
    borders = [{"rank": run[0]["rank"] - 0.5} for run in runs[1:]]
    ink = theme.palette.muted
    return [
        alt.Chart(alt.Data(values=borders), name="borders")
        .mark_rule(color=ink, strokeDash=[2, 3])
        .encode(x=x),
        alt.Chart(alt.Data(values=names), name="stages")
        .mark_text(color=ink, baseline="bottom")
        .encode(x=x, y=alt.value(-3), text="text:N"),
    ]


def _waiting(
    base: alt.Chart, straggler_rank: int | None, count: int, theme: ChartTheme
) -> alt.Chart:
    """Return lines from busy time to step time."""
    return (
        base.properties(name="waiting")
        .mark_rule(strokeWidth=2 if count <= 32 else 1)
        .encode(y2="until:Q", color=_straggler_colour(straggler_rank, theme.palette.warmup, theme))
    )


def _rank_dots(
    base: alt.Chart, straggler_rank: int | None, count: int, theme: ChartTheme
) -> alt.Chart:
    return (
        base.properties(name="ranks")
        .mark_circle(opacity=1, size=70 if count <= 32 else 30)
        .encode(color=_straggler_colour(straggler_rank, theme.palette.steady, theme))
    )


def _straggler_colour(straggler_rank: int | None, colour: str, theme: ChartTheme) -> Any:
    """Return `colour`, and the accent for the straggler."""
    if straggler_rank is None:
        return alt.value(colour)
    return alt.condition(
        alt.datum["rank"] == straggler_rank, alt.value(theme.palette.accent), alt.value(colour)
    )


def _rank_label(
    rows: list[dict[str, Any]], straggler: Straggler, x: alt.X, theme: ChartTheme
) -> alt.Chart:
    """Return a label with the straggler's excess, above its line."""
    row = next(row for row in rows if row["rank"] == straggler.rank)
    place = (row["rank"] - rows[0]["rank"] + 0.5) / (rows[-1]["rank"] - rows[0]["rank"] + 1)
    text = f"rank {straggler.rank}: +{100 * straggler.excess:.1f}%"
    return (
        alt.Chart(alt.Data(values=[{**row, "text": text}]), name="straggler")
        .mark_text(
            color=theme.palette.accent,
            fontWeight="bold",
            dy=-9,
            align="left" if place < 0.2 else "right" if place > 0.8 else "center",
        )
        .encode(x=x, y="until:Q", text="text:N")
    )


def _ranks_sentence(straggler: Straggler | None, has_stages: bool) -> str:
    words = "Dot: median busy time. Line: time waiting for other ranks, up to the step time."
    if straggler is None or not straggler.named:
        return f"{words} No rank is slower by more than noise and 1%."
    share = 100 * straggler.share_of_steps
    which = "busiest of its stage" if has_stages else "busiest"
    return f"{words} Rank {straggler.rank} is the {which} in {share:.0f}% of the steps."


def _limit_rule(limit_bytes: float, x: alt.X, theme: ChartTheme) -> alt.Chart:
    return (
        alt.Chart(alt.Data(values=[{"gib": limit_bytes / GIB}]), name="limit")
        .mark_rule(color=theme.palette.accent, strokeWidth=1.5)
        .encode(x=x)
    )


def _parity(theme: ChartTheme, x: alt.X) -> alt.Chart:
    return (
        alt.Chart(alt.Data(values=[{"ratio": 1.0}]), name="parity")
        .mark_rule(color=theme.palette.ink, strokeDash=[4, 3])
        .encode(x=x)
    )


def _reference_dots(base: alt.Chart, x: alt.X, theme: ChartTheme) -> alt.Chart:
    palette = theme.palette
    comparable = alt.datum["kind"] == "comparable"
    return (
        base.properties(name="references")
        .mark_point(filled=True, size=90, opacity=1, stroke=palette.steady, strokeWidth=1.6)
        .encode(
            x=x,
            fill=alt.condition(comparable, alt.value(palette.steady), alt.value(palette.card)),
            tooltip=[
                alt.Tooltip("name:N", title="reference"),
                alt.Tooltip("published:N"),
                alt.Tooltip("ratio:Q", format=".3f"),
                alt.Tooltip("kind:N", title="comparison"),
            ],
        )
    )


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
