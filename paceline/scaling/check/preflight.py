"""Check of hosts before a run: one job on all hosts, launched, read, judged and reported."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.core.errors import IncompleteError, UserError
from paceline.core.hardware import Cluster, with_secrets
from paceline.core.job import Job
from paceline.core.launchers import capabilities
from paceline.core.node_groups import split_rounds
from paceline.core.units import pluralize, si
from paceline.files.documents import read_text, read_value, write_value
from paceline.files.run_folder import new_folder
from paceline.files.trainer_program import PROGRAM_FOLDER, program_files
from paceline.machines import Handle, JobEnd, launcher
from paceline.machines.node.binding import with_binding
from paceline.machines.placement import HostPlacement, device_kind, with_placement
from paceline.machines.probe.inventory import inventory, local_cluster
from paceline.machines.slurm.client import allocation_hosts
from paceline.report.document import Column, Document, Notes, Table, Verdict
from paceline.report.openmetrics import Gauge, openmetrics_text
from paceline.scaling.analysis.slow_nodes import HealthySpeed
from paceline.scaling.check.fitness import (
    MEASURES,
    USABLE,
    CheckReport,
    HostReport,
    Past,
    Reading,
    host_readings,
    judge,
    read_lines,
)

QUESTION_FILE = "question.json"
POLL_S = 0.1


def cluster_of(
    where: HostPlacement,
    device: str = "auto",
    devices: int | None = None,
    site: Cluster | None = None,
) -> tuple[Cluster, list[str]]:
    """Return the hosts as a cluster with the devices of `site` or of this machine, and notices.

    `devices` is the number per host; None means the hosts' slots, those of `site`, the number of
    GPUs as on this machine, or one process. Raises UserError for hosts with different numbers of
    slots.
    """
    if site is not None and site.runs_here:
        site = None  # it only describes links
    if site is not None:
        where = replace(where, launcher=where.kind(os.environ, site.launcher))
    machine = inventory()
    kind, notices = (site.device, list[str]()) if site else device_kind(device, machine)
    can = capabilities(where.kind(os.environ))
    if can.allocations and not where.hosts:
        number = where.allocation or os.environ.get("SLURM_JOB_ID")
        hosts = allocation_hosts(number) if number else ()
        where = replace(where, hosts=hosts[: where.nodes] if hosts else ())
    slots = {host.slots for host in where.hosts} - {None}
    if len(slots) > 1:
        raise UserError(
            "hosts", "have different numbers of slots", remedy="check them in two parts"
        )
    alone = 2 if can.runs_here else 1
    count = devices or next(iter(slots), None)
    if site is None and kind == "cpu":
        count = count or alone
    if site is not None:
        cluster = site.model_copy(update={"devices_per_node": count or site.devices_per_node})
    else:
        name = "cpu" if kind == "cpu" else machine["gpus"][0]["name"]
        cluster = local_cluster(machine, name, None, count)
    # Each host chooses the threads per rank by its own number of cores.
    cluster = cluster.model_copy(update={"threads_per_device": None, "bind": "auto"})
    cluster = with_placement(cluster, where, has_limit=True)
    if can.lists_hosts and not (can.allocations or cluster.hosts):
        hosts = launcher(cluster.launcher).available_hosts(cluster)[: where.nodes]
        names = tuple(host.name for host in hosts)
        cluster = cluster.model_copy(update={"hosts": names, "nodes": len(names)})
    return cluster, notices


def host_job(cluster: Cluster, program: str, question: Mapping[str, Any], limit_s: float) -> Job:
    """Return a job that runs a program of the trainer package on every device with `question`."""
    files = {**program_files(program), QUESTION_FILE: json.dumps(question) + "\n"}
    return with_binding(
        Job(
            name=f"paceline-{program.rpartition('.')[2].replace('_', '-')}",
            python=cluster.interpreter,
            program=(PROGRAM_FOLDER, QUESTION_FILE),
            env={"PYTHONUNBUFFERED": "1", **with_secrets(cluster.env, os.environ)},
            files=files,
            nodes=cluster.nodes,
            devices_per_node=cluster.devices_per_node,
            timeout_s=limit_s,
            collective_limit_s=max(20.0, limit_s / 5),
            cluster=cluster,
        )
    )


def run_job(job: Job, folder: Path, wait_s: float, verb: str) -> JobEnd | None:
    """Run the job to its end or its limit, and return the launcher's verdict on its end.

    Raises IncompleteError when Slurm did not start the job in time; the job is then cancelled.
    """
    assert job.cluster is not None
    machine = launcher(job.cluster.launcher)
    machine.prepare(job, folder)
    handle = machine.submit(job, folder)
    try:
        return wait_for_end(handle, wait_s, verb)
    finally:
        handle.sweep()


def wait_for_end(handle: Handle, wait_s: float, verb: str) -> JobEnd | None:
    """Wait for the end of a submitted job; raises the same errors as `run_job`."""
    started_s = time.monotonic()
    try:
        while handle.poll() is None:
            if handle.waiting and time.monotonic() - started_s > wait_s:
                raise IncompleteError(
                    verb,
                    f"did not start within {wait_s:g} s: {handle.phase}",
                    remedy="--wait SECONDS, or fewer --nodes",
                )
            if handle.timed_out:
                handle.stop()
                return handle.verdict() or JobEnd("timeout", "did not end in time")
            time.sleep(POLL_S)
    except BaseException:  # an interrupt must also stop the processes on the hosts
        handle.stop()
        raise
    return handle.verdict()


CHECKS_FOLDER = "checks"
REPORT_FILE = "check.json"
MAX_EARLIER_CHECKS = 20
"""Maximum number of earlier checks in a host's history."""


