"""How trials share hosts, the nodes of an allocation, Slurm's queue, or the cores of one machine."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.errors import UserError
from paceline.core.hardware import Cluster
from paceline.core.hosts import Host, compress
from paceline.core.run import RunSpec
from paceline.files.recipe import Recipe
from paceline.machines.host_lists import cut, from_allocation, from_partition
from paceline.machines.node.bind import even_shares, whole_cores
from paceline.machines.placement import Request, Where, choose_cluster
from paceline.machines.probe.inventory import inventory
from paceline.machines.slurm import client
from paceline.runs.places.part import MOST_AT_ONCE, Part


@dataclass(frozen=True)
class Division:
    """How trials share what there is."""

    request: Request
    """As it was asked for, on the first part."""
    found: dict[str, Any]
    """The inventory as one part of this machine has it."""
    parts: tuple[Part, ...]
    notices: tuple[str, ...] = ()
    queued: bool = False
    """Whether the parts are places in Slurm's queue."""


def divide(
    request: Request,
    recipe: Recipe,
    found: dict[str, Any],
    nodes_per_trial: int | None,
    max_parallel: int | None,
) -> Division:
    """The parts on which trials of `request` run, all at once; one of everything by default.

    Raises UserError where there are not as many nodes, cores or GPUs.
    """
    if nodes_per_trial is None and max_parallel is None:
        return Division(request, found, (Part(1),))
    request = on_slurm(request, nodes_per_trial is not None)
    cluster, _ = choose_cluster(request, recipe, found)
    if cluster.launcher == "local":
        if nodes_per_trial is not None:
            raise UserError(f"--nodes-per-trial {nodes_per_trial}", "there is this machine alone",
                            remedy="--hosts, or start it inside an allocation of Slurm")  # fmt: skip
        return _of_machine(request, found, cluster, max_parallel or 1)
    if cluster.launcher == "slurm" and not cluster.hosts and not cluster.slurm.allocation:
        where = replace(request.where, nodes=nodes_per_trial or request.where.nodes)
        places = tuple(Part(n) for n in range(1, (max_parallel or MOST_AT_ONCE) + 1))
        return Division(replace(request, where=where), found, places, queued=True)
    return _of_hosts(request, found, cluster, nodes_per_trial, max_parallel)


