"""What in a log says that NCCL does not use the links that it could."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.core.units import counted

UNEXPECTED = ("docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "wl", "usb", "tun")
"""Begins of interfaces that lead to no other host, or slowly."""
SOCKET, INFINIBAND = "Socket", "IB"
TOLD = 3
"""Complaints of NCCL that are repeated."""


@dataclass(frozen=True)
class Hop:
    """A connection of a channel, by ranks in its communicator."""

    host: str
    begin: int
    end: int
    transport: str


@dataclass
class LogFacts:
    """What processes say of their connections."""

    versions: set[str] = field(default_factory=set[str])
    networks: set[str] = field(default_factory=set[str])
    devices: set[str] = field(default_factory=set[str])
    sockets: set[str] = field(default_factory=set[str])
    settings: dict[str, str] = field(default_factory=dict[str, str])
    transports: Counter[str] = field(default_factory=Counter[str])
    hops: set[Hop] = field(default_factory=set[Hop])
    no_infiniband: bool = False
    complaints: dict[str, None] = field(default_factory=dict[str, None])


def network_doubts(facts: LogFacts) -> Iterator[str]:
    """One sentence each, with what to look at."""
    yield from _sockets(facts)
    yield from _interfaces(facts)
    yield from _without_gdr(facts)
    yield from _slow_hops(facts)
    if len(facts.versions) > 1:
        yield (
            f"processes run different libraries ({', '.join(sorted(facts.versions))}): give all of "
            "them the same image or environment"
        )
    for text in list(facts.complaints)[:TOLD]:
        yield f"NCCL warns: {text}"
    if len(facts.complaints) > TOLD:
        yield f"NCCL warns of {counted(len(facts.complaints) - TOLD, 'further kind')}: see the log"


def _sockets(facts: LogFacts) -> Iterator[str]:
    """Hosts exchange by TCP."""
    by_socket = sum(n for name, n in facts.transports.items() if name.startswith("NET/Socket"))
    chosen = SOCKET in facts.networks and not by_socket and not facts.transports
    if not by_socket and not chosen:
        return
    over = f" over {', '.join(sorted(facts.sockets))}" if facts.sockets else ""
    why = "look at `NET/` in the log for why no faster network was taken"
    if facts.settings.get("NCCL_IB_DISABLE", "0") not in ("0", ""):
        why = "NCCL_IB_DISABLE is set: unset it where there is InfiniBand or RoCE"
    elif facts.settings.get("NCCL_NET") == SOCKET:
        why = "NCCL_NET is set to Socket: unset it"
    elif facts.no_infiniband:
        why = "NCCL finds no InfiniBand device: are /dev/infiniband and libibverbs in the container"
    elif facts.devices:
        why = f"there is {', '.join(sorted(facts.devices))}: was the network plugin loaded"
    yield f"hosts exchange by TCP sockets{over} instead of InfiniBand or a like network; {why}"


def _interfaces(facts: LogFacts) -> Iterator[str]:
    """Sockets that lead elsewhere, or several of them."""
    odd = sorted(name for name in facts.sockets if name == "lo" or name.startswith(UNEXPECTED))
    if odd:
        yield (
            f"sockets use {', '.join(odd)}, which leads to no other host or slowly: name the "
            "right interface in NCCL_SOCKET_IFNAME"
        )


def _without_gdr(facts: LogFacts) -> Iterator[str]:
    """The network card cannot reach the GPU's memory."""
    plain = sum(n for name, n in facts.transports.items() if name.startswith("NET/IB"))
    direct = sum(
        n
        for name, n in facts.transports.items()
        if name.startswith("NET/IB") and name.endswith("GDRDMA")
    )
    if plain > direct:
        level = facts.settings.get("NCCL_NET_GDR_LEVEL")
        why = (
            f"NCCL_NET_GDR_LEVEL is set to {level}"
            if level
            else "is nvidia-peermem or dma-buf there, and each card near its GPU"
        )
        yield (
            f"{plain - direct} of {plain} InfiniBand connections copy through host memory, "
            f"without GPU Direct RDMA; {why}"
        )


def _slow_hops(facts: LogFacts) -> Iterator[str]:
    """A ring is as fast as its slowest link: host memory among GPUs that are linked otherwise."""
    by_host: defaultdict[str, defaultdict[str, set[tuple[int, int]]]] = defaultdict(
        lambda: defaultdict(set)
    )
    for hop in facts.hops:
        by_host[hop.host][hop.transport.partition("/")[0]].add((hop.begin, hop.end))
    slow = {host: kinds["SHM"] for host, kinds in by_host.items() if "SHM" in kinds}
    if not slow:
        return
    host, pairs = min(slow.items())
    begin, end = min(pairs)
    count = sum(map(len, slow.values()))
    beside = any("P2P" in kinds for kinds in by_host.values())
    rest = "while others go directly" if beside else "and none directly"
    yield (
        f"inside hosts, {counted(count, 'connection', 'go')} through host memory {rest}, so a ring "
        f"over {'it' if count == 1 else 'them'} is as slow (ranks {begin} and {end} on {host}): "
        "see `nvidia-smi topo -m`, and whether "
        "NCCL_P2P_DISABLE or the container's isolation forbids peer access"
    )
