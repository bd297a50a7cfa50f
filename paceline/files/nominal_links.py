"""Stated links of a cluster: their nominal rates, and the bound of a collective by them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from paceline.core.bandwidth import parse_bandwidth
from paceline.core.errors import UserError
from paceline.files import catalog

WHERE = {"intra": "inside a host", "inter": "between hosts"}
_PORTS = re.compile(r"(\d+)\s*x")


@dataclass(frozen=True)
class Fabric:
    """The stated links: name, and bytes/s of one device in one direction."""

    intra: tuple[str, float] | None = None
    inter: tuple[str, float] | None = None
    """A device's share of its host's bandwidth to other hosts."""
    port: tuple[str, float] | None = None
    """Link between hosts for a device that sends alone: a whole port, which is otherwise shared."""
    per_node: int = 1


def nominal_fabric(intra: str | None, inter: str | None, devices_per_node: int) -> Fabric:
    """Return the links with these names or rates; None for a link that is not stated.

    Raises UserError for a name that is neither a link of that kind nor a rate.
    """
    share = _link_rate(inter, "inter", devices_per_node)
    return Fabric(_link_rate(intra, "intra", 1), share, _port(inter, share), devices_per_node)


def _port(name: str | None, share: tuple[str, float] | None) -> tuple[str, float] | None:
    whole = _link_rate(name, "inter", 1)
    if name is None or whole is None or share is None:
        return None
    ports = _PORTS.search(name)
    return share[0], max(share[1], whole[1] / int(ports[1] if ports else 1))


def _link_rate(
    name: str | None, kind: Literal["intra", "inter"], per_node: int
) -> tuple[str, float] | None:
    if name is None:
        return None
    rate = parse_bandwidth(name, per_node)
    try:
        match = catalog.find_link(name)
    except UserError:
        if rate is None:
            raise
        return name, rate
    link = match.link
    if link is not None and link.kind != kind:
        raise UserError(f"--{kind} {name}", f"is not a link {WHERE[kind]}")
    if match.node_bytes_per_s:
        return name, match.node_bytes_per_s / per_node
    if link is None or link.bytes_per_s is None:
        return (name, rate) if rate else None
    # The devices of a host share one Ethernet port.
    shared = per_node if link.name.startswith("Ethernet") else 1
    return link.name, link.bytes_per_s / shared


def bus_bound(operation: str, ranks: int, fabric: Fabric) -> tuple[str, float] | None:
    """Return the link that bounds an operation of several hosts, and the bus rate in bytes/s by it.

    n ranks, d of them per host. Rings cross a host once, over all of its ports: d x a device's
    share. In an all-to-all, (n - d) / (n - 1) of a device's data leaves its host through its own
    share, and (d - 1) / (n - 1) stays inside. A send-receive ring leaves the host from one device.
    Returns None where no link between hosts is stated.
    """
    if fabric.inter is None or fabric.port is None:
        return None
    others, members = max(1, ranks - 1), fabric.per_node
    match operation:
        case "all_to_all":
            link, outside = fabric.inter, others / max(1, ranks - members)
            inside = others / max(1, members - 1)
        case "send_recv":
            link, outside, inside = fabric.port, 1, 1
        case _:
            link, outside, inside = fabric.inter, members, 1
    bounds = [(link[0], link[1] * outside)]
    bounds += [(fabric.intra[0], fabric.intra[1] * inside)] if fabric.intra else []
    return min(bounds, key=lambda bound: bound[1])