def parts_for(spec: RunSpec, where: Where, max_parallel: int | None) -> tuple[Part, ...]:
    """Parts for further runs of `spec`: on other hosts where such are named, or in a new allocation.

    Raises UserError where it does not fit, or ran with other shares of one machine.
    """
    cluster, at_once = spec.cluster, max_parallel or 1
    if cluster.launcher == "local":
        if at_once == 1:
            return (Part(1),)
        parts = _of_machine(Request(spec.recipe), inventory(), cluster, at_once).parts
        threads = max(1, len(parts[0].cores) // cluster.devices_per_node)
        if parts[0].cores and threads != cluster.threads_per_device:
            raise UserError(f"--max-parallel {at_once}", f"leaves a process {threads} threads; the runs "
                            f"so far had {cluster.threads_per_device}")  # fmt: skip
        return parts
    job = (
        where.allocation or os.environ.get("SLURM_JOB_ID") if cluster.launcher == "slurm" else None
    )
    hosts = where.hosts or (from_allocation(job) if job and cluster.hosts else ())
    named = hosts or tuple(Host(name=name) for name in cluster.hosts)
    if not named:
        return tuple(Part(number) for number in range(1, at_once + 1))
    if len(named) < cluster.nodes:
        raise UserError(spec.recipe, f"needs {cluster.nodes} nodes; there are {len(named)}")
    groups = cut(named, cluster.nodes).groups[:at_once]
    return tuple(Part(n, tuple(host.name for host in g)) for n, g in enumerate(groups, start=1))


def on_slurm(request: Request, wants_nodes: bool) -> Request:
    """The request inside the allocation of this shell, or where a Slurm answers, for its nodes."""
    where = request.where
    if where.launcher or where.hosts or where.allocation or request.cluster or not wants_nodes:
        return request
    if job := os.environ.get("SLURM_JOB_ID"):
        return replace(request, where=replace(where, launcher="slurm", allocation=job))
    if client.answers():
        return replace(request, where=replace(where, launcher="slurm"))
    return request


def hosts_of(request: Request, cluster: Cluster) -> tuple[Host, ...]:
    """The hosts to share out: named, of the allocation, of the partition, or this machine."""
    slots = {host.name: host for host in request.where.hosts}
    named = cluster.hosts or tuple(slots)
    if cluster.launcher == "local":
        return (Host(name=os.uname().nodename),)
    if named or cluster.launcher != "slurm":
        return tuple(slots.get(name, Host(name=name)) for name in named)
    job = cluster.slurm.allocation
    found = from_allocation(job) if job else from_partition(cluster.slurm.partition)
    return found[: request.where.nodes]


def _of_hosts(
    request: Request,
    found: dict[str, Any],
    cluster: Cluster,
    nodes_per_trial: int | None,
    max_parallel: int | None,
) -> Division:
    hosts = hosts_of(request, cluster)
    size = nodes_per_trial or max(1, len(hosts) // (max_parallel or 1))
    if size > len(hosts):
        raise UserError(f"--nodes-per-trial {size}", f"there are {len(hosts)} hosts")
    groups = cut(hosts, size).groups[: max_parallel or MOST_AT_ONCE]
    parts = tuple(
        Part(number, tuple(host.name for host in group))
        for number, group in enumerate(groups, start=1)
    )
    used = {name for part in parts for name in part.hosts}
    idle = [host.name for host in hosts if host.name not in used]
    where = replace(
        request.where, hosts=groups[0], nodes=size, launcher=cluster.launcher,
        allocation=cluster.slurm.allocation or request.where.allocation,
    )  # fmt: skip
    notices = [f"{len(parts)} trials at once on {'  '.join(part.name for part in parts[:8])}"
               f"{'  ...' if len(parts) > 8 else ''}: what differs between their nodes is in the figures"] \
        if len(parts) > 1 else []  # fmt: skip
    notices += [f"idle: {compress(idle)}"] if idle else []
    return Division(replace(request, where=where), found, parts, tuple(notices))


def _of_machine(
    request: Request, found: dict[str, Any], cluster: Cluster, at_once: int
) -> Division:
    """Equal shares of one machine's GPUs, or of its cores and memory."""
    if at_once == 1:
        return Division(request, found, (Part(1),))
    if request.cluster:
        raise UserError(f"--max-parallel {at_once}", "cannot share the machine of --cluster")
    beside = (
        f"{at_once} trials at once share this machine: beside each other they disturb each other"
    )
    if cluster.device != "cpu":
        names = _gpu_names(len(found["gpus"]))
        each = len(names) // at_once
        _refuse_none(each, at_once, f"{len(names)} GPUs")
        parts = tuple(Part(n + 1, devices=names[n * each : (n + 1) * each]) for n in range(at_once))
        return Division(request, {**found, "gpus": found["gpus"][:each]}, parts, (beside,))
    cores = whole_cores(os.sched_getaffinity(0))
    each = len(cores) // at_once
    _refuse_none(each, at_once, f"{len(cores)} cores")
    share = {"cpu": {**found["cpu"], "usable_cores": each}}
    shared = {**found, **share, "memory_bytes": found["memory_bytes"] / at_once}
    parts = tuple(
        Part(number, cores=tuple(own))
        for number, own in enumerate(even_shares(cores, at_once), start=1)
    )
    return Division(request, shared, parts, (beside,))


def _refuse_none(each: int, at_once: int, there: str) -> None:
    if not each:
        raise UserError(f"--max-parallel {at_once}", f"this machine has {there}")


def _gpu_names(count: int) -> tuple[str, ...]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [one.strip() for one in visible.split(",")] if visible else map(str, range(count))
    return tuple(names)[:count]
