"""Proof of what carries the collectives of a run, from NCCL's logs, counters and a probe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import hypot, isfinite
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.core.fabric import Evidence, FabricProof, doubtful_interface, unmet
from paceline.core.run import RunSpec
from paceline.core.traffic import LINK_SHARE
from paceline.files.documents import read_lines
from paceline.files.events import FabricProbe, InterfaceUse, read_rank
from paceline.files.nominal_links import bus_bound, nominal_fabric
from paceline.files.run_folder import STEPS_FOLDER
from paceline.profiles.nccl.fabric_facts import FabricFacts, fabric_facts, read_fabric_logs

MIN_CARRIED = 0.05
"""Minimum share of the probe's payload that an interface in use has sent."""
PORT_KINDS = {"InfiniBand": "infiniband", "Ethernet": "roce", "EFA": "efa"}
"""Transports by the kind of an RDMA port."""
LOOPBACK = "lo"
CHOOSING_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def fabric_proof(folder: Path, spec: RunSpec) -> FabricProof | None:
    """Return what carries the collectives of a run; None without evidence and requirement."""
    logs = read_fabric_logs(folder, reads_output="NCCL_DEBUG" in spec.cluster.env)
    probes = list(_probes(folder))
    requirement = spec.cluster.require_transport
    if not logs and not probes and (spec.world_size == 1 or not requirement):
        return None
    facts, nodes, on_gpus = fabric_facts(logs), spec.cluster.nodes, spec.cluster.device != "cpu"
    carriers = [use for probe in probes for use in _in_use(probe)]
    within, between = _transports(facts, carriers, on_gpus=on_gpus)
    if nodes == 1:
        within, between = tuple(dict.fromkeys((*within, *between))), ()
    bandwidth = _bandwidth(probes, spec.world_size)
    bus = bandwidth.get("bus_bytes_per_s")
    link, expected = _expected(spec) if bus else (None, None)
    ports = facts.ports or _counted_ports(probes)
    addresses = {use.name: use.address for use in carriers}
    for host_facts in logs.values():
        addresses |= host_facts.socket_addresses
    interfaces = _interfaces(facts, carriers)
    sources: dict[Evidence, bool] = {
        "nccl log": bool(facts.within or facts.between),
        "interface counters": bool(carriers),
        "probe": bus is not None,
    }
    network: dict[str, Any] = {
        "interfaces": interfaces,
        "doubts": () if _is_chosen(spec) else _doubts(interfaces, addresses),
        "used_ports": ports[0] if ports else None,
        "available_ports": ports[1] if ports else None,
        "gpu_direct": facts.gpu_direct,
    }
    proof = FabricProof(
        nodes=nodes,
        on_gpus=on_gpus,
        within_node=within,
        between_nodes=between,
        expected_bytes_per_s=expected,
        link=link,
        evidence=tuple(name for name, is_there in sources.items() if is_there),
        requirement=requirement,
        **bandwidth,
        **(network if nodes > 1 else {}),
    )
    problem = unmet(proof, requirement) if requirement else None
    return proof.model_copy(update={"problem": problem})


def _bandwidth(probes: Sequence[FabricProbe], ranks: int) -> dict[str, Any]:
    """Return the bus bandwidth by the slowest rank, as fields of FabricProof.

    With payloads B and b, times T and t, and the share s of a payload that a link carries, it is
    s B / T with latency, and s (B - b) / (T - t) without (Hockney's asymptotic bandwidth).
    """
    slowest = max(probes, key=lambda probe: probe.time_s, default=None)
    if slowest is None or not slowest.time_s:
        return {}
    share = LINK_SHARE["all_reduce"](ranks)
    small = slowest.small
    fields: dict[str, Any] = {
        "bus_bytes_per_s": share * slowest.num_bytes / slowest.time_s,
        "payload_bytes": slowest.num_bytes,
        "small_payload_bytes": small.num_bytes,
        "calls": slowest.calls,
    }
    difference = slowest.num_bytes - small.num_bytes
    difference_s = slowest.time_s - small.time_s
    if difference > 0 and difference_s > 0:
        spread_s = hypot(slowest.spread * slowest.time_s, small.spread * small.time_s)
        fields["asymptotic_bytes_per_s"] = share * difference / difference_s
        fields["asymptotic_spread"] = spread_s / difference_s
    return {name: value for name, value in fields.items() if isfinite(value)}


def _probes(folder: Path) -> Iterator[FabricProbe]:
    """Yield the probe of each rank, which is in the first line of its file."""
    for path in sorted((folder / STEPS_FOLDER).glob("rank-*.jsonl")):
        try:
            start = read_rank(islice(read_lines(path), 1)).start
        except OSError:  # the file may have been moved, or is unreadable
            continue
        if start and start.fabric:
            yield start.fabric


def _is_chosen(spec: RunSpec) -> bool:
    """Return True if the user has chosen the interfaces of collectives."""
    return bool(spec.cluster.interface) or any(
        name in spec.cluster.env for name in CHOOSING_VARIABLES
    )


def _doubts(interfaces: Sequence[str], addresses: Mapping[str, str]) -> tuple[str, ...]:
    reasons = [doubtful_interface(name, addresses.get(name, "")) for name in interfaces]
    return tuple(reason for reason in reasons if reason)


def fabric_warnings(proof: FabricProof) -> list[str]:
    """Return a warning for each interface that nobody should use unasked."""
    return [
        f"collectives use an interface that nobody requested: {reason}; choose one with --interface"
        for reason in proof.doubts
    ]


def _expected(spec: RunSpec) -> tuple[str | None, float | None]:
    """Return the limiting link and the bus rate at its nominal bandwidth; None if unspecified."""
    cluster = spec.cluster
    try:
        fabric = nominal_fabric(cluster.intra_link, cluster.inter_link, cluster.devices_per_node)
    except UserError:  # a run may name a link that the catalog no longer has
        return None, None
    bound = bus_bound("all_reduce", spec.world_size, fabric) if cluster.nodes > 1 else fabric.intra
    return bound or (None, None)


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


def _counted_ports(probes: Sequence[FabricProbe]) -> tuple[int, int] | None:
    """Return (used, available) RDMA ports of the host that uses the fewest; None without ports."""
    counts = [
        (sum(use.kind != "net" for use in _in_use(probe)), num_ports)
        for probe in probes
        if (num_ports := sum(use.kind != "net" for use in probe.interfaces))
    ]
    return min(counts) if counts and max(used for used, _ in counts) else None
