"""A profile in lines for a terminal, and as rows for tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.core.text import printable
from paceline.core.units import GIB, MIB, counted, gib, percent, seconds
from paceline.profiles.breakdown import CATEGORIES, OVERLAPPED
from paceline.profiles.nccl.text import communication_lines
from paceline.profiles.profile import Hot, Overhead, Profile, RankCurve

TITLES: dict[str, str] = {
    "gemm": "matrix products",
    "attention": "attention",
    "memory_bound": "memory-bound",
    "optimizer": "optimizer",
    "communication_exposed": "communication, exposed",
    "bubble": "pipeline bubble",
    "data_wait": "waiting for data",
    "host_gap": "nothing runs (host)",
    "other": "other",
    OVERLAPPED: "communication, overlapped",
}
MOST_KERNELS, LONGEST_NAME = 10, 70
COLUMNS = ("part", "seconds", "share", "in_sum", "means")
MEMORY_COLUMNS = ("rank", "part", "bytes", "share")


def part_rows(profile: Profile) -> list[dict[str, Any]]:
    """A row a category and axis: seconds of a step and their share of it; unrounded."""
    whole_s = profile.step_time_s or 0.0
    rows: list[dict[str, Any]] = []
    for name, part_s in profile.parts.items():
        in_sum = name in CATEGORIES
        means = CATEGORIES.get(name, "behind computation; no part of the sum")
        rows.append(_row(name, part_s, whole_s, in_sum, means))
        if name.startswith("communication"):
            kind = name.removeprefix("communication_")
            rows += [
                _row(f"{name} {axis}", getattr(time, f"{kind}_s"), whole_s, False, f"of {axis}")
                for axis, time in profile.axes.items()
            ]
    return rows


def _row(name: str, part_s: float, whole_s: float, in_sum: bool, means: str) -> dict[str, Any]:
    share = part_s / whole_s if whole_s else None
    return dict(zip(COLUMNS, (name, part_s, share, in_sum, means), strict=True))


def profile_lines(profile: Profile) -> Iterator[str]:
    """The answer for people: the step by category, the longest kernels, what profiling cost."""
    yield from _head(profile)
    if profile.parts:
        yield ""
        for row in part_rows(profile):
            if row["seconds"]:
                name, _, axis = row["part"].partition(" ")
                title = f"  {axis}" if axis else TITLES[name]
                yield f"  {title:28}{seconds(row['seconds']):>12}{percent(row['share'] or 0):>9}"
    if profile.communication is not None:
        yield from communication_lines(profile.communication, profile.traffic, profile.traffic_why)
    span = "a step" if profile.steps else "the whole capture"
    for curve in profile.memory:
        yield from memory_lines(curve)
    for title, hot in (
        (f"Longest kernels or operations, of {span}", profile.kernels),
        ("Critical path: what the step's end waited for", profile.critical_path),
    ):
        if hot:
            yield f"\n{title}"
            yield from map(_hot_line, hot[:MOST_KERNELS])
    yield from (f"note: {printable(warning)}" for warning in profile.warnings)


def memory_rows(profile: Profile) -> list[dict[str, Any]]:
    """A row a rank and part of its peak, and what of the peak no part explains; unrounded."""
    return [
        dict(zip(MEMORY_COLUMNS, (curve.rank, name, size, size / curve.peak_bytes), strict=True))
        for curve in profile.memory
        for name, size in _explained(curve).items()
        if curve.peak_bytes
    ]


def memory_lines(curve: RankCurve) -> Iterator[str]:
    """A rank's peak: when it is, what it is made of, and how much of the pool is empty."""
    yield ""
    peak, lowest = size_text(curve.peak_bytes), size_text(curve.lowest_bytes)
    yield (
        f"rank {curve.rank}: peak {peak} {curve.kind}, at {percent(curve.peak_at, 0)} of step "
        f"{curve.peak_step}; lowest {lowest}"
    )
    for name, size in _explained(curve).items():
        yield f"  {name:28}{size_text(size):>12}{percent(size / curve.peak_bytes):>9}"
    if curve.fragmentation is not None and curve.reserved_bytes is not None:
        yield (
            f"  fragmentation {percent(curve.fragmentation)}: the allocator has reserved "
            f"{size_text(curve.reserved_bytes)} and no tensor fills that share"
        )
    if curve.why:
        yield f"  note: {printable(curve.why)}"


def size_text(num_bytes: float) -> str:
    """Bytes in GiB, small ones in MiB."""
    return gib(num_bytes) if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def _explained(curve: RankCurve) -> dict[str, float]:
    """The peak by part, the largest first, and the rest."""
    parts = dict(sorted(curve.parts_bytes.items(), key=lambda part: -part[1]))
    return parts | ({"not explained": curve.unexplained_bytes} if curve.unexplained_bytes else {})


def _head(profile: Profile) -> Iterator[str]:
    ranks = ", ".join(map(str, profile.ranks))
    steps = _ranges(profile.steps)
    if profile.step_time_s is not None:
        spread = f", spread {percent(profile.spread)}" if profile.spread is not None else ""
        yield (
            f"{seconds(profile.step_time_s)} a step under {profile.tool}, mean of {profile.n} "
            f"(rank {ranks}; steps {steps}){spread}"
        )
    else:
        of_ranks = f"rank {ranks}" if ranks else "no rank is told"
        yield f"{profile.tool}: {of_ranks}" + (f"; steps {steps}" if steps else "")
    if profile.overhead is not None:
        yield overhead_text(profile.overhead)
    yield "A profiled run is no measure of speed: compare and history leave it out."


def overhead_text(overhead: Overhead) -> str:
    """What profiling cost, in a sentence."""
    if overhead.fraction is None:
        return f"Overhead of profiling: not known, {overhead.why}."
    profiled, plain = seconds(overhead.profiled_s or 0), seconds(overhead.plain_s or 0)
    medians = (
        f"median of {counted(overhead.n_profiled, 'profiled step')} {profiled}, of "
        f"{counted(overhead.n_plain, 'other')} of the run {plain}"
    )
    if overhead.fraction < 0:
        return (
            f"Overhead of profiling: not seen, the profiled steps are the faster ones by "
            f"{percent(-overhead.fraction)}: what else slowed the others is larger ({medians})."
        )
    return f"Overhead of profiling: +{percent(overhead.fraction)} ({medians})."


def _hot_line(hot: Hot) -> str:
    name = printable(hot.name)
    name = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."
    label = TITLES.get(hot.label, hot.label)
    return f"  {percent(hot.share):>7}{seconds(hot.seconds):>12}{hot.n:>7}x  {label}: {name}"


def _ranges(numbers: tuple[int, ...]) -> str:
    """`20-30` of consecutive numbers, else the list."""
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))
