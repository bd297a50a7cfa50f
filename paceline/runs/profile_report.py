"""Report of a profile: step by category, exchanged bytes, memory, longest kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.core.text import printable
from paceline.core.units import GIB, MIB, compact, gib, percent, pluralize, seconds, si
from paceline.profiles.breakdown import CATEGORIES, TITLES
from paceline.profiles.nccl.communication import Communication, SizeBin
from paceline.profiles.profile import Hot, Overhead, Profile, RankCurve
from paceline.report.document import (
    Column,
    Document,
    Figure,
    Notes,
    Section,
    Table,
    Verdict,
    unknown_figure,
)

if TYPE_CHECKING:
    from altair import LayerChart

    from paceline.report.theme import ChartTheme

MAX_SIZES = 4
"""Maximum number of message sizes per collective in the table; JSON has all."""
PART_COLUMNS = ("part", "seconds", "share", "in_sum", "means")
MEMORY_COLUMNS = ("rank", "part", "bytes", "share")
EXCHANGE_COLUMNS = (
    "axis", "ranks", "stride", "communicators", "collective", "calls", "bytes", "link_bytes",
    "seconds", "bus_bytes_per_s", "layout_bytes", "ratio",
)  # fmt: skip
"""Columns of exchanged data per rank: per step if the number of steps is known, else in total."""
_POWERS = ("B", "KiB", "MiB", "GiB", "TiB")


def profile_document(profile: Profile, name: str) -> Document:
    """Return the profile as a document; `name` is that of the profiled run."""
    return Document(
        kind="profile (not a speed measurement)",
        title=name,
        verdict=Verdict(profile.tool),
        setup=(_numbers("rank", profile.ranks), _numbers("step", profile.steps)),
        answer=tuple(_answer(profile)),
        figures=tuple(_memory_figures(profile) if profile.memory else _time_figures(profile)),
        sections=tuple(_sections(profile)),
        notes=tuple(_notes(profile)),
        charts=lambda theme: _charts(profile, name, theme),
        data=profile,
        csv=_csv_table(profile),
    )


def _charts(profile: Profile, name: str, theme: ChartTheme) -> Mapping[str, LayerChart]:
    from paceline.runs.profile_charts import profile_charts  # Importing Altair is slow.

    return profile_charts(profile, name, theme)


def part_rows(profile: Profile) -> list[dict[str, Any]]:
    """Return a row per category and axis: seconds and fraction of a step, unrounded."""
    whole_s = profile.step_time_s or 0.0

    def row(name: str, part_s: float, in_sum: bool, means: str) -> dict[str, Any]:
        share = part_s / whole_s if whole_s else None
        return dict(zip(PART_COLUMNS, (name, part_s, share, in_sum, means), strict=True))

    rows: list[dict[str, Any]] = []
    for name, part_s in profile.parts.items():
        means = CATEGORIES.get(name, "overlapped with computation; not part of the sum")
        rows.append(row(name, part_s, name in CATEGORIES, means))
        if name.startswith("communication"):
            kind = name.removeprefix("communication_")
            rows += [
                row(f"{name} {axis}", getattr(time, f"{kind}_s"), False, f"of {axis}")
                for axis, time in profile.axes.items()
            ]
    return rows


def memory_rows(profile: Profile) -> list[dict[str, Any]]:
    """Return a row per rank and part of its peak, and the unexplained rest; unrounded."""
    rows: list[dict[str, Any]] = []
    for curve in profile.memory:
        parts = dict(sorted(curve.parts_bytes.items(), key=lambda part: -part[1]))
        if curve.unexplained_bytes:
            parts["not explained"] = curve.unexplained_bytes
        for part, size in parts.items() if curve.peak_bytes else ():
            values = (curve.rank, part, size, size / curve.peak_bytes)
            rows.append(dict(zip(MEMORY_COLUMNS, values, strict=True)))
    return rows


def exchange_rows(profile: Profile, table: Communication) -> Iterator[dict[str, Any]]:
    """Yield a row per collective and kind of communicator, unrounded, in the table's order."""
    predicted = {(row.axis, row.collective): row for row in profile.traffic}
    steps = table.steps or 1
    for row in table.rows:
        layout = predicted.get((row.axis or "", row.collective))
        yield dict(
            zip(
                EXCHANGE_COLUMNS,
                (
                    row.axis,
                    row.size,
                    row.stride,
                    row.communicators,
                    row.collective,
                    row.calls / steps,
                    row.num_bytes / steps,
                    row.link_bytes / steps,
                    None if row.seconds is None else row.seconds / steps,
                    row.bus_bytes_per_s,
                    layout and layout.predicted_bytes,
                    layout and layout.ratio,
                ),
                strict=True,
            )
        ) | {"sizes": _sizes(row.sizes, steps)}


