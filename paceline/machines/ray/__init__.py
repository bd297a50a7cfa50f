"""Launcher for an existing Ray cluster: one actor per node starts the agent of that node.

A small driver program has the connection to Ray, so that Paceline itself does not load Ray. It runs
here, or as a submitted job inside the cluster if the address is that of a dashboard. Nodes that do
not share the run folder get a copy of it, and their logs and steps are copied back.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.hardware import CONTAINER_PYTHON, Cluster
from paceline.core.hosts import Host
from paceline.core.job import Job
from paceline.files.documents import write_text
from paceline.files.run_folder import SCRIPT_FILE
from paceline.machines import UnfitHost
from paceline.machines.node.script import NODE_SCRIPT, prepare_node, render_node
from paceline.machines.ray import submission
from paceline.machines.ray.run import REMEDIES, RayRun, list_nodes, request_for, start_run
from paceline.machines.ray.submission import (
    cancel_job,
    dashboard_of,
    follow_job,
    read_record,
    submit_job,
)


def render(job: Job) -> str:
    """Return node.sh, with comments that show how Ray starts it on each node."""
    request = request_for(_cluster(job))
    places = ", ".join(request["hosts"]) or "chosen by Ray"
    lines = [
        f"# On Ray ({request['address']}), one actor per node of a STRICT_SPREAD placement group:",
        f"#   nodes: {job.nodes} ({places}), each with {json.dumps(request['resources'])}",
        f"#   node N: bash {NODE_SCRIPT} N ADDRESS PORT",
    ]
    if dashboard_of(_cluster(job)):
        if "working_dir" in _cluster(job).ray.runtime_env:
            what = "has working_dir, which a submitted job needs for the run folder"
            raise UserError("cluster.ray.runtime_env", what, remedy="use py_modules")
        lines.append("# A submitted job does so. Its working_dir is a copy of the run folder.")
    return render_node(_with_python(job)) + "\n".join(lines) + "\n"


def prepare(job: Job, folder: Path) -> None:
    """Write the job's files and its scripts into the run folder."""
    prepare_node(_with_python(job), folder)
    write_text(folder / SCRIPT_FILE, render(job))


def submit(job: Job, folder: Path) -> RayRun:
    """Connect to Ray and request the nodes, or submit a job that does so.

    The handle starts node.sh on the nodes when it is polled; a submitted job does so itself.
    """
    job, folder = _with_python(job), folder.resolve()
    if address := dashboard_of(_cluster(job)):
        return submit_job(job, folder, address)
    return start_run(job, folder)


def attach(job: Job, folder: Path) -> RayRun | None:
    """Return a submitted job that has lost its controller, to be followed to its end.

    None if there is none. Raises SystemFaultError if the dashboard does not answer.
    """
    return follow_job(job, folder.resolve())


def ended_code(folder: Path) -> int | None:
    """Return the exit code of a submitted job, if its end is recorded."""
    record = read_record(folder)
    return record.exit_code if record else None


def cancel_orphan(folder: Path) -> str | None:
    """Stop a submitted job whose controller has died; return its name, if there is any."""
    return cancel_job(folder)


def unfit_hosts(cluster: Cluster, folder: Path) -> dict[str, UnfitHost]:
    """Return the named hosts that are not nodes of the cluster or lack the resources."""
    if not cluster.hosts:
        return {}
    names = {name for node in _nodes(cluster) for name in node.values()}
    reason = "is not an alive node of the Ray cluster with the requested resources"
    return {host: UnfitHost(reason, reached=False) for host in cluster.hosts if host not in names}


def available_hosts(cluster: Cluster) -> tuple[Host, ...]:
    """Return the nodes of the cluster that have the resources of one node of a job."""
    nodes = _nodes(cluster)
    if not nodes:
        needs = ", ".join(f"{n:g} {name}" for name, n in request_for(cluster)["resources"].items())
        raise SystemFaultError("Ray", f"no node has {needs}", remedy=REMEDIES["resources"])
    return tuple(Host(name=node["name"]) for node in nodes)


def _nodes(cluster: Cluster) -> list[dict[str, str]]:
    address = dashboard_of(cluster)
    return submission.list_nodes(cluster, address) if address else list_nodes(cluster)


def _cluster(job: Job) -> Cluster:
    assert job.cluster is not None, "every job off this machine has a cluster"
    return job.cluster


def _with_python(job: Job) -> Job:
    """Return the job with the interpreter of Ray's workers if they have a runtime environment."""
    cluster = _cluster(job)
    is_remote = bool(cluster.ray.runtime_env or dashboard_of(cluster))
    is_prepared = is_remote and cluster.python is None
    return replace(job, python=CONTAINER_PYTHON) if is_prepared else job
