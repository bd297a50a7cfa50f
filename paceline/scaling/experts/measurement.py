"""Expert measurement: one short job over all devices, read into a report."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.hardware import Cluster
from paceline.core.units import pluralize
from paceline.files.documents import write_value
from paceline.files.run_folder import new_folder
from paceline.machines.placement import HostPlacement
from paceline.scaling.check.fitness import host_names, read_lines
from paceline.scaling.check.preflight import cluster_of, host_job, run_job
from paceline.scaling.experts.report import (
    ExpertsProblem,
    ExpertsReport,
    absent_dispatchers,
    experts_rows,
)
from paceline.scaling.network.measurement import network_faults

EXPERTS_FOLDER, REPORT_FILE = "experts", "experts.json"
DEFAULT_PROBLEMS = {
    "cuda": ExpertsProblem(tokens=4096, hidden=7168, ffn=2048, experts=256, top_k=8, dtype="bf16"),
    "cpu": ExpertsProblem(tokens=512, hidden=256, ffn=256, experts=16, top_k=4, dtype="fp32"),
}
"""Sizes by device type; on GPUs those of DeepSeek V3 (arXiv:2412.19437, section 4.2)."""


@dataclass(frozen=True)
class ExpertsRequest:
    """Options of an expert measurement; None for the default size of the device type."""

    where: HostPlacement
    site: Cluster | None = None
    """Cluster with the launcher, the hosts and the settings of the site."""
    device: str = "auto"
    devices: int | None = None
    tokens: int | None = None
    hidden: int | None = None
    ffn: int | None = None
    experts: int | None = None
    top_k: int | None = None
    dtype: str | None = None
    seconds: float = 10.0
    limit_s: float = 600.0
    wait_s: float = 600.0

    def problem(self, kind: str, ranks: int) -> ExpertsProblem:
        """Return the sizes on `ranks` devices; raise UserError if they cannot be balanced."""
        names = ExpertsProblem.model_fields
        sizes = {name: value for name in names if (value := getattr(self, name)) is not None}
        problem = DEFAULT_PROBLEMS[kind].model_copy(update=sizes)
        if problem.experts % ranks:
            raise UserError(
                f"--experts {problem.experts}",
                f"is not a multiple of {pluralize(ranks, 'rank')}, which hold equally many",
                allowed=f"a multiple of {ranks}",
            )
        if problem.top_k > problem.experts:
            raise UserError(
                f"--top-k {problem.top_k}", "is more than the experts", allowed=str(problem.experts)
            )
        if problem.rows % problem.experts:
            raise UserError(
                f"--tokens {problem.tokens}",
                f"x top-k {problem.top_k} is not a multiple of {problem.experts} experts, which "
                "get equally many rows",
                allowed=f"a multiple of {problem.experts}",
            )
        return problem


@dataclass(frozen=True)
class MeasuredExperts:
    """A report, the folder where it is stored, and notices."""

    report: ExpertsReport
    folder: Path
    notices: tuple[str, ...]


def measure_experts(
    request: ExpertsRequest, root: Path, watch: Callable[[str], None]
) -> MeasuredExperts:
    """Measure dispatch, expert GEMMs and combine over all devices of some hosts.

    Raises UserError for a single device and for sizes that cannot be balanced, SystemFaultError
    when nothing was measured, and IncompleteError when Slurm did not start the job in time.
    """
    started_s, created = time.monotonic(), datetime.now(UTC)
    cluster, notices = cluster_of(request.where, request.device, request.devices, request.site)
    ranks = cluster.world_size
    if ranks < 2:
        raise UserError(
            "experts", "one device exchanges nothing", remedy="--devices, --nodes or --hosts"
        )
    kind = "cpu" if cluster.device == "cpu" else "cuda"
    problem = request.problem(kind, ranks)
    name = f"{created:%Y-%m-%d}-{cluster.nodes}x{cluster.name}"
    folder = new_folder(root / EXPERTS_FOLDER, name).resolve()
    watch(f"measuring {pluralize(ranks, 'device')} on {cluster.nodes} x {cluster.name}")
    question = {"device": kind, "seconds": request.seconds, **problem.model_dump(mode="json")}
    job = host_job(cluster, "programs.experts", question, request.limit_s)
    end = run_job(job, folder, request.wait_s, "experts")
    lines = read_lines(folder, "experts")
    faults = network_faults(lines, host_names(cluster, lines), cluster, end)
    rows = experts_rows(lines, problem, ranks)
    if not rows:
        raise SystemFaultError(
            str(folder), f"nothing was measured: {'; '.join(faults) or 'no rank wrote a line'}"
        )
    about = next(line for line in lines if line["event"] == "torch")
    report = ExpertsReport(
        created=created.isoformat(timespec="seconds"),
        identity={"nodes": cluster.nodes, "devices_per_node": cluster.devices_per_node},
        problem=problem,
        ranks=ranks,
        device_name=about["device_name"],
        torch=about["torch"],
        backend=about["backend"],
        elapsed_s=time.monotonic() - started_s,
        rows=rows,
        absent=absent_dispatchers(lines),
        wrong=sum(line["wrong"] for line in lines if line["event"] == "experts"),
        faults=tuple(dict.fromkeys(faults)),
    )
    write_value(folder / REPORT_FILE, report)
    return MeasuredExperts(report, folder, tuple(notices))