def size_text(num_bytes: float) -> str:
    """Return bytes in GiB, small ones in MiB."""
    return gib(num_bytes) if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def overhead_text(overhead: Overhead) -> str:
    """Return the overhead of profiling as a sentence."""
    if overhead.fraction is None:
        return f"Overhead of profiling: unknown, {overhead.why}."
    profiled_time, plain = seconds(overhead.profiled_s or 0), seconds(overhead.plain_s or 0)
    medians = (
        f"median of {pluralize(overhead.n_profiled, 'profiled step')}: {profiled_time}, of "
        f"{pluralize(overhead.n_plain, 'other step')}: {plain}"
    )
    if overhead.fraction < 0:
        return (
            "Overhead of profiling: not measurable. The profiled steps were faster by "
            f"{percent(-overhead.fraction)} ({medians})."
        )
    return f"Overhead of profiling: +{percent(overhead.fraction)} ({medians})."


def _answer(profile: Profile) -> Iterator[str]:
    if profile.step_time_s is not None:
        spread = f", spread {percent(profile.spread)}" if profile.spread is not None else ""
        yield f"{seconds(profile.step_time_s)} per step, mean of {profile.n} profiled{spread}."
    category_s = {part: s for part, s in profile.parts.items() if part in CATEGORIES and s}
    if category_s and profile.step_time_s:
        largest = sorted(category_s, key=lambda part: -category_s[part])[:3]
        shares = (f"{TITLES[p]} {percent(category_s[p] / profile.step_time_s)}" for p in largest)
        yield f"Largest parts of a step: {'; '.join(shares)}."
    if profile.overhead is not None:
        yield overhead_text(profile.overhead)


def _time_figures(profile: Profile) -> Iterator[Figure]:
    step_s = profile.step_time_s
    if not step_s:
        yield unknown_figure("Step", f"{profile.tool} reports no times")
        return
    spread = "" if profile.spread is None else f"spread {percent(profile.spread)}"
    yield Figure("Profiled step", seconds(step_s), spread, (f"mean of {profile.n}",))
    for label, parts in (
        ("GEMMs and attention", ("gemm", "attention")),
        ("Exposed communication", ("communication_exposed", "bubble")),
        ("Nothing runs", ("host_gap", "data_wait")),
    ):
        shares = tuple(f"{TITLES[part]} {percent(profile.parts[part] / step_s)}" for part in parts)
        yield Figure(label, percent(sum(profile.parts[p] for p in parts) / step_s), "", shares)


def _memory_figures(profile: Profile) -> Iterator[Figure]:
    """Yield the highest peak, its largest part, and the unused fraction of the allocator's pool."""
    curve = max(profile.memory, key=lambda curve: curve.peak_bytes)
    place = f"step {curve.peak_step}, {percent(curve.peak_at, 0)}"
    details = (f"{curve.kind}, rank {curve.rank}", place)
    yield Figure("Highest peak", size_text(curve.peak_bytes), "", details)
    if curve.parts_bytes:
        name, size = max(curve.parts_bytes.items(), key=lambda part: part[1])
        share = percent(size / curve.peak_bytes) if curve.peak_bytes else ""
        yield Figure("Largest part", size_text(size), "", (name, f"{share} of the peak"))
    if curve.fragmentation is not None and curve.reserved_bytes is not None:
        reserved = f"{size_text(curve.reserved_bytes)} reserved"
        yield Figure("Fragmentation", percent(curve.fragmentation), "", (reserved,))


