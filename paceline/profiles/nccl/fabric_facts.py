"""Transports and network devices that NCCL's logs of a run report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.files.run_folder import LOGS_FOLDER, NCCL_LOG_FILE
from paceline.profiles.nccl.debug_log import DebugLog, LogFacts

LOGS = NCCL_LOG_FILE.replace("%h", "*").replace("%p", "*")
TRACES = "profiles/nccl-*.log"
COMPLETE_HOSTS = 16
"""Number of hosts of which the logs of all ranks are read; of others only the first."""
NETWORKS = {
    "Socket": "sockets",
    "FastSocket": "sockets",
    "gIB": "gib",
    "FasTrak": "tcpx",
}
"""Transports by the name of NCCL's network."""
PROVIDERS = {"efa": "efa", "cxi": "slingshot", "tcp": "sockets", "sockets": "sockets"}
"""Transports by libfabric provider."""
NVLINK_PATHS, PCIE_PATHS = {"NVL", "NVB"}, {"PIX", "PXB", "PXN", "PHB", "SYS"}
"""Types of paths between the GPUs of a node in NCCL's graphs."""


@dataclass(frozen=True)
class FabricFacts:
    """Transports and ports by NCCL's log; empty without one."""

    within: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    ports: tuple[int, int] | None = None
    """Network devices (used, available) of the host that uses the fewest; None if unknown."""
    gpu_direct: float | None = None
    hosts: tuple[str, ...] = field(default=())


def read_fabric_logs(folder: Path, *, reads_output: bool = False) -> dict[str, LogFacts]:
    """Return the facts of each host's NCCL logs in a run folder.

    `reads_output` also reads the output of the ranks, for a user who has set NCCL_DEBUG.
    """
    files: defaultdict[str, list[Path]] = defaultdict(list)
    for path in sorted(folder.glob(LOGS)):
        host = path.name.removeprefix("nccl.").rpartition(".log")[0].rpartition(".")[0]
        files[host].append(path)
    if not files:
        traces = sorted(folder.glob(TRACES))
        output = sorted((folder / LOGS_FOLDER).glob("rank-*.log")) if reads_output else []
        files[""] = traces or output
    facts: dict[str, LogFacts] = {}
    for at, (host, paths) in enumerate(sorted(files.items())):
        log = DebugLog()
        for path in paths if at < COMPLETE_HOSTS else paths[:1]:
            try:
                log.read(path)
            except OSError:  # a rank's file may have been removed, or is still being created
                continue
        if log.num_lines:
            facts[host] = log.facts
    return facts


def fabric_facts(logs: Mapping[str, LogFacts]) -> FabricFacts:
    """Return the transports and ports of all hosts together."""
    within: dict[str, None] = {}
    between: dict[str, None] = {}
    interfaces: dict[str, None] = {}
    ports: list[tuple[int, int]] = []
    direct = total = 0
    for at, facts in enumerate(logs.values()):
        for kind, count in facts.transports.items():
            if kind.startswith("NET/"):
                between[_network(kind, facts)] = None
                total += count
                direct += count if kind.endswith("GDRDMA") else 0
            elif kind == "P2P/MNNVL":
                between["nvlink"] = None
            else:
                within[_peer(kind, facts)] = None
        if not facts.transports and facts.spans_hosts:
            between.update(dict.fromkeys(_network(f"NET/{n}", facts) for n in facts.networks))
        used = len(facts.used_devices)
        available = facts.num_provider_devices or len(facts.devices)
        if at < COMPLETE_HOSTS and used and available >= used and "sockets" not in between:
            ports.append((used, available))
        if "sockets" in between:
            interfaces.update(dict.fromkeys(facts.socket_addresses))
    return FabricFacts(
        within=tuple(sorted(within)),
        between=tuple(sorted(between)),
        interfaces=tuple(interfaces),
        ports=min(ports) if ports else None,
        gpu_direct=direct / total if total else None,
        hosts=tuple(logs),
    )


def _network(kind: str, facts: LogFacts) -> str:
    """Return the transport of a connection `NET/IB GDRDMA`; NCCL's own name if it is unknown."""
    name = kind.removeprefix("NET/").removesuffix(" GDRDMA")
    if name.startswith("IB"):
        layers = {device.split("/")[1] for device in facts.devices if "/" in device}
        return {"IB": "infiniband", "RoCE": "roce"}.get("".join(layers), "rdma")
    if name.endswith(("Libfabric", "OFI")):
        providers = {PROVIDERS.get(word.split(";")[0], word) for word in facts.providers}
        return providers.pop() if len(providers) == 1 else "libfabric"
    if name.startswith("GPUDirectTCPX"):
        return "tcpx"
    return NETWORKS.get(name, name)


def _peer(kind: str, facts: LogFacts) -> str:
    """Return the transport of a connection within a node: NVLink, PCIe, or CPU memory."""
    if kind.startswith("SHM"):
        return "shm"
    if not kind.startswith("P2P"):
        return kind
    if facts.has_nvls or (facts.paths and facts.paths <= NVLINK_PATHS):
        return "nvlink"
    return "pcie" if facts.paths & PCIE_PATHS else "p2p"
