"""Launcher for an existing Ray cluster: one actor per node starts the agent of that node.

A small driver program has the connection to Ray, so that Paceline itself does not load Ray. Nodes
that do not share the run folder get a copy of it, and their logs and steps are copied back.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from paceline.core.errors import SystemFaultError
from paceline.core.hardware import CONTAINER_PYTHON, Cluster
from paceline.core.hosts import Host
from paceline.core.job import Job
from paceline.files.documents import write_text
from paceline.files.run_folder import SCRIPT_FILE
from paceline.machines import UnfitHost
from paceline.machines.node.script import NODE_SCRIPT, prepare_node, render_node
from paceline.machines.ray.run import REMEDIES, RayRun, list_nodes, request_for, start_run


def render(job: Job) -> str:
    """Return node.sh, with comments that show how Ray starts it on each node."""
    request = request_for(_cluster(job))
    places = ", ".join(request["hosts"]) or "chosen by Ray"
    lines = [
        f"# On Ray ({request['address']}), one actor per node of a STRICT_SPREAD placement group:",
        f"#   nodes: {job.nodes} ({places}), each with {json.dumps(request['resources'])}",
        f"#   node N: bash {NODE_SCRIPT} N ADDRESS PORT",
    ]
    return render_node(_with_python(job)) + "\n".join(lines) + "\n"


def prepare(job: Job, folder: Path) -> None:
    """Write the job's files and its scripts into the run folder."""
    prepare_node(_with_python(job), folder)
    write_text(folder / SCRIPT_FILE, render(job))


def submit(job: Job, folder: Path) -> RayRun:
    """Connect to Ray and request the nodes; the handle starts node.sh on them when it is polled."""
    return start_run(_with_python(job), folder.resolve())


def unfit_hosts(cluster: Cluster, folder: Path) -> dict[str, UnfitHost]:
    """Return the named hosts that are not nodes of the cluster or lack the resources."""
    if not cluster.hosts:
        return {}
    names = {name for node in list_nodes(cluster) for name in node.values()}
    reason = "is not an alive node of the Ray cluster with the requested resources"
    return {host: UnfitHost(reason, reached=False) for host in cluster.hosts if host not in names}


def available_hosts(cluster: Cluster) -> tuple[Host, ...]:
    """Return the nodes of the cluster that have the resources of one node of a job."""
    nodes = list_nodes(cluster)
    if not nodes:
        needs = ", ".join(f"{n:g} {name}" for name, n in request_for(cluster)["resources"].items())
        raise SystemFaultError("Ray", f"no node has {needs}", remedy=REMEDIES["resources"])
    return tuple(Host(name=node["name"]) for node in nodes)


def _cluster(job: Job) -> Cluster:
    assert job.cluster is not None, "every job off this machine has a cluster"
    return job.cluster


def _with_python(job: Job) -> Job:
    """Return the job with the interpreter of Ray's workers if they have a runtime environment."""
    cluster = _cluster(job)
    is_prepared = bool(cluster.ray.runtime_env) and cluster.python is None
    return replace(job, python=CONTAINER_PYTHON) if is_prepared else job