def _sections(profile: Profile) -> Iterator[Section]:
    yield Table(
        title="Step time by category",
        columns=(
            Column("part", "part", _part_title),
            Column("seconds", "per step", seconds, "right"),
            Column("share", "share", percent, "right"),
            Column("means", "description", wraps=True),
        ),
        rows=[row for row in part_rows(profile) if row["seconds"]],
        note="Categories add up to the step; overlapped communication is not part of the sum.",
    )
    if profile.communication is not None:
        yield from _exchange_sections(profile, profile.communication)
    yield Table(
        title="Peaks by part",
        columns=(
            Column("rank", "rank", lambda rank: f"rank {rank}"),
            Column("part", "part"),
            Column("bytes", "at the peak", size_text, "right"),
            Column("share", "share", percent, "right"),
        ),
        rows=memory_rows(profile),
        note="Parts were recorded for one step; the remaining memory is not explained.",
    )
    yield Notes(title="Peaks by rank", lines=[_peak_text(curve) for curve in profile.memory])
    span = "per step" if profile.steps else "in the whole capture"
    yield _hot_table(
        f"Longest kernels or operations, {span}",
        profile.kernels,
        "Concurrent kernels all count, so shares can add up to more than 100%.",
    )
    yield _hot_table(
        "Critical path of the step",
        profile.critical_path,
        "All time counts once per rank.",
    )
    yield Table(
        title="MFU waterfall",
        media="page",
        columns=(
            Column("name", "cause"),
            Column("share", "left of the peak", percent, "right"),
            Column("flops_per_s", "FLOP/s per device", lambda v: si(v, "FLOP/s"), "right"),
            Column("lost_s", "lost per step (s)", compact, "right"),
        ),
        rows=[
            {key: getattr(level, key) for key in ("name", "share", "flops_per_s", "lost_s")}
            for level in profile.waterfall
        ],
        note="Based on the profiled step, including the overhead of profiling.",
    )


def _hot_table(title: str, hot: Sequence[Hot], note: str) -> Table:
    return Table(
        title=title,
        columns=(
            Column("share", "share", percent, "right"),
            Column("seconds", "per step", seconds, "right"),
            Column("n", "calls", lambda n: f"{n:,}", "right"),
            Column("label", "category", lambda label: str(TITLES.get(label, label))),
            Column("name", "name", printable),
        ),
        rows=[each.model_dump() for each in hot],
        note=note,
    )


def _exchange_sections(profile: Profile, table: Communication) -> Iterator[Section]:
    per = "per step" if table.steps else "in the whole log"
    logged_pairs = {(row.axis, row.collective) for row in table.rows}
    missing = [
        {
            "axis": row.axis,
            "collective": row.collective,
            "calls": 0,
            "bytes": 0,
            "layout_bytes": row.predicted_bytes,
        }
        for row in profile.traffic
        if (row.axis, row.collective) not in logged_pairs
    ]
    why = f" Not compared with the layout: {profile.traffic_why}." if profile.traffic_why else ""
    yield Table(
        title=f"Communication per rank {per} ({table.source}, {pluralize(table.ranks, 'rank')})",
        columns=(
            Column("axis", "axis"),
            Column("ranks", "ranks", justify="right"),
            Column("stride", "stride", justify="right"),
            Column("collective", "collective"),
            Column("calls", "calls", lambda calls: f"{calls:,.4g}", "right"),
            Column("bytes", "bytes", lambda size: f"{size:,.0f}", "right"),
            Column("layout_bytes", "layout", lambda size: f"{size:,.0f}", "right"),
            Column("ratio", "ratio", lambda ratio: f"{ratio:.3g}x", "right"),
            Column("bus_bytes_per_s", "bus", lambda rate: si(rate, "B/s"), "right"),
            Column("sizes", "sizes", wraps=True),
        ),
        rows=[*exchange_rows(profile, table), *missing],
        note=f"Bytes: whole tensors. Layout: bytes that the parallel layout predicts.{why}",
    )
    yield Table(
        title="Algorithms",
        columns=(
            Column("collective", "collective"),
            Column("algorithm", "algorithm"),
            Column("protocol", "protocol"),
            Column("channels", "channels"),
            Column("calls", "calls", lambda calls: f"{calls:,}", "right"),
            Column("num_bytes", "bytes", lambda size: f"{size:,}", "right"),
        ),
        rows=[
            row.model_dump() | {"channels": f"{row.first_channel}-{row.last_channel}"}
            if row.first_channel is not None
            else row.model_dump()
            for row in table.algorithms
        ],
    )
    network = table.network
    settings = (f"{name}={value}" for name, value in network.settings.items())
    connections: dict[str, Iterable[str]] = {
        "library": network.library,
        "network": network.used,
        "devices": network.devices,
        "socket interfaces": network.sockets,
        "connections": (f"{n:,} {kind}" for kind, n in network.transports.items()),
        "channels": map(str, network.channels),
        "settings": settings,
    }
    texts = {name: ", ".join(values) for name, values in connections.items()}
    yield Notes(
        title="Connections",
        lines=[f"{name}: {printable(text)}" for name, text in texts.items() if text],
    )


