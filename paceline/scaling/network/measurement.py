"""Network measurement: one short job over all devices, read into a report and a page."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.hardware import Cluster
from paceline.core.node_groups import split_rounds
from paceline.core.units import pluralize
from paceline.files.documents import write_text, write_value
from paceline.files.nominal_links import nominal_fabric
from paceline.files.run_folder import new_folder
from paceline.machines import JobEnd
from paceline.machines.placement import HostPlacement
from paceline.report.html import render_document
from paceline.scaling.check.fitness import host_names, read_lines
from paceline.scaling.check.preflight import cluster_of, host_job, run_job
from paceline.scaling.network.readings import OPERATIONS, collective_rows, pair_rows
from paceline.scaling.network.report import NetworkReport, network_document, network_report

NETWORKS_FOLDER = "networks"
REPORT_FILE, PAGE_FILE = "network.json", "report.html"
DEFAULT_MAX_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
GROWTH = 4
"""Ratio of successive payloads."""


@dataclass(frozen=True)
class NetworkRequest:
    """Options of a network measurement."""

    where: HostPlacement
    site: Cluster | None = None
    """Cluster with the launcher, the hosts and the settings of the site."""
    device: str = "auto"
    devices: int | None = None
    operations: tuple[str, ...] = tuple(OPERATIONS)
    min_bytes: int = 1024
    max_bytes: int | None = None
    """Bytes of the largest payload, and of a large message between two hosts; None means
    DEFAULT_MAX_BYTES."""
    seconds: float = 10.0
    """Seconds for all collectives together; a pair takes as long as its messages."""
    pairs: bool = True
    limit_s: float = 600.0
    wait_s: float = 600.0
    intra_link: str | None = None
    inter_link: str | None = None
    """Names or rates of the links for a comparison with the nominal rate; None if not stated."""


@dataclass(frozen=True)
class MeasuredNetwork:
    """A report, the folder where it is stored, and notices."""

    report: NetworkReport
    folder: Path
    notices: tuple[str, ...]


def measure_network(
    request: NetworkRequest, root: Path, watch: Callable[[str], None]
) -> MeasuredNetwork:
    """Measure the network of some hosts.

    Raises UserError for a single device, SystemFaultError when nothing was measured, and
    IncompleteError when Slurm did not start the job in time.
    """
    started_s, created = time.monotonic(), datetime.now(UTC)
    cluster, notices = cluster_of(request.where, request.device, request.devices, request.site)
    if cluster.world_size < 2:
        raise UserError(
            "network", "one device has no network", remedy="--devices, --nodes or --hosts"
        )
    fabric = nominal_fabric(request.intra_link, request.inter_link, cluster.devices_per_node)
    name = f"{created:%Y-%m-%d}-{cluster.nodes}x{cluster.name}"
    folder = new_folder(root / NETWORKS_FOLDER, name).resolve()
    watch(
        f"measuring {pluralize(cluster.world_size, 'device')} on {cluster.nodes} x {cluster.name}"
    )
    job = host_job(cluster, "programs.network", _question(cluster, request), request.limit_s)
    end = run_job(job, folder, request.wait_s, "network")
    lines = read_lines(folder, "network")
    names = host_names(cluster, lines)
    collectives = collective_rows(lines)
    pairs = pair_rows(lines, names, cluster.devices_per_node)
    faults = network_faults(lines, names, cluster, end)
    if not collectives and not pairs:
        raise SystemFaultError(
            str(folder), f"nothing was measured: {'; '.join(faults) or 'no rank wrote a line'}"
        )
    report = network_report(
        collectives=collectives,
        pairs=pairs,
        identity=_identity(cluster, request),
        created=created.isoformat(timespec="seconds"),
        elapsed_s=time.monotonic() - started_s,
        faults=faults,
        fabric=fabric,
    )
    write_value(folder / REPORT_FILE, report)
    write_text(folder / PAGE_FILE, render_document(network_document(report, folder)))
    return MeasuredNetwork(report, folder, tuple(notices))


def payloads(smallest: int, largest: int) -> list[int]:
    """Return bytes from `least` to `most`, each four times the one before, and `most` itself."""
    sizes = [smallest]
    while sizes[-1] * GROWTH < largest:
        sizes.append(sizes[-1] * GROWTH)
    return [*sizes, largest] if largest > smallest else sizes


def _question(cluster: Cluster, request: NetworkRequest) -> dict[str, Any]:
    kind = "cpu" if cluster.device == "cpu" else "cuda"
    max_bytes = request.max_bytes or DEFAULT_MAX_BYTES[kind]
    return {
        "device": kind,
        "seconds": request.seconds,
        "operations": list(request.operations),
        "sizes": payloads(request.min_bytes, max_bytes),
        "message_bytes": max_bytes,
        "rounds": _rounds(cluster.nodes) if request.pairs else [],
    }


def _rounds(nodes: int) -> list[list[list[int]]]:
    """Return rounds in which every node meets every other once."""
    if nodes < 2:
        return []
    names = [str(node) for node in range(nodes)]
    rounds = split_rounds(names, 2, "pairs", num_rounds=nodes - 1 + nodes % 2)
    return [[[int(name) for name in group] for group in round_.groups] for round_ in rounds]


def _identity(cluster: Cluster, request: NetworkRequest) -> dict[str, Any]:
    return {
        "device": cluster.device,
        "nodes": cluster.nodes,
        "devices_per_node": cluster.devices_per_node,
        "max_bytes": request.max_bytes,
        "seconds": request.seconds,
    }


def network_faults(
    lines: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    cluster: Cluster,
    end: JobEnd | None,
) -> list[str]:
    """Return the failures by host, and the hosts that did not finish."""
    faults = [
        f"{names[line['node']]}: {line['part']} failed: {line['reason']}"
        for line in lines
        if line["event"] == "fault"
    ]
    for node, name in enumerate(names):
        num_ended = sum(line["event"] == "end" and line["node"] == node for line in lines)
        if num_ended < cluster.devices_per_node:
            why = f": {end.reason}" if end else ""
            faults.append(f"{name} did not finish{why}")
    return faults