@dataclass(frozen=True)
class CheckRequest:
    """Options of a check."""

    where: HostPlacement
    device: str = "auto"
    devices: int | None = None
    """Number of devices per host; None means slots, the GPUs of this machine, or one process."""
    site: Cluster | None = None
    """Cluster with the launcher, the hosts and the settings of the site."""
    seconds: float = 2.0
    """Seconds per measurement."""
    num_rounds: int = 7
    """Number of partners of each host in the pair measurements."""
    at_once: int | None = None
    """Number of hosts whose rates are measured at the same time; None means all."""
    limit_s: float = 300.0
    wait_s: float = 600.0
    """Maximum seconds to wait in Slurm's queue."""
    against: Path | None = None
    alone_s: float | None = None
    """Time limit in seconds for a check of every device alone, without communication; a check that
    takes longer is killed."""


@dataclass(frozen=True)
class FinishedCheck:
    """A finished check with its report and folder."""

    report: CheckReport
    folder: Path
    notices: tuple[str, ...]


Watch = Callable[[str], None]


def check(request: CheckRequest, root: Path, watch: Watch) -> FinishedCheck:
    """Check the hosts.

    Raises UserError or SystemFaultError when no host can be reached, and IncompleteError when Slurm
    did not start the check in time; its job is then cancelled.
    """
    started_s, created = time.monotonic(), datetime.now(UTC)
    cluster, notices = cluster_of(request.where, request.device, request.devices, request.site)
    references = _references(request.against, cluster)
    folder = new_folder(root / CHECKS_FOLDER, f"{created:%Y-%m-%d}-{cluster.nodes}x{cluster.name}")
    folder = folder.resolve()
    if cluster.capabilities.needs_hosts:
        watch(f"logging in to {pluralize(cluster.nodes, 'host')}")
    unfit = launcher(cluster.launcher).unfit_hosts(cluster, folder)
    hosts = cluster.hosts
    cluster = _without(cluster, unfit)
    lines: list[dict[str, Any]] = []
    verdict: JobEnd | None = None
    if cluster is not None:
        watch(f"measuring {pluralize(cluster.nodes, 'host')}")
        verdict = run_job(_job(cluster, request), folder, request.wait_s, "check")
        lines = read_lines(folder)
    readings = [
        *(Reading(host, faults=(why.reason,), reached=why.reached) for host, why in unfit.items()),
        *(host_readings(cluster, lines, verdict) if cluster else ()),
    ]
    order = {host: at for at, host in enumerate(hosts)}
    readings.sort(key=lambda reading: order.get(reading.host, len(order)))
    identity = _identity(cluster, request, lines)
    past = Past(_earlier(root, identity), references)
    report = judge(
        readings,
        past,
        identity,
        created.isoformat(timespec="seconds"),
        time.monotonic() - started_s,
    )
    write_value(folder / REPORT_FILE, report)
    return FinishedCheck(report, folder, tuple(notices))