def _notes(profile: Profile) -> Iterator[str]:
    yield f"Files: {', '.join(profile.files)}"
    if profile.waterfall and profile.peak_source:
        yield f"The peak is {profile.peak_source}"
    yield "Profiling slows a run down: `compare` rejects it and `runs history` excludes it."
    yield from map(printable, profile.warnings)


def _csv_table(profile: Profile) -> Table:
    if profile.communication is not None:
        rows, names = [*exchange_rows(profile, profile.communication)], EXCHANGE_COLUMNS
    elif profile.memory:
        rows, names = memory_rows(profile), MEMORY_COLUMNS
    else:
        rows, names = part_rows(profile), PART_COLUMNS
    return Table(columns=[Column(name, name) for name in names], rows=rows)


def _peak_text(curve: RankCurve) -> str:
    peak, lowest = size_text(curve.peak_bytes), size_text(curve.lowest_bytes)
    text = (
        f"rank {curve.rank}: peak {peak} {curve.kind}, at {percent(curve.peak_at, 0)} of step "
        f"{curve.peak_step}; lowest {lowest}"
    )
    if curve.fragmentation is not None and curve.reserved_bytes is not None:
        reserved = size_text(curve.reserved_bytes)
        text += f"; fragmentation {percent(curve.fragmentation)} of {reserved} reserved"
    return f"{text}; {printable(curve.why)}" if curve.why else text


def _part_title(part: str) -> str:
    name, _, axis = part.partition(" ")
    return f"  {axis}" if axis else TITLES[name]


def _sizes(sizes: Sequence[SizeBin], steps: int) -> str:
    """Return the bins with the most calls, in order of size."""
    most = sorted(sizes, key=lambda size: -size.calls)[:MAX_SIZES]
    bins = sorted(most, key=lambda size: size.up_to_bytes)
    left_out = len(sizes) - len(bins)
    words = [f"{size.calls / steps:,.4g}x <={_power(size.up_to_bytes)}" for size in bins]
    return ", ".join(words) + (f", {left_out} more" if left_out else "")


def _power(num_bytes: int) -> str:
    """Return `1KiB` for 1024; bins are powers of two."""
    exponent = 0
    while num_bytes >= 1024 and exponent < len(_POWERS) - 1:
        num_bytes, exponent = num_bytes // 1024, exponent + 1
    return f"{num_bytes}{_POWERS[exponent]}"


def _numbers(what: str, numbers: tuple[int, ...]) -> str:
    """Return `steps 20-30` for consecutive numbers, else the list."""
    if not numbers:
        return f"no {what} known"
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{what}s {numbers[0]}-{numbers[-1]}"
    return f"{what}s {', '.join(map(str, numbers))}"
