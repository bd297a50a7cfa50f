"""Partitioning of hosts, an allocation's nodes, Slurm's queue or one machine's cores into slots."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.errors import UserError
from paceline.core.hardware import Cluster
from paceline.core.hosts import Host, compress
from paceline.core.run import RunSpec
from paceline.core.units import pluralize, there_are
from paceline.files.recipe import Recipe
from paceline.machines.node.bind import even_shares, whole_cores
from paceline.machines.placement import (
    HostPlacement,
    Request,
    choose_cluster,
    shared_hosts,
    with_slurm_nodes,
)
from paceline.machines.probe.inventory import inventory
from paceline.machines.slurm.client import allocation_hosts
from paceline.runs.tasks.slot import MAX_SLOTS, JobSlot, numbered_slots


@dataclass(frozen=True)
class Partitioning:
    """Slots for concurrent runs, and the request that fits the first slot."""

    request: Request
    """Original request, placed on the first slot."""
    inventory: dict[str, Any]
    """Inventory of this machine, reduced to one slot."""
    slots: tuple[JobSlot, ...]
    notices: tuple[str, ...] = ()
    queued: bool = False
    """True if the slots are places in Slurm's queue."""


def partition_hosts(
    request: Request,
    recipe: Recipe,
    inventory: dict[str, Any],
    nodes_per_trial: int | None,
    max_parallel: int | None,
) -> Partitioning:
    """Return the slots for concurrent runs of `request`; by default one slot with all resources.

    Raises UserError if there are not enough nodes, cores or GPUs.
    """
    if nodes_per_trial is None and max_parallel is None:
        return Partitioning(request, inventory, numbered_slots(1))
    if nodes_per_trial is not None:
        request = with_slurm_nodes(request)
    cluster, _ = choose_cluster(request, recipe, inventory)
    if cluster.runs_here:
        if nodes_per_trial is not None:
            raise UserError(
                f"--nodes-per-trial {nodes_per_trial}",
                "only this machine is available",
                remedy="set --hosts, or run inside a Slurm allocation",
            )
        return _partition_machine(request, inventory, cluster, max_parallel or 1)
    if cluster.scheduler_picks_hosts:
        where = replace(request.where, nodes=nodes_per_trial or request.where.nodes)
        slots = numbered_slots(max_parallel or MAX_SLOTS)
        return Partitioning(replace(request, where=where), inventory, slots, queued=True)
    return _partition_hosts(request, inventory, cluster, nodes_per_trial, max_parallel)


def slots_for(spec: RunSpec, where: HostPlacement, max_parallel: int | None) -> tuple[JobSlot, ...]:
    """Return slots for further runs of `spec`, on other given hosts or a new allocation.

    Raises UserError if it does not fit, or if earlier runs had other shares of one machine.
    """
    cluster, at_once = spec.cluster, max_parallel or 1
    if cluster.runs_here:
        return _shares_as_before(spec, at_once)
    job = None
    if cluster.capabilities.allocations:
        job = where.allocation or os.environ.get("SLURM_JOB_ID")
    hosts = where.hosts or (allocation_hosts(job) if job and cluster.hosts else ())
    all_hosts = hosts or tuple(Host(name=name) for name in cluster.hosts)
    if not all_hosts:
        return numbered_slots(at_once)
    if len(all_hosts) < cluster.nodes:
        raise UserError(
            spec.recipe,
            f"needs {pluralize(cluster.nodes, 'node')}; {there_are(len(all_hosts), 'host')}",
        )
    return _slots_on(_groups(all_hosts, cluster.nodes)[:at_once])


