"""Storage measurement: one short program on every host, read into a report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.hardware import Cluster
from paceline.core.units import MIB, binary, pluralize
from paceline.files.documents import write_value
from paceline.files.run_folder import new_folder
from paceline.machines import JobEnd
from paceline.machines.placement import HostPlacement
from paceline.scaling.check.fitness import host_names, read_lines
from paceline.scaling.check.preflight import cluster_of, host_job, run_job
from paceline.scaling.storage.report import OPERATIONS, StorageDemand, StorageReport, storage_report

STORAGE_FOLDER = "storage"
REPORT_FILE = "storage.json"
SAMPLE_BYTES = 8194
"""Default bytes of a sample when no recipe gives them: 4,097 tokens of two bytes each."""
BLOCK_BYTES = 4 * MIB
"""Block size. A process's file consists of whole blocks, at least two."""


@dataclass(frozen=True)
class StorageRequest:
    """Options of a storage measurement."""

    where: HostPlacement
    paths: tuple[Path, ...]
    site: Cluster | None = None
    """Cluster with the launcher, the hosts and the settings of the site."""
    device: str = "auto"
    devices: int | None = None
    """Number of processes per host at once; None means the number of its devices."""
    operations: tuple[str, ...] = tuple(OPERATIONS)
    processes: tuple[int, ...] = ()
    """Numbers of processes at once, one measurement each; empty means one, and all."""
    size_bytes: int = 1024 * MIB
    """Total bytes of the files of all processes of a host."""
    sample_bytes: int | None = None
    seconds: float = 10.0
    """Seconds per folder, for all operations together."""
    wait_s: float = 600.0


@dataclass(frozen=True)
class MeasuredStorage:
    """A report, the folder where it is stored, and notices."""

    report: StorageReport
    folder: Path
    notices: tuple[str, ...]


def measure_storage(
    request: StorageRequest,
    root: Path,
    watch: Callable[[str], None],
    demand: Callable[[Cluster], StorageDemand] | None = None,
) -> MeasuredStorage:
    """Measure storage; `demand` returns the demand of a training run on these hosts.

    Raises UserError for a folder of this machine that cannot be measured, SystemFaultError when
    nothing was measured, and IncompleteError when Slurm did not start the job in time.
    """
    started_s, created = time.monotonic(), datetime.now(UTC)
    cluster, notices = cluster_of(request.where, request.device, request.devices, request.site)
    needed_demand = demand(cluster) if demand else None
    if needed_demand and request.sample_bytes:
        needed_demand = needed_demand.model_copy(update={"sample_bytes": request.sample_bytes})
    sample_bytes = (
        request.sample_bytes or (needed_demand and needed_demand.sample_bytes) or SAMPLE_BYTES
    )
    question = _question(cluster, request, sample_bytes)
    if cluster.runs_here:
        _check_here(question)
    folder = new_folder(root / STORAGE_FOLDER, f"{created:%Y-%m-%d}-{cluster.nodes}").resolve()
    hosts = "this machine" if cluster.nodes == 1 else f"{cluster.nodes} hosts"
    counts = " and ".join(map(str, question["processes"]))
    watch(f"measuring {', '.join(question['paths'])} on {hosts} with {counts} processes at once")
    # One program per host, which needs no device and starts the processes itself.
    alone = {"device": "cpu", "devices_per_node": 1, "bind": "none"}
    one_each = cluster.model_copy(update=alone)
    limit_s = 60.0 + 5 * request.seconds * len(request.paths)
    job = host_job(one_each, "programs.storage", question, limit_s)
    end = run_job(job, folder, request.wait_s, "storage")
    lines = read_lines(folder, "storage")
    names = host_names(one_each, lines)
    faults = _faults(lines, names, end)
    if not any(line["event"] == "storage" for line in lines):
        raise SystemFaultError(
            str(folder), f"nothing was measured: {'; '.join(faults) or 'no host wrote a line'}"
        )
    report = storage_report(
        lines=lines,
        names=names,
        identity={"hosts": cluster.nodes, "devices_of_each": cluster.devices_per_node, **question},
        created=created.isoformat(timespec="seconds"),
        elapsed_s=time.monotonic() - started_s,
        faults=faults,
        demand=needed_demand,
    )
    write_value(folder / REPORT_FILE, report)
    return MeasuredStorage(report, folder, tuple(notices))


def _question(cluster: Cluster, request: StorageRequest, sample_bytes: int) -> dict[str, Any]:
    counts = request.processes or tuple(sorted({1, cluster.devices_per_node}))
    min_bytes = 2 * BLOCK_BYTES * max(counts)
    if request.size_bytes < min_bytes:
        raise UserError(
            f"--size {binary(request.size_bytes)}",
            f"leaves too little for each of {pluralize(max(counts), 'process')}",
            allowed=f"{binary(min_bytes)} or more",
        )
    blocks = request.size_bytes // max(counts) // BLOCK_BYTES
    if "sample" in request.operations and sample_bytes > blocks * BLOCK_BYTES:
        raise UserError(
            f"--sample-bytes {sample_bytes}",
            f"is more than the file of each of {pluralize(max(counts), 'process')}",
            allowed=f"{blocks * BLOCK_BYTES} or less",
            remedy="--size BYTES",
        )
    # A relative path is the same folder only on hosts that share it, so make it absolute.
    return {
        "device": "cpu",
        "paths": [os.path.abspath(path) for path in request.paths],  # noqa: PTH100
        "operations": list(request.operations),
        "processes": list(counts),
        "seconds": request.seconds,
        "size_bytes": request.size_bytes,
        "sample_bytes": sample_bytes,
    }


def _check_here(question: Mapping[str, Any]) -> None:
    """Raise UserError for a folder that is not writable or has too little space."""
    for path in question["paths"]:
        if not os.path.isdir(path):  # noqa: PTH112
            raise UserError(
                path, "is not a folder", remedy="choose an existing folder, or create it"
            )
        if not os.access(path, os.W_OK | os.X_OK):
            raise UserError(
                path, "cannot be written to", remedy="choose a folder that you can write to"
            )
        disk = os.statvfs(path)
        free = disk.f_bavail * disk.f_frsize
        if free < question["size_bytes"]:
            size = binary(question["size_bytes"])
            raise UserError(path, f"has {binary(free)} free, not {size}", remedy="--size BYTES")


def _faults(
    lines: Sequence[Mapping[str, Any]], names: Sequence[str], end: JobEnd | None
) -> list[str]:
    """Return the failures by host, and the hosts that did not finish."""
    faults = [
        f"{names[line['node']]}:{line['part']} {line['reason']}"
        for line in lines
        if line["event"] == "fault"
    ]
    ended_nodes = {line["node"] for line in lines if line["event"] == "end"}
    why = f": {end.reason}" if end and end.reason else ""
    faults += [
        f"{name} did not finish{why}" for node, name in enumerate(names) if node not in ended_nodes
    ]
    return faults
