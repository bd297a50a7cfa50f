"""Values formatted for people: with unit, interval and name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from paceline.core.metrics import ENERGY_PER_TOKEN, METRICS
from paceline.core.result import (
    MemoryByPart,
    Metric,
    RankMemory,
    Result,
    Straggler,
    finite_value,
)
from paceline.core.text import printable
from paceline.core.units import GIB, MIB, percent, seconds, si, significant
from paceline.report.run_description import step_range

MIN_PART_BYTES = 0.05 * MIB
"""Smallest part of the memory that is listed; smaller ones would round to zero."""
UNATTRIBUTED = "unattributed"
PART_COLOURS = {
    "weights": "steady",
    "gradients": "steady_soft",
    "optimizer": "band",
    "gathered": "good_soft",
    "activations": "good",
    "buffers": "ink",
    "other": "muted",
    "context": "warmup",
    UNATTRIBUTED: "warmup_soft",
}
"""Colour in the palette of each part, in the order of the bars."""


def metric_title(name: str) -> str:
    """Return a metric's name for people."""
    if name == ENERGY_PER_TOKEN:
        return "Energy per token"
    return METRICS[name].title if name in METRICS else printable(name).replace("_", " ")


def format_value(value: float, unit: str, digits: int = 3) -> str:
    """Return `value` with its unit; fractions as percentages, bytes as GiB or MiB.

    `digits` is the number of significant digits of a rate in FLOP/s or B/s.
    """
    match unit:
        case "fraction" | "1" | "" if 1e-5 <= abs(value) < 1e-3:
            return f"{significant(100 * value, 2)}%"
        case "fraction" | "1" | "":
            return percent(0.0 if abs(value) < 1e-5 else value)
        case "s" if abs(value) < 0.1:
            return f"{significant(value, 4)} s"
        case "s":
            return seconds(value)
        case "bytes" | "B":
            return f"{value / GIB:,.2f} GiB" if value >= 0.1 * GIB else f"{value / MIB:,.1f} MiB"
        case "FLOP/s" | "B/s":
            return si(value, unit, digits)
        case _:
            return f"{significant(value, 4)} {printable(unit)}"


def value_text(metric: Metric | None) -> str:
    """Return the value with its unit, or `none: REASON`."""
    value = finite_value(metric)
    if metric is None or value is None:
        return f"none: {reason_for_none(metric)}"
    if metric.unit == "s" and metric.n == 1 and 0.1 <= value < 120:
        # A single observation is less precise than a median, which has four decimals.
        return f"{significant(value)} s"
    return format_value(value, metric.unit)


def reason_for_none(metric: Metric | None) -> str:
    """Return the reason for a missing value."""
    return printable((metric.note if metric else None) or "not measured")


def half_width(metric: Metric | None) -> float | None:
    """Return the wider half of the 95% interval relative to the value, or None."""
    value = finite_value(metric)
    if metric is None or not value or metric.low is None or metric.high is None:
        return None
    wider = max(metric.high - value, value - metric.low)
    return wider / abs(value) if math.isfinite(wider) else None


def plus_minus(metric: Metric | None) -> str | None:
    """Return `± 0.4%`, or None without an interval."""
    half = half_width(metric)
    if half is None:
        return None
    return f"± {100 * half:.1f}%" if half >= 0.0005 else "± < 0.1%"


def interval_name(metric: Metric) -> str:
    """Return the kind of interval in short: the text before the first comma."""
    return printable((metric.interval or "95%").split(",")[0])


def interval_text(metric: Metric) -> str | None:
    """Return `0.2301 to 0.2322 s`, or None without an interval."""
    if metric.low is None or metric.high is None or not math.isfinite(metric.low + metric.high):
        return None
    low, high = (format_value(end, metric.unit, 4) for end in (metric.low, metric.high))
    number, unit = split_unit(low)
    return f"{number} to {high}" if unit == split_unit(high)[1] else f"{low} to {high}"


def split_unit(text: str) -> tuple[str, str]:
    """Return number and unit of a formatted value; the whole text as number if it has several."""
    match = re.fullmatch(r"([-+]?[\d.,]+) (\D+)", text)
    return (match[1], match[2]) if match else (text, "")


