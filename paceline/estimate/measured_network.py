"""Network between nodes as collectives measured it, as an input of estimates."""

from __future__ import annotations

from dataclasses import replace

from paceline.core.errors import UserError
from paceline.core.fabric import TITLES, FabricProof
from paceline.core.hardware import Cluster
from paceline.core.run_report import RunReport
from paceline.core.units import binary, percent, pluralize, si
from paceline.core.value import Value
from paceline.estimate.model.machine import Machine, inter_rate

NO_PROBE = "has no fabric probe: only the native trainer has one"
MAX_SPREAD = 0.5
"""Maximum robust relative spread of a bandwidth that an estimate may use."""


class NetworkRate(Value):
    """Bus bandwidth of an all-reduce of all devices of several nodes."""

    source: str
    """Run or file, for example `run a`."""
    device: str
    nodes: int
    devices_per_node: int
    transports: tuple[str, ...]
    """Transport of the all-reduce between nodes; empty if unknown."""
    interfaces: tuple[str, ...]
    """Network interfaces or RDMA ports in use; empty if unknown."""
    bus_bytes_per_s: float
    """Bus bandwidth as nccl-tests defines it, without latency."""
    spread: float | None
    """Its robust relative spread; None if the source has only means."""
    n: int
    """Measurements with each of the two payloads."""
    payload_bytes: int
    small_payload_bytes: int
    convention: str = "all-reduce bus bandwidth, from the difference of two payloads"

    @property
    def bytes_per_s(self) -> float:
        """Bytes/s of one device's share of its node's ports.

        A ring crosses a node once, over all ports. If a link inside the nodes limits it, the
        network is faster than this.
        """
        return self.bus_bytes_per_s / self.devices_per_node

    @property
    def note(self) -> str:
        """Description of the figure and its origin."""
        names = [TITLES.get(name, name) for name in self.transports] or ["transport unknown"]
        over = ", ".join((*names, *self.interfaces))
        spread = "unknown" if self.spread is None else percent(self.spread, 1)
        return (
            f"the network has {si(self.bytes_per_s, 'B/s')} per device, measured in {self.source} "
            f"({self.nodes} x {self.devices_per_node} {self.device}; {over}): all-reduce bus "
            f"bandwidth {si(self.bus_bytes_per_s, 'B/s')}, spread {spread}, "
            f"{pluralize(self.n, 'measurement')} each with {binary(self.payload_bytes)} and "
            f"{binary(self.small_payload_bytes)}"
        )


def network_of_run(report: RunReport) -> NetworkRate:
    """Return the network of a run; raises UserError if its fabric probe did not measure it."""
    proof, spec, where = report.result.fabric, report.spec, f"run {report.result.run}"
    remedy = "`paceline run RECIPE` with GPUs of two nodes or more"
    if spec is None:
        raise UserError(where, "is an imported log, without a fabric probe", remedy=remedy)
    problem = _cluster_problem(spec.cluster) or _proof_problem(proof)
    if proof is None or problem:
        raise UserError(where, problem or NO_PROBE, remedy=remedy)
    rate, spread = proof.asymptotic_bytes_per_s, proof.asymptotic_spread
    large, small = proof.payload_bytes, proof.small_payload_bytes
    if not (rate and spread is not None and large and small and proof.calls):
        raise UserError(
            where, "has a fabric probe whose times do not show the bandwidth", remedy=remedy
        )
    return NetworkRate(
        source=where,
        device=spec.cluster.device,
        nodes=spec.cluster.nodes,
        devices_per_node=spec.cluster.devices_per_node,
        transports=proof.between_nodes,
        interfaces=proof.interfaces,
        bus_bytes_per_s=rate,
        spread=spread,
        n=proof.calls,
        payload_bytes=large,
        small_payload_bytes=small,
    )


def _cluster_problem(cluster: Cluster) -> str | None:
    if cluster.world_size == 1:
        return "has no fabric probe: it trained on one device"
    if cluster.nodes == 1:
        return "is on one node: its fabric probe did not use a network between nodes"
    if cluster.device == "cpu":
        return "trained on CPUs: the rate of its all-reduce (gloo) is not that of GPUs"
    return None


def _proof_problem(proof: FabricProof | None) -> str | None:
    if proof is None or proof.bus_bytes_per_s is None:
        return NO_PROBE
    if proof.problem:
        return f"is invalid: {proof.problem}"
    if "nvlink" in proof.between_nodes:
        return "has all nodes in one NVLink domain: its fabric probe did not use the network"
    if (proof.asymptotic_spread or 0) > MAX_SPREAD:
        spread = percent(proof.asymptotic_spread or 0, 0)
        return f"has a fabric probe that varies too much: spread {spread}"
    return None


def with_measured_network(machine: Machine, network: NetworkRate, nodes: int) -> Machine:
    """Return the machine of `nodes` nodes with a measured network.

    Raises UserError for a CPU, and for several nodes with another number of devices each: it is
    unknown how many ports other devices would use.
    """
    if machine.generation == "cpu":
        raise UserError(
            "--inter", f"{network.source} was measured on {network.device}, which is not this CPU"
        )
    if nodes > 1 and machine.devices_per_node != network.devices_per_node:
        raise UserError(
            "--inter",
            f"{network.source} was measured with "
            f"{pluralize(network.devices_per_node, 'device')} per node, not "
            f"{machine.devices_per_node}",
            allowed="a measurement with all devices of the nodes",
            remedy=f"or --per-node {network.devices_per_node}",
        )
    default = inter_rate(None, machine.generation, machine.devices_per_node).note
    return replace(
        machine,
        inter_bytes_per_s=network.bytes_per_s,
        inter_measured=True,
        proxied="efa" in network.transports,
        assumed_properties=machine.assumed_properties._replace(inter=False),
        notes=(*(note for note in machine.notes if note != default), network.note),
    )
