"""Proof of what carries the collectives of a run, from NCCL's logs, counters and a probe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paceline.core.errors import UserError
from paceline.core.fabric import Evidence, FabricProof, doubtful_interface, unmet
from paceline.core.run import RunSpec
from paceline.core.traffic import LINK_SHARE
from paceline.files.events import FabricProbe, InterfaceUse, RankLog
from paceline.files.nominal_links import bus_bound, nominal_fabric
from paceline.profiles.nccl.fabric_facts import FabricFacts, fabric_facts, read_fabric_logs
from paceline.runs.ending import read_ranks

MIN_CARRIED = 0.05
"""Minimum share of the probe's payload that an interface in use has sent."""
PORT_KINDS = {"InfiniBand": "infiniband", "Ethernet": "roce", "EFA": "efa"}
"""Transports by the kind of an RDMA port."""
LOOPBACK = "lo"
CHOOSING_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def fabric_proof(
    folder: Path, spec: RunSpec, ranks: Mapping[int, RankLog] | None = None
) -> FabricProof | None:
    """Return what carries the collectives of a run; None for a single rank without evidence.

    `ranks` are the events of the run's ranks, if they have been read.
    """
    ranks = read_ranks(folder) if ranks is None else ranks
    logs = read_fabric_logs(folder, reads_output="NCCL_DEBUG" in spec.cluster.env)
    facts = fabric_facts(logs)
    carriers = _carriers(ranks)
    probes = [log.start.fabric for log in ranks.values() if log.start and log.start.fabric]
    requirement = spec.cluster.require_transport
    if spec.world_size == 1 and not logs:
        return None
    nodes = spec.cluster.nodes
    within, between = _transports(facts, carriers, on_gpus=spec.cluster.device != "cpu")
    if nodes == 1:
        within, between = tuple(dict.fromkeys((*within, *between))), ()
    bus, expected, link = None, None, None
    if probes and max(p.time_s for p in probes):
        size, slowest_s = probes[0].num_bytes, max(p.time_s for p in probes)
        bus = LINK_SHARE["all_reduce"](spec.world_size) * size / slowest_s
        link, expected = _expected(spec)
    ports = facts.ports or _counted_ports(ranks)
    sources: dict[Evidence, bool] = {
        "nccl log": bool(facts.within or facts.between),
        "interface counters": bool(carriers),
        "probe": bus is not None,
    }
    proof = FabricProof(
        nodes=nodes,
        on_gpus=spec.cluster.device != "cpu",
        within_node=within,
        between_nodes=between,
        interfaces=_interfaces(facts, carriers) if nodes > 1 else (),
        used_ports=ports[0] if ports and nodes > 1 else None,
        available_ports=ports[1] if ports and nodes > 1 else None,
        gpu_direct=facts.gpu_direct if nodes > 1 else None,
        bus_bytes_per_s=bus,
        payload_bytes=probes[0].num_bytes if probes else None,
        expected_bytes_per_s=expected,
        link=link,
        evidence=tuple(name for name, is_there in sources.items() if is_there),
        requirement=requirement,
    )
    problem = unmet(proof, requirement) if requirement else None
    return proof.model_copy(update={"problem": problem})


def fabric_warnings(folder: Path, spec: RunSpec, proof: FabricProof) -> list[str]:
    """Return warnings on what carries the collectives of a run."""
    is_chosen = spec.cluster.interface or any(n in spec.cluster.env for n in CHOOSING_VARIABLES)
    if proof.nodes == 1 or is_chosen:
        return []
    addresses = dict(_addresses(folder))
    reasons = [doubtful_interface(name, addresses.get(name, "")) for name in proof.interfaces]
    return [
        f"collectives use an interface that nobody requested: {reason}; choose one with --interface"
        for reason in reasons
        if reason
    ]


def _addresses(folder: Path) -> Iterator[tuple[str, str]]:
    for facts in read_fabric_logs(folder).values():
        yield from facts.socket_addresses.items()
    for log in read_ranks(folder).values():
        for use in log.start.fabric.interfaces if log.start and log.start.fabric else ():
            yield use.name, use.address


def _expected(spec: RunSpec) -> tuple[str | None, float | None]:
    """Return the limiting link and the bus rate at its nominal bandwidth; None if unspecified."""
    cluster = spec.cluster
    try:
        fabric = nominal_fabric(cluster.intra_link, cluster.inter_link, cluster.devices_per_node)
    except UserError:  # a run may name a link that the catalog no longer has
        return None, None
    bound = bus_bound("all_reduce", spec.world_size, fabric) if cluster.nodes > 1 else fabric.intra
    return bound or (None, None)


def _carriers(ranks: Mapping[int, RankLog]) -> tuple[InterfaceUse, ...]:
    """Return the interfaces that carried the probe on any host."""
    probes = [log.start.fabric for log in ranks.values() if log.start and log.start.fabric]
    return tuple(use for probe in probes for use in _in_use(probe))


def _in_use(probe: FabricProbe) -> list[InterfaceUse]:
    """Return the interfaces of a host that sent a good part of the probe's payload.

    Collectives are spread over all RDMA ports of a host, so a port may send a small part only.
    """
    num_ports = sum(use.kind != "net" for use in probe.interfaces)
    least = MIN_CARRIED * probe.num_bytes * probe.calls
    return [
        use
        for use in probe.interfaces
        if use.sent_bytes >= (least if use.kind == "net" else least / num_ports)
    ]


def _transports(
    facts: FabricFacts, carriers: Sequence[InterfaceUse], *, on_gpus: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the transports within a node and between nodes; NCCL's log before counters."""
    within, between = facts.within, facts.between
    ports = [PORT_KINDS.get(use.kind, "rdma") for use in carriers if use.kind != "net"]
    sockets = [use for use in carriers if use.kind == "net"]
    if not between:
        by_sockets = ["sockets"] if any(use.name != LOOPBACK for use in sockets) else []
        # An interface can carry other traffic while RDMA ports carry the collectives.
        between = tuple(dict.fromkeys(ports or by_sockets))
    if not within and not on_gpus and any(use.name == LOOPBACK for use in sockets):
        within = ("loopback",)
    return within, between


def _interfaces(facts: FabricFacts, carriers: Sequence[InterfaceUse]) -> tuple[str, ...]:
    uses_ports = any(use.kind != "net" for use in carriers)
    counters = [
        use.name for use in carriers if use.name != LOOPBACK and (use.kind != "net") == uses_ports
    ]
    return facts.interfaces or tuple(dict.fromkeys(counters))


def _counted_ports(ranks: Mapping[int, RankLog]) -> tuple[int, int] | None:
    """Return (used, available) RDMA ports of the host that uses the fewest; None without ports."""
    counts: list[tuple[int, int]] = []
    for log in ranks.values():
        probe = log.start.fabric if log.start else None
        if probe and (num_ports := sum(use.kind != "net" for use in probe.interfaces)):
            counts.append((sum(use.kind != "net" for use in _in_use(probe)), num_ports))
    return min(counts) if counts and max(used for used, _ in counts) else None