def window_text(result: Result, name: str) -> str | None:
    """Return the steps behind the metric `name`, or None if it is not computed from the window."""
    window = result.window
    if (
        (name in METRICS and not METRICS[name].in_window)
        or window is None
        or window.first_step is None
    ):
        return None
    return window.rule if window.rule == "as printed" else step_range(window)


def throughput(result: Result) -> tuple[str, Metric] | None:
    """Return name and metric of the throughput: the recipe's own unit first, then any other."""
    for name in (result.headline, "tokens_per_s", "padded_tokens_per_s", "samples_per_s"):
        metric = result.metrics.get(name)
        if finite_value(metric) is not None and metric is not None:
            return name, metric
    return None


def peak_memory_by_kind(result: Result) -> dict[str, float]:
    """Return peak bytes of the fullest rank by kind, the one that the device limits first."""
    peaks: dict[str, float] = {}
    for kind in ("reserved", "allocated", "device_used", "resident"):
        value = finite_value(result.metrics.get(f"memory_{kind}_bytes"))
        if value is not None:
            peaks[kind.replace("_", " ")] = value
    return peaks


def straggler_text(straggler: Straggler | None) -> str | None:
    """Return `rank 1 busiest (+2.1%)`, or None without a significant straggler."""
    if straggler is None or not straggler.named:
        return None
    host = f" on {printable(straggler.host)}" if straggler.host else ""
    return f"rank {straggler.rank}{host} busiest (+{100 * straggler.excess:.1f}%)"


def rank_parts(rank: RankMemory, with_context: bool = True) -> dict[str, float]:
    """Return bytes by part at the rank's peak, or between steps if the peak has no breakdown.

    With the context, the parts add up to what the allocator reserved. Without an allocator they add
    up to the resident peak of the process minus the memory tracker's own memory.
    """
    bytes_by_part = rank.at_peak_bytes or rank.parts_bytes
    parts = {
        name: max(bytes_by_part.get(name) or 0.0, 0.0)
        for name in PART_COLOURS
        if name not in ("context", UNATTRIBUTED)
    }
    if not with_context:
        return parts
    parts["context"] = rank.parts_bytes.get("context") or 0.0
    peak = rank.peak_bytes.get("reserved")
    context_bytes = 0.0
    if peak is None:
        context_bytes = parts["context"] + (rank.watcher_bytes or 0.0)
        peak = rank.peak_bytes.get("resident") or 0.0
    tensors = sum(parts.values()) - parts["context"]
    parts[UNATTRIBUTED] = max(0.0, peak - context_bytes - tensors)
    return parts


def memory_sentence(memory: MemoryByPart) -> str:
    """Return the largest rank's memory by part as one line."""
    rank = next(rank for rank in memory.ranks if rank.rank == memory.largest_rank)
    parts = rank_parts(rank, with_context=False)
    part_list = ", ".join(
        f"{name} {format_value(size, 'bytes')}"
        for name, size in parts.items()
        if size >= MIN_PART_BYTES
    )
    context = rank.parts_bytes.get("context")
    before = f"; {format_value(context, 'bytes')} context" if context else ""
    why = f" ({printable(rank.why)})" if rank.why else ""
    if rank.at_peak_bytes is None:
        part_list = part_list or "an unknown amount"
        return f"rank {rank.rank} holds {part_list}{before}; no breakdown of its peak{why}"
    total = format_value(sum(rank.at_peak_bytes.values()), "bytes")
    return f"rank {rank.rank} at its peak, {total} {rank.kind}: {part_list}{before}{why}"


def flatten_values(content: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested values as dotted path and text; a list of plain values is one line."""
    if isinstance(content, dict) and content:
        for key, value in content.items():
            yield from flatten_values(value, f"{path}.{key}" if path else str(key))
    elif isinstance(content, list) and any(isinstance(item, dict | list) for item in content):
        for number, item in enumerate(content):
            yield from flatten_values(item, f"{path}.{number}")
    elif isinstance(content, list):
        yield path, ", ".join(str(item) for item in content) or "none"
    elif path:
        none = content is None or content == {}
        yield path, "none" if none else _plain(path, content)


def _plain(path: str, value: Any) -> str:
    """Return a single value as text, with its unit if the name ends in _bytes."""
    if path.endswith("_bytes") and isinstance(value, int | float):
        return format_value(value, "bytes")
    return str(value)