def _without(cluster: Cluster, unfit: Collection[str]) -> Cluster | None:
    """Return the cluster of the other hosts, or None when there are none."""
    hosts = tuple(host for host in cluster.hosts if host not in unfit)
    if not cluster.hosts:
        return cluster
    return cluster.model_copy(update={"hosts": hosts, "nodes": len(hosts)}) if hosts else None


def _job(cluster: Cluster, request: CheckRequest) -> Job:
    question = {
        "device": "cpu" if cluster.device == "cpu" else "cuda",
        "dtype": _dtype(cluster),
        "seconds": request.seconds,
        "at_once": request.at_once,
        "rounds": [] if request.alone_s else _rounds(cluster.nodes, request.num_rounds),
        "alone_s": request.alone_s,
    }
    return host_job(cluster, "programs.node_check", question, request.limit_s)


def _dtype(cluster: Cluster) -> str:
    return "fp32" if cluster.device == "cpu" else "bf16"


def _rounds(nodes: int, partners: int) -> list[list[list[int]]]:
    """Return rounds of pairs of nodes, with up to `partners` different partners per node."""
    if nodes < 2 or partners < 1:
        return []
    names = [str(node) for node in range(nodes)]
    rounds = split_rounds(names, 2, "pairs", num_rounds=min(partners, nodes - 1 + nodes % 2))
    return [[[int(name) for name in group] for group in round_.groups] for round_ in rounds]