def _partition_hosts(
    request: Request,
    inventory: dict[str, Any],
    cluster: Cluster,
    nodes_per_trial: int | None,
    max_parallel: int | None,
) -> Partitioning:
    hosts = shared_hosts(request, cluster)
    size = nodes_per_trial or max(1, len(hosts) // (max_parallel or 1))
    if size > len(hosts):
        raise UserError(f"--nodes-per-trial {size}", there_are(len(hosts), "host"))
    groups = _groups(hosts, size)[: max_parallel or MAX_SLOTS]
    slots = _slots_on(groups)
    where = replace(
        request.where,
        hosts=groups[0],
        nodes=size,
        launcher=cluster.launcher,
        allocation=cluster.slurm.allocation or request.where.allocation,
    )
    return Partitioning(
        replace(request, where=where), inventory, slots, tuple(_host_notices(hosts, slots))
    )


def _host_notices(hosts: Sequence[Host], slots: Sequence[JobSlot]) -> list[str]:
    """Return notices on the number of concurrent runs and on idle hosts."""
    notices: list[str] = []
    if len(slots) > 1:
        names = "  ".join([slot.name for slot in slots[:8]] + ["..."] * (len(slots) > 8))
        notices.append(
            f"{len(slots)} concurrent trials on {names}: "
            "differences between their nodes affect the results"
        )
    used = {name for slot in slots for name in slot.hosts}
    idle = [host.name for host in hosts if host.name not in used]
    return notices + ([f"idle: {compress(idle)}"] if idle else [])


def _groups(hosts: Sequence[Host], size: int) -> list[tuple[Host, ...]]:
    """Group neighbouring hosts into groups of `size`, without the remainder."""
    return [tuple(hosts[at : at + size]) for at in range(0, len(hosts) - size + 1, size)]


def _slots_on(groups: Sequence[Sequence[Host]]) -> tuple[JobSlot, ...]:
    return tuple(
        JobSlot(number, tuple(host.name for host in group))
        for number, group in enumerate(groups, start=1)
    )


def _partition_machine(
    request: Request, inventory: dict[str, Any], cluster: Cluster, at_once: int
) -> Partitioning:
    """Divide one machine's GPUs, or its cores and memory, into equal shares."""
    if at_once == 1:
        return Partitioning(request, inventory, numbered_slots(1))
    if request.cluster:
        raise UserError(f"--max-parallel {at_once}", "cannot share the machine of --cluster")
    notice = f"{at_once} concurrent trials share this machine and slow each other down"
    if cluster.device != "cpu":
        names = _gpu_names(len(inventory["gpus"]))
        each = _share(len(names), at_once, "GPUs")
        slots = tuple(
            JobSlot(n + 1, devices=names[n * each : (n + 1) * each]) for n in range(at_once)
        )
        return Partitioning(
            request, {**inventory, "gpus": inventory["gpus"][:each]}, slots, (notice,)
        )
    cores = whole_cores(os.sched_getaffinity(0))
    usable = {"usable_cores": _share(len(cores), at_once, "cores")}
    shared = {
        **inventory,
        "cpu": {**inventory["cpu"], **usable},
        "memory_bytes": inventory["memory_bytes"] / at_once,
    }
    slots = tuple(
        JobSlot(number, cores=tuple(share))
        for number, share in enumerate(even_shares(cores, at_once), start=1)
    )
    return Partitioning(request, shared, slots, (notice,))


def _shares_as_before(spec: RunSpec, at_once: int) -> tuple[JobSlot, ...]:
    """Divide this machine; raises UserError if earlier runs had other shares."""
    if at_once == 1:
        return numbered_slots(1)
    slots = _partition_machine(Request(spec.recipe), inventory(), spec.cluster, at_once).slots
    threads = max(1, len(slots[0].cores) // spec.cluster.devices_per_node)
    if slots[0].cores and threads != spec.cluster.threads_per_device:
        raise UserError(
            f"--max-parallel {at_once}",
            f"leaves {pluralize(threads, 'thread')} per process, but earlier runs had "
            f"{spec.cluster.threads_per_device}",
        )
    return slots


def _share(count: int, at_once: int, unit: str) -> int:
    """Return the number of devices or cores per run; raises UserError if it is 0."""
    if count < at_once:
        raise UserError(f"--max-parallel {at_once}", f"this machine has {count} {unit}")
    return count // at_once


def _gpu_names(count: int) -> tuple[str, ...]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")] if visible else map(str, range(count))
    return tuple(names)[:count]
