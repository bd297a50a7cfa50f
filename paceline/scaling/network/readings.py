"""Lines of many ranks as rows: time and rates of each collective, and one row a pair of hosts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from paceline.core.stats import NORMAL_MAD, mad_around
from paceline.core.value import Value

OPERATIONS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "send_recv": "send-receive",
}
"""By the trainer's names. Send-receive is a ring: each rank sends to the next one."""


def bus_factor(operation: str, ranks: int) -> float:
    """Bus rate / payload rate of n ranks: what of the payload each link carries.

    2 (n - 1) / n for all-reduce, (n - 1) / n where each rank's own part stays, else 1 (nccl-tests,
    doc/PERFORMANCE.md). A payload is the larger of what a rank gives and takes.
    """
    match operation:
        case "all_reduce":
            return 2.0 * (ranks - 1) / ranks
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return (ranks - 1) / ranks
        case _:
            return 1.0


class CollectiveTiming(Value):
    """One operation with one payload among all ranks."""

    operation: str
    bytes: int
    ranks: int
    latency_s: float
    """Of one call: the mean of all ranks' medians, as nccl-tests reports it."""
    slowest_s: float
    """The largest of the ranks' medians."""
    bytes_per_s: float
    """Payload / time ("algorithm bandwidth")."""
    bus_bytes_per_s: float
    n: int
    """Blocks of calls of each rank."""
    spread: float
    """1.4826 x MAD / median of the blocks, the mean of all ranks."""
    wrong: int
    """Elements of all ranks that were not what they should be."""


class PairRow(Value):
    """From one host to another, all their devices at once."""

    source: str
    target: str
    latency_s: float
    """One way: half of a small message's way there and back; the slowest device's."""
    bytes_per_s: float
    """Sum of the devices, each with its partner of the same number."""
    devices: int
    n: int
    """Large messages in a row of each device."""


def collective_rows(lines: Iterable[Mapping[str, Any]]) -> tuple[CollectiveTiming, ...]:
    """One row an operation and payload that all ranks finished, in the order of the table."""
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        if line["event"] == "collective":
            groups[line["operation"], line["bytes"]].append(line)
    order = list(OPERATIONS)
    return tuple(
        _collective_row(operation, size, group)
        for (operation, size), group in sorted(
            groups.items(), key=lambda item: (order.index(item[0][0]), item[0][1])
        )
        if len(group) == group[0]["ranks"]
    )


def _collective_row(
    operation: str, size: int, lines: Sequence[Mapping[str, Any]]
) -> CollectiveTiming:
    medians = [median(line["times_s"]) for line in lines]
    time_s, ranks = fmean(medians), lines[0]["ranks"]
    return CollectiveTiming(
        operation=operation,
        bytes=size,
        ranks=ranks,
        latency_s=time_s,
        slowest_s=max(medians),
        bytes_per_s=size / time_s,
        bus_bytes_per_s=size / time_s * bus_factor(operation, ranks),
        n=min(len(line["times_s"]) for line in lines),
        spread=fmean(relative_spread(line["times_s"]) for line in lines),
        wrong=sum(line["wrong"] for line in lines),
    )


def relative_spread(values: Sequence[float]) -> float:
    """1.4826 x MAD / median."""
    middle = float(median(values))
    return NORMAL_MAD * mad_around(np.array(values), middle) / middle if middle else 0.0


def pair_rows(
    lines: Iterable[Mapping[str, Any]], names: Sequence[str], devices: int
) -> tuple[PairRow, ...]:
    """One row a direction in which all `devices` of a host finished; `names` by node."""
    groups: dict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        if line["event"] == "pair":
            groups[line["node"], line["partner"]].append(line)
    return tuple(
        PairRow(
            source=names[node],
            target=names[partner],
            latency_s=max(line["latency_s"] for line in group),
            bytes_per_s=sum(line["bytes_per_s"] for line in group),
            devices=len(group),
            n=min(line["n"] for line in group),
        )
        for (node, partner), group in sorted(groups.items())
        if len(group) == devices
    )
