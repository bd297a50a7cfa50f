"""Launcher for Kubernetes: one pod per node, in a JobSet or another kind of workload.

kubectl of the user's configuration creates the objects. A pod unpacks the run folder from a
ConfigMap, starts the agent of its node, and prints its files as records, which arrive here through
`kubectl logs`. Pods therefore need no shared folder, and a new controller can follow a run that has
lost its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.core.errors import PacelineError, SystemFaultError
from paceline.core.hardware import Cluster
from paceline.core.hosts import Host
from paceline.core.job import Job
from paceline.files.documents import write_text, write_value
from paceline.files.run_folder import SCRIPT_FILE
from paceline.machines import UnfitHost
from paceline.machines.kubernetes.checks import require_consistent
from paceline.machines.kubernetes.client import Kubectl, well_formed
from paceline.machines.kubernetes.manifest import (
    gpu_resource,
    manifest_text,
    manifests,
    workload_name,
    workload_reference,
)
from paceline.machines.kubernetes.run import (
    RECORD_FILE,
    KubernetesRun,
    follow_run,
    read_record,
    start_run,
)
from paceline.machines.node.script import prepare_node, secret_variables

ENDED_BY_US = 143


def render(job: Job) -> str:
    """Return the manifest of the job.

    Raises UserError for contradictions in the cluster's settings.
    """
    return _render(job, workload_name(job, job.name))


def prepare(job: Job, folder: Path) -> None:
    """Write the job's files and its manifest into the run folder."""
    text = _render(job, _name_in(job, folder))
    prepare_node(job, folder)
    write_text(folder / SCRIPT_FILE, text)


def submit(job: Job, folder: Path) -> KubernetesRun:
    """Create the objects of the job.

    Raises SystemFaultError with the message of Kubernetes if it refuses one of them.
    """
    return start_run(job, folder.resolve(), _name_in(job, folder))


def attach(job: Job, folder: Path) -> KubernetesRun | None:
    """Return the job that a run without a controller has left, to be followed to its end.

    None if the job has ended. Raises SystemFaultError if Kubernetes does not answer.
    """
    return follow_run(job, folder.resolve())


def ended_code(folder: Path) -> int | None:
    """Return the exit code of a run's job, if its end is recorded."""
    record = read_record(folder)
    return record.exit_code if record else None


def cancel_orphan(folder: Path) -> str | None:
    """Delete the job of a run whose controller has died; return its name, if there is any.

    The run folder may be somebody else's: only a workload with the label of the run is deleted, and
    Kubernetes deletes what it owns. Raises SystemFaultError if Kubernetes does not answer, because
    the job may then still run.
    """
    record = read_record(folder)
    if record is None or record.exit_code is not None:
        return None
    kubectl = Kubectl(record.context, record.namespace)
    workload = workload_reference(record.kind, record.name)
    if kubectl.exists(workload):
        kubectl.delete([workload])
    write_value(folder / RECORD_FILE, record.model_copy(update={"exit_code": ENDED_BY_US}))
    return record.name


@well_formed()
def unfit_hosts(cluster: Cluster, folder: Path) -> dict[str, UnfitHost]:
    """Return the named hosts on which no pod can start; none if nodes may not be listed."""
    if not cluster.hosts:
        return {}
    try:
        nodes = _nodes(cluster)
    except PacelineError:  # many users may not list nodes
        return {}
    names = {node["metadata"]["name"] for node in nodes if not _why_unfit(node, cluster)}
    reasons = {node["metadata"]["name"]: _why_unfit(node, cluster) for node in nodes}
    return {
        host: UnfitHost(reasons.get(host) or "is not a node of the cluster", reached=False)
        for host in cluster.hosts
        if host not in names
    }


@well_formed()
def available_hosts(cluster: Cluster) -> tuple[Host, ...]:
    """Return the ready nodes that have the devices of one pod, without the excluded ones."""
    try:
        nodes = [node for node in _nodes(cluster) if not _why_unfit(node, cluster)]
    except SystemFaultError as error:
        remedy = "list the nodes with --hosts or in the cluster file"
        raise SystemFaultError(error.where, error.what, remedy=remedy) from error
    if not nodes:
        what = "no ready node has the devices of one pod"
        raise SystemFaultError("Kubernetes", what, remedy="check `kubectl get nodes`")
    return tuple(Host(name=node["metadata"]["name"]) for node in nodes)


def _nodes(cluster: Cluster) -> list[dict[str, Any]]:
    settings = cluster.kubernetes
    selector = ",".join(f"{key}={value}" for key, value in settings.node_selector.items())
    options = [f"--selector={selector}"] if selector else []
    return Kubectl.of(settings).get("nodes", *options)["items"]


def _why_unfit(node: dict[str, Any], cluster: Cluster) -> str | None:
    """Return why no pod can be started on a node; None if one can."""
    status = node.get("status", {})
    conditions = {c["type"]: c["status"] for c in status.get("conditions", ())}
    if conditions.get("Ready") != "True":
        return "is not ready"
    if node.get("spec", {}).get("unschedulable"):
        return "is cordoned"
    if node["metadata"]["name"] in cluster.kubernetes.exclude:
        return "is excluded (kubernetes.exclude)"
    resource, count = gpu_resource(cluster), cluster.devices_per_node
    available = str(status.get("allocatable", {}).get(resource, "0")) if resource else str(count)
    if not available.isdecimal() or int(available) < count:
        return f"has {available} of {count} {resource}"
    return None


def _name_in(job: Job, folder: Path) -> str:
    return workload_name(job, str(folder.resolve()))


def _render(job: Job, name: str) -> str:
    require_consistent(job)
    lines = [f"# ConfigMap {name}, created with these objects, holds the files of the run folder."]
    if secrets := sorted(secret_variables(job.env)):
        lines.append(f"# Secret {name} holds {', '.join(secrets)}.")
    return "\n".join(lines) + "\n" + manifest_text(manifests(job, name))
