"""What stated links carry, and the share of it that a network was measured to reach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from paceline.core.errors import UserError
from paceline.core.units import percent, si
from paceline.core.value import Value
from paceline.estimate.model.fabric import stated_bytes_per_s
from paceline.files import catalog
from paceline.scaling.network.readings import OPERATIONS, CollectiveTiming, PairRow

NOT_STATED = "no link {where} is stated (--cluster, --intra or --inter)"
WHERE = {"intra": "inside a host", "inter": "between hosts"}


class FabricShare(Value):
    """A measured rate beside what the stated links carry; None where none is stated."""

    what: str
    """An operation, or `pairs`: the median direction between two hosts."""
    reached_bytes_per_s: float
    """The best bus rate of one device; of pairs all devices of a host together."""
    link: str | None
    expected_bytes_per_s: float | None
    """Nominal, in one direction; of several links on the way the slowest."""
    share: float | None
    reason: str | None
    """Why it is not known."""


@dataclass(frozen=True)
class Fabric:
    """The links that are stated: name, and bytes/s of one device in one direction."""

    intra: tuple[str, float] | None = None
    inter: tuple[str, float] | None = None


def stated_fabric(intra: str | None, inter: str | None, devices_per_node: int) -> Fabric:
    """The links of these names or rates, None for one that is not named.

    Raises UserError for what is no link of that kind and states no rate.
    """
    return Fabric(_stated(intra, "intra", 1), _stated(inter, "inter", devices_per_node))


def _stated(
    name: str | None, kind: Literal["intra", "inter"], per_node: int
) -> tuple[str, float] | None:
    if name is None:
        return None
    rate = stated_bytes_per_s(name, per_node)
    try:
        match = catalog.find_link(name)
    except UserError:
        if rate is None:
            raise
        return name, rate
    link = match.link
    if link is not None and link.kind != kind:
        raise UserError(f"--{kind} {name}", f"is no link {WHERE[kind]}")
    if match.node_bytes_per_s:
        return name, match.node_bytes_per_s / per_node
    if link is None or link.bytes_per_s is None:
        return (name, rate) if rate else None
    shared = per_node if link.name.startswith("Ethernet") else 1  # one port of a host
    return link.name, link.bytes_per_s / shared


def fabric_shares(
    collectives: Sequence[CollectiveTiming], pairs: Sequence[PairRow], nodes: int, fabric: Fabric
) -> tuple[FabricShare, ...]:
    """The best bus rate of each operation, and the median pair, beside what links carry.

    All devices take part in a collective, so that of several hosts the slower of both links bounds
    it; on one host that inside it does.
    """
    return tuple(_shares(collectives, pairs, nodes, fabric))


def _shares(
    collectives: Sequence[CollectiveTiming], pairs: Sequence[PairRow], nodes: int, fabric: Fabric
) -> Iterator[FabricShare]:
    crossed = fabric.inter if nodes > 1 else fabric.intra
    if crossed and nodes > 1 and fabric.intra:
        crossed = min(crossed, fabric.intra, key=lambda link: link[1])
    for operation in OPERATIONS:
        rates = [row.bus_bytes_per_s for row in collectives if row.operation == operation]
        if rates:
            yield _share(operation, max(rates), crossed, 1, "inter" if nodes > 1 else "intra")
    if pairs:
        reached = median(pair.bytes_per_s for pair in pairs)
        yield _share("pairs", reached, fabric.inter, pairs[0].devices, "inter")


def _share(
    what: str, reached: float, link: tuple[str, float] | None, devices: int, kind: str
) -> FabricShare:
    expected = link[1] * devices if link else None
    return FabricShare(
        what=what,
        reached_bytes_per_s=reached,
        link=link[0] if link else None,
        expected_bytes_per_s=expected,
        share=reached / expected if expected else None,
        reason=None if link else NOT_STATED.format(where=WHERE[kind]),
    )


def share_sentences(shares: Sequence[FabricShare]) -> Iterator[str]:
    """Each share in words; what is not known is told once."""
    for each in shares:
        if each.share is not None and each.expected_bytes_per_s is not None:
            title = OPERATIONS.get(each.what, "the median direction between two hosts")
            yield (
                f"{title} reaches {percent(each.share)} of what {each.link} carries "
                f"({si(each.expected_bytes_per_s, 'B/s')}, nominal)."
            )
    for reason in dict.fromkeys(each.reason for each in shares if each.reason):
        yield f"The share of the fabric is unknown: {reason}."
