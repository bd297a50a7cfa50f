"""What ranks exchanged, in lines for a terminal and as rows for tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from paceline.core.text import printable
from paceline.core.units import counted
from paceline.profiles.nccl.communication import Communication, ExchangeRow, SizeBin
from paceline.profiles.nccl.contrast import TrafficContrast

EXCHANGE_COLUMNS = (
    "axis", "ranks", "stride", "communicators", "collective", "calls", "bytes", "link_bytes",
    "seconds", "bus_bytes_per_s", "layout_bytes", "ratio",
)  # fmt: skip
"""Of a rank; of a step where the number of steps is known, else of the whole log."""
MOST_SIZES = 4
_POWERS = ("B", "KiB", "MiB", "GiB", "TiB")


def exchange_rows(
    table: Communication, traffic: Sequence[TrafficContrast]
) -> Iterator[dict[str, Any]]:
    """A row a collective and kind of communicator, unrounded, in the table's order."""
    predicted = {(row.axis, row.collective): row for row in traffic}
    steps = table.steps or 1
    for row in table.rows:
        beside = predicted.get((row.axis or "", row.collective))
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
                    beside and beside.predicted_bytes,
                    beside and beside.ratio,
                ),
                strict=True,
            )
        )


def communication_lines(
    table: Communication, traffic: Sequence[TrafficContrast], why: str | None
) -> Iterator[str]:
    """The table, what of it the layout asks for, algorithms and connections."""
    per = "a step" if table.steps else "in all of the log"
    yield f"\nExchanged by a rank {per} ({table.source}, {counted(table.ranks, 'rank')})"
    ratios = {(row.axis, row.collective): row for row in traffic}
    yield f"  {'axis':7}{'ranks':>6} {'collective':15}{'calls':>9}{'bytes':>14}{'layout':>9}  sizes"
    for row in table.rows:
        yield _line(row, table.steps or 1, ratios.get((row.axis or "", row.collective)))
    exchanged = {(row.axis, row.collective) for row in table.rows}
    for missing in (row for row in traffic if (row.axis, row.collective) not in exchanged):
        expected = f"{missing.predicted_bytes:,.0f}"
        yield f"  {missing.axis:7}{'':6} {missing.collective:15}{0:>9}{0:>14}  of {expected}"
    yield "  bytes: of whole tensors; layout: what it asks for, counted over predicted"
    if why:
        yield f"  not held against the layout: {why}"
    yield from _choices(table)
    yield from _connections(table)


def _line(row: ExchangeRow, steps: int, beside: TrafficContrast | None) -> str:
    ratio = "-" if beside is None or beside.ratio is None else f"{beside.ratio:.3g}x"
    speed = f"  {row.bus_bytes_per_s / 1e9:.3g} GB/s" if row.bus_bytes_per_s else ""
    axis = row.axis or (f"every {row.stride}." if row.stride and row.stride > 1 else "-")
    return (
        f"  {axis:7}{row.size:>6} {row.collective:15}{row.calls / steps:>9,.4g}"
        f"{row.num_bytes / steps:>14,.0f}{ratio:>9}  {_sizes(row.sizes, steps)}{speed}"
    )


def _sizes(sizes: Sequence[SizeBin], steps: int) -> str:
    """The bins with most calls, in order of size."""
    most = sorted(sizes, key=lambda size: -size.calls)[:MOST_SIZES]
    bins = sorted(most, key=lambda size: size.up_to_bytes)
    rest = len(sizes) - len(bins)
    words = [f"{size.calls / steps:,.4g}x <={_power(size.up_to_bytes)}" for size in bins]
    return ", ".join(words) + (f", {rest} more" if rest else "")


def _power(num_bytes: int) -> str:
    """1024 -> 1KiB, exactly: bins are powers of two."""
    at = 0
    while num_bytes >= 1024 and at < len(_POWERS) - 1:
        num_bytes, at = num_bytes // 1024, at + 1
    return f"{num_bytes}{_POWERS[at]}"


def _choices(table: Communication) -> Iterator[str]:
    for row in table.algorithms:
        channels = (
            f", channels {row.first_channel}-{row.last_channel}"
            if row.first_channel is not None
            else ""
        )
        yield (
            f"  {row.collective}: {row.algorithm} by {row.protocol}{channels}, "
            f"{counted(row.calls, 'call')} of {row.num_bytes:,} bytes"
        )


def _connections(table: Communication) -> Iterator[str]:
    network = table.network
    parts = {
        "library": ", ".join(network.library),
        "network": ", ".join(network.used),
        "devices": ", ".join(network.devices),
        "sockets over": ", ".join(network.sockets),
        "connections": ", ".join(f"{n:,} {kind}" for kind, n in network.transports.items()),
        "channels": ", ".join(map(str, network.channels)),
        "set": ", ".join(f"{name}={value}" for name, value in network.settings.items()),
    }
    yield from (f"  {name}: {printable(text)}" for name, text in parts.items() if text)
