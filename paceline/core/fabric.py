"""Transports of the collectives of a run, the evidence for them, and requirements on them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from pydantic import NonNegativeFloat

from paceline.core.units import percent, pluralize, si
from paceline.core.value import NonNegativeInt, PositiveInt, Value

Evidence = Literal["nccl log", "interface counters", "probe"]
Requirement = Literal["nvlink", "rdma", "infiniband", "roce", "efa", "gib", "sockets"]
"""Transport that a run can require."""

TITLES = {
    "nvlink": "NVLink",
    "pcie": "PCIe peer to peer",
    "p2p": "GPU peer to peer",
    "shm": "CPU memory (SHM)",
    "infiniband": "InfiniBand",
    "roce": "RoCE",
    "rdma": "RDMA",
    "efa": "EFA",
    "gib": "gIB (RoCE)",
    "slingshot": "Slingshot",
    "tcpx": "GPUDirect-TCPX",
    "sockets": "TCP sockets",
    "loopback": "TCP sockets on loopback",
}
"""Names of transports for people. A transport of another name is shown as it is."""
SATISFYING: dict[Requirement, frozenset[str]] = {
    "nvlink": frozenset({"nvlink"}),
    "rdma": frozenset({"nvlink", "infiniband", "roce", "rdma", "efa", "gib", "slingshot"}),
    "infiniband": frozenset({"infiniband"}),
    "roce": frozenset({"roce", "gib"}),
    "efa": frozenset({"efa"}),
    "gib": frozenset({"gib"}),
    "sockets": frozenset({"sockets", "loopback"}),
}
"""Transports that meet each requirement."""
NETWORK_ONLY: frozenset[Requirement] = frozenset({"rdma", "infiniband", "roce", "efa", "gib"})
"""Requirements on the connections between nodes, which a run on one node does not have."""

_CONTAINER_INTERFACE = re.compile(
    r"docker\d*|br-[0-9a-f]{12}|(?:cni|podman|virbr|lxcbr|weave)\d*|"
    r"(?:veth|cali|flannel|cilium|lxc|tunl|kube-|vxlan).*"
)
_LINK_LOCAL = re.compile(r"169\.254\.\d+\.\d+|fe80:.*", re.IGNORECASE)


def doubtful_interface(name: str, address: str = "") -> str | None:
    """Return why an interface should not carry collectives unless requested; None if it may."""
    if _LINK_LOCAL.fullmatch(address):
        return f"{name} has the link-local address {address}"
    if _CONTAINER_INTERFACE.fullmatch(name):
        return f"{name} is an interface of a container or pod network"
    return None


class FabricProof(Value):
    """Transports of the collectives of a run. A transport without evidence is not listed."""

    nodes: PositiveInt
    on_gpus: bool
    within_node: tuple[str, ...] = ()
    """Transports between the ranks of a node."""
    between_nodes: tuple[str, ...] = ()
    """Transports between nodes."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces or RDMA ports that carry collectives between nodes."""
    doubts: tuple[str, ...] = ()
    """Reasons why some of these interfaces should not carry collectives; none if requested."""
    used_ports: NonNegativeInt | None = None
    """Smallest number of RDMA ports or network devices that a node uses; None if unknown."""
    available_ports: NonNegativeInt | None = None
    """Number of such ports of that node."""
    gpu_direct: float | None = None
    """Share (0-1) of the connections between nodes with GPU Direct RDMA; None if unknown."""
    bus_bytes_per_s: float | None = None
    """Bus bandwidth of an all-reduce of all ranks, as nccl-tests defines it; None if unmeasured."""
    payload_bytes: NonNegativeInt | None = None
    """Payload of that all-reduce."""
    asymptotic_bytes_per_s: NonNegativeFloat | None = None
    """Bus bandwidth without latency: from the difference of the times of this payload and of a
    small one. None if the run has no such probe, or if the times do not differ."""
    asymptotic_spread: NonNegativeFloat | None = None
    """Robust relative spread of that bandwidth, from the calls with both payloads."""
    small_payload_bytes: NonNegativeInt | None = None
    """The small payload."""
    calls: NonNegativeInt | None = None
    """Timed calls with each payload; their medians count."""
    expected_bytes_per_s: float | None = None
    """Bus bandwidth at the nominal rate of the cluster's links; None if no link is specified."""
    link: str | None = None
    """Link that limits the expected bandwidth."""
    evidence: tuple[Evidence, ...] = ()
    requirement: Requirement | None = None
    problem: str | None = None
    """Reason why the run does not meet the requirement."""

    @property
    def label(self) -> str | None:
        """Transports without figures, to compare runs; None without evidence."""
        parts = [
            f"{_titles(names)} {where}"
            for names, where in (
                (self.between_nodes, "between nodes"),
                (self.within_node, "within a node"),
            )
            if names
        ]
        return ", ".join(parts) or None

    @property
    def is_notable(self) -> bool:
        """True unless all ranks are CPU processes of one host, without a requirement."""
        return self.on_gpus or self.nodes > 1 or self.requirement is not None

    @property
    def sentence(self) -> str:
        """Description of the transports, the interfaces in use and the bus bandwidth."""
        if not self.label:
            text = "Collectives: transport unknown"
        else:
            details = self._details()
            text = f"Collectives: {self.label}" + (f" ({details})" if details else "")
        if self.bus_bytes_per_s is None:
            return f"{text}."
        text += f"; all-reduce bus bandwidth {si(self.bus_bytes_per_s, 'B/s')}"
        if self.expected_bytes_per_s:
            share = percent(self.bus_bytes_per_s / self.expected_bytes_per_s, 0)
            text += f", {share} of {si(self.expected_bytes_per_s, 'B/s')} ({self.link})"
        return f"{text}."

    def _details(self) -> str:
        details: list[str] = []
        if self.used_ports is not None and self.available_ports:
            details.append(f"{self.used_ports} of {pluralize(self.available_ports, 'port')} used")
        elif self.interfaces:
            details.append(", ".join(self.interfaces))
        if self.gpu_direct is not None:
            direct = "GPU Direct RDMA"
            share = f"{direct} on {percent(self.gpu_direct, 0)} of connections"
            details.append({0.0: f"no {direct}", 1.0: direct}.get(self.gpu_direct, share))
        return ", ".join(details)


def unmet(proof: FabricProof, requirement: Requirement) -> str | None:
    """Return why a run does not meet a requirement; None if it does, or if it cannot apply.

    A requirement on the network does not apply to a single node.
    """
    on_one_node = proof.nodes == 1
    if on_one_node and requirement in NETWORK_ONLY:
        return None
    inside = on_one_node or requirement == "nvlink"
    names = proof.within_node if inside else proof.between_nodes
    if requirement == "nvlink" and not names:
        names = proof.between_nodes
    demand = f"{requirement} is required (--require-transport)"
    if not names:
        return f"{demand}, and there is no evidence of what carries collectives"
    if wrong := [name for name in names if name not in SATISFYING[requirement]]:
        over = f" ({', '.join(proof.interfaces)})" if proof.interfaces and not inside else ""
        return f"{demand}, but collectives use {_titles(wrong)}{over}"
    return None


def _titles(names: Sequence[str]) -> str:
    return " and ".join(TITLES.get(name, name) for name in names)