def _identity(
    cluster: Cluster | None, request: CheckRequest, lines: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    if cluster is None:
        return {}
    torch = sorted({str(line.get("torch")) for line in lines if line["event"] == "facts"})
    return {
        **_kind(cluster),
        "torch": ", ".join(torch),
        "seconds": request.seconds,
        "at_once": min(request.at_once or cluster.nodes, cluster.nodes),
        **({"alone": True} if request.alone_s else {}),
    }


def _earlier(root: Path, identity: Mapping[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Return values by measure and host from the last checks of this kind; skip drained hosts."""
    rates: dict[str, dict[str, list[float]]] = {}
    files = sorted((root / CHECKS_FOLDER).glob(f"*/{REPORT_FILE}"), key=lambda f: f.stat().st_mtime)
    for file in files[-MAX_EARLIER_CHECKS:]:
        try:
            report = CheckReport.model_validate_json(read_text(file))
        except (OSError, UnicodeDecodeError, ValidationError):
            continue
        if report.identity != identity:
            continue
        for host in report.hosts:
            for what, figure in host.figures.items() if host.verdict in USABLE else ():
                rates.setdefault(what, {}).setdefault(host.host, []).append(figure.value)
    return rates


def _references(file: Path | None, cluster: Cluster) -> dict[str, HealthySpeed]:
    """Return the medians of another check's hosts as references.

    Raises UserError for a check that is not comparable.
    """
    if file is None:
        return {}
    report = read_value(file / REPORT_FILE if file.is_dir() else file, CheckReport)
    kind = _kind(cluster)
    differences = [
        f"{name} {report.identity.get(name)}"
        for name in kind
        if report.identity.get(name) != kind[name]
    ]
    if differences:
        raise UserError(
            f"--against {file}", f"is a different kind of check: {', '.join(differences)}"
        )
    return {what: HealthySpeed(m.median, m.spread) for what, m in report.measures.items()}


def _kind(cluster: Cluster) -> dict[str, Any]:
    return {
        "device": cluster.device,
        "devices_per_host": cluster.devices_per_node,
        "dtype": _dtype(cluster),
    }


def check_document(outcome: FinishedCheck) -> Document:
    """Return the report of a check for every output format."""
    report = outcome.report
    num_suspects = sum(host.verdict == "suspect" for host in report.hosts)
    badge = Verdict("all fit", "good")
    if report.drain_withheld:
        badge = Verdict("most hosts failed", "alert")
    elif report.drain:
        badge = Verdict(f"{len(report.drain)} to drain", "alert")
    elif num_suspects:
        badge = Verdict(f"{num_suspects} suspect", "plain")
    return Document(
        kind=f"check of hosts, {report.created}",
        title=pluralize(len(report.hosts), "host"),
        verdict=badge,
        answer=report.sentences,
        sections=(
            Table(columns=_columns(), rows=[_row(host) for host in report.hosts]),
            Notes(
                title="Evidence",
                lines=[
                    f"{host.host} is {host.verdict}: {line}"
                    for host in report.hosts
                    for line in (*host.evidence, *host.remarks)
                ],
            ),
        ),
        notes=(str(outcome.folder),),
        data={**report.model_dump(mode="json"), "folder": str(outcome.folder)},
    )


def node_line(report: CheckReport) -> str:
    """Return the verdict on the only host of a check in one line, such as `n1: fit, ...`."""
    (host,) = report.hosts
    verdict = "not finished" if report.drain_withheld else host.verdict
    rates = [f"{what} {si(figure.value, figure.unit)}" for what, figure in host.figures.items()]
    reasons = "; ".join((*host.evidence, *host.remarks)) or ", ".join(rates) or "nothing measured"
    return f"{host.host}: {verdict}: {' '.join(reasons.split())}"


def check_metrics(report: CheckReport) -> str:
    """Return a check as OpenMetrics text: the verdict and the rates of each host."""
    time_unix = datetime.fromisoformat(report.created).timestamp()
    gauges = [
        Gauge("check_time_seconds", time_unix, "Time of the last check, Unix time.", {}),
        Gauge("check_duration_seconds", report.elapsed_s, "Duration of the check.", {}),
    ]
    for host in report.hosts:
        labels = {"host": host.host}
        is_fit = float(host.verdict in USABLE)
        drain = float(host.host in report.drain)
        gauges += [
            Gauge("check_host_usable", is_fit, "1 for a host that is fit or suspect.", labels),
            Gauge("check_host_drain", drain, "1 for a host to drain.", labels),
            Gauge(
                "check_host_info", 1.0, "Verdict on a host.", {**labels, "verdict": host.verdict}
            ),
        ]
        gauges += [
            Gauge(f"check_{what}", figure.value, f"{MEASURES[what][0]}, {figure.unit}.", labels)
            for what, figure in host.figures.items()
        ]
    return openmetrics_text(gauges)


def _row(host: HostReport) -> dict[str, Any]:
    rates = {what: figure.value for what, figure in host.figures.items()}
    return {
        "host": host.host,
        "verdict": host.verdict,
        "gpus": len(host.facts.get("gpus") or []) if host.facts else None,
        "cores": host.facts.get("num_cores"),
        **rates,
        "why": "; ".join((*host.evidence, *host.remarks)) or None,
    }


def _columns() -> list[Column]:
    titles = {"gemm": "gemm", "memory": "memory", "collective": "in host", "pair": "pairs"}
    rates = [
        Column(what, titles[what], lambda value, unit=unit: si(value, unit), "right")
        for what, (_, unit) in MEASURES.items()
    ]
    return [
        Column("host", "host"),
        Column("verdict", "verdict"),
        Column("gpus", "GPUs", str, "right"),
        Column("cores", "cores", str, "right"),
        *rates,
        Column("why", "why"),
    ]
