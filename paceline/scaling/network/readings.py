"""Results of network measurements: lines of the program as rows, and rates of the stated links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from paceline.core.stats import NORMAL_MAD, mad_around
from paceline.core.units import percent, si
from paceline.core.value import Value
from paceline.files.nominal_links import WHERE, Fabric, bus_bound

OPERATIONS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "send_recv": "send-receive",
}
"""Titles by the trainer's operation names. Send-receive is a ring: each rank sends to the next."""


def bus_factor(operation: str, ranks: int) -> float:
    """Return bus rate / payload rate of n ranks: the share of the payload that each link carries.

    2 (n - 1) / n for all-reduce, (n - 1) / n where each rank keeps its own part, else 1
    (nccl-tests, doc/PERFORMANCE.md). A payload is the larger of a rank's input and output.
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
    """Seconds of one call: the mean of all ranks' medians, as nccl-tests reports it."""
    slowest_s: float | None
    """The largest of the ranks' medians; None where another program reports the mean alone."""
    bytes_per_s: float
    """Payload / time ("algorithm bandwidth")."""
    bus_bytes_per_s: float
    n: int
    """Number of blocks of calls of each rank."""
    spread: float | None
    """1.4826 x MAD / median of the blocks, averaged over all ranks; None for another program."""
    wrong: int
    """Number of wrong elements in the results of all ranks."""


class PairRow(Value):
    """Measurement from one host to another, with all their devices at once."""

    source: str
    target: str
    latency_s: float | None
    """One-way latency of the slowest device: half of a small message's round trip. None where
    another program measured the bandwidth alone."""
    bytes_per_s: float
    """Sum over the devices, each with its partner of the same number."""
    devices: int
    n: int
    """Number of consecutive large messages per device."""


def collective_rows(lines: Iterable[Mapping[str, Any]]) -> tuple[CollectiveTiming, ...]:
    """Return one row per operation and payload that all ranks finished, in the table's order."""
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
    """Return 1.4826 x MAD / median."""
    middle = float(median(values))
    return NORMAL_MAD * mad_around(np.array(values), middle) / middle if middle else 0.0


def pair_rows(
    lines: Iterable[Mapping[str, Any]], names: Sequence[str], devices: int
) -> tuple[PairRow, ...]:
    """Return one row per direction in which all `devices` of a host finished; `names` by node."""
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


NOT_SPECIFIED = "no link {where} is specified (--cluster, --intra or --inter)"


class FabricShare(Value):
    """A measured rate compared with the rate of the stated links; None where none is stated."""

    what: str
    """An operation, or `pairs`: the median direction between two hosts."""
    measured_bytes_per_s: float
    """Best bus rate of one device; for pairs, the rate of all devices of a host together."""
    link: str | None
    """The link that limits the rate: of several on the way, the one with the lowest bound."""
    expected_bytes_per_s: float | None
    """The same rate at the link's nominal bandwidth in one direction."""
    share: float | None
    reason: str | None
    """Reason why the share is unknown."""


def fabric_shares(
    collectives: Sequence[CollectiveTiming], pairs: Sequence[PairRow], nodes: int, fabric: Fabric
) -> tuple[FabricShare, ...]:
    """Compare the best bus rate of each operation, and the median pair, with the rate of the links.

    All devices take part in a collective. On one host, the link within the host bounds the rate; on
    several hosts, `bus_bound` gives the bound.
    """
    return tuple(_shares(collectives, pairs, nodes, fabric))


def _shares(
    collectives: Sequence[CollectiveTiming], pairs: Sequence[PairRow], nodes: int, fabric: Fabric
) -> Iterator[FabricShare]:
    for operation in OPERATIONS:
        rows = [row for row in collectives if row.operation == operation]
        if rows:
            best = max(rows, key=lambda row: row.bus_bytes_per_s)
            link = bus_bound(operation, best.ranks, fabric) if nodes > 1 else fabric.intra
            kind = "inter" if nodes > 1 else "intra"
            yield _share(operation, best.bus_bytes_per_s, link, kind)
    if pairs:
        middle = median(pair.bytes_per_s for pair in pairs)
        inter = fabric.inter
        link = (inter[0], inter[1] * pairs[0].devices) if inter else None
        yield _share("pairs", middle, link, "inter")


def _share(what: str, bytes_per_s: float, link: tuple[str, float] | None, kind: str) -> FabricShare:
    expected = link[1] if link else None
    return FabricShare(
        what=what,
        measured_bytes_per_s=bytes_per_s,
        link=link[0] if link else None,
        expected_bytes_per_s=expected,
        share=bytes_per_s / expected if expected else None,
        reason=None if link else NOT_SPECIFIED.format(where=WHERE[kind]),
    )


def share_sentences(shares: Sequence[FabricShare]) -> Iterator[str]:
    """Yield each share in words, and each reason for an unknown share once."""
    for each in shares:
        if each.share is not None and each.expected_bytes_per_s is not None:
            title = OPERATIONS.get(each.what, "the median direction between two hosts")
            yield (
                f"{title} reaches {percent(each.share)} of the nominal rate of {each.link} "
                f"({si(each.expected_bytes_per_s, 'B/s')})."
            )
    for reason in dict.fromkeys(each.reason for each in shares if each.reason):
        yield f"The share of the nominal rate is unknown: {reason}."
