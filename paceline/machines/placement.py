"""Placement of a request: on this machine, on hosts over SSH, or on a cluster's scheduler."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.core.fabric import Requirement
from paceline.core.hardware import Cluster, Device
from paceline.core.hosts import Host
from paceline.core.launchers import LauncherName, capabilities
from paceline.core.training import DEFAULT_TIME_LIMIT_S
from paceline.core.units import pluralize, there_are
from paceline.files import catalog
from paceline.files.recipe import Recipe
from paceline.machines import launcher
from paceline.machines.probe.inventory import local_cluster
from paceline.machines.slurm import client


@dataclass(frozen=True)
class HostPlacement:
    """Requested hosts, and how programs are started on them."""

    hosts: tuple[Host, ...] = ()
    nodes: int | None = None
    """Number of hosts to use, or of nodes to request from Slurm or Ray."""
    launcher: LauncherName | None = None
    """Launcher to use; None chooses one from what is available."""
    allocation: str | None = None
    """Number of the running Slurm job whose nodes are used."""
    interface: str | None = None
    bind: str | None = None
    require_transport: Requirement | None = None
    ssh_config: Path | None = None
    ray_address: str | None = None

    def kind(self, environment: Mapping[str, str], default: LauncherName = "local") -> LauncherName:
        """Return the requested launcher, else one that suits the hosts, an allocation or Slurm."""
        if self.launcher is not None:
            return self.launcher
        if self.ray_address:
            return "ray"
        if self.allocation or (self.wants_nodes and "SLURM_JOB_ID" in environment):
            return "slurm"
        if self.hosts and default == "local":
            return "ssh"
        if self.wants_nodes and default == "local" and shutil.which("sbatch"):
            return "slurm"
        return default

    @property
    def wants_nodes(self) -> bool:
        """True if more than this machine is requested."""
        return bool(self.hosts) or (self.nodes or 1) > 1


@dataclass(frozen=True)
class Request:
    """Options of a run as given on the command line."""

    recipe: str
    variant: str | None = None
    overrides: tuple[str, ...] = ()
    devices: int | None = None
    device: str = "auto"
    """Kind of device: auto, cpu or cuda."""
    cluster: str | None = None
    timeout_s: float | None = None
    force: bool = False
    """Run even if the memory bound says that the model cannot fit."""
    where: HostPlacement = HostPlacement()
    """Hosts to use, and how programs are started on them."""
    runs_dir: Path | None = field(default=None, compare=False)
    """Folder in which `checkpoint.resume` looks up a run by name."""
    devices_per_node: int | None = None
    """Devices used on every node of `cluster`; None uses them all."""
    command: tuple[str, ...] = ()
    """Program of the user that runs instead of the recipe's engine."""
    dry_run: bool = field(default=False, compare=False)
    """True if nothing will run, so that indexed data may be on the nodes only."""
    per: str | None = None
    """Unit that the user's program is started once for: `node` or `device`; None means `node`."""


_NO_PEAK = ("is not in the catalog", "is a slice of a device, whose peak is not the slice's")
_UNSEEN = "and the hosts' devices are unknown"
_NAME_THEM = "specify them with --cluster FILE (device: H100-SXM, devices_per_node: 8)"


def device_kind(device: str, inventory: dict[str, Any]) -> tuple[str, list[str]]:
    """Return cpu or cuda for `device` (auto, cpu, cuda), and notices about the choice.

    Raises UserError for cuda without a visible NVIDIA GPU.
    """
    cpu_torch = "+cpu" in inventory["packages"].get("torch", "")
    if device == "cpu" or (device == "auto" and not inventory["gpus"]):
        return "cpu", []
    if not inventory["gpus"]:
        raise UserError("--device cuda", "this machine has no visible NVIDIA GPU", allowed="cpu")
    if device == "auto" and cpu_torch:
        return "cpu", ["the installed torch is a CPU build, so this machine's GPUs are not used"]
    return "cuda", []


def find_device(name: str) -> Device | None:
    """Return the catalog's entry for a device, or None if the catalog does not have it."""
    try:
        return catalog.find_device(name).device
    except UserError:
        return None


def choose_cluster(
    request: Request, recipe: Recipe, inventory: dict[str, Any]
) -> tuple[Cluster, list[str]]:
    """Return the cluster that the request runs on, and notices for the user.

    The choice is made from a machine with this `inventory`. Raises UserError if the requested hosts
    or devices are not available.
    """
    where = request.where
    is_default = recipe.time_limit_s in (None, DEFAULT_TIME_LIMIT_S)
    has_limit = request.timeout_s is not None or not is_default
    slots = sorted({host.slots for host in where.hosts[: where.nodes] if host.slots})
    if request.cluster is not None:
        cluster = with_placement(
            _named_cluster(request, request.cluster), where, has_limit=has_limit
        )
        if request.devices_per_node is not None:
            return _part_of_nodes(cluster, request.devices_per_node), []
        if slots and slots[0] < cluster.devices_per_node:
            raise UserError(
                "hosts",
                f"have {pluralize(slots[0], 'slot')}, and a node of cluster {cluster.name} "
                f"{pluralize(cluster.devices_per_node, 'device')}",
                remedy="correct the slots; to use a part of each node, run "
                f"`paceline scale --gpus-per-node {slots[0]}`",
            )
        return cluster, []
    if capabilities(where.kind(os.environ)).runs_here:
        cluster, notices = _this_machine(request, recipe, inventory)
        return with_placement(cluster, where, has_limit=has_limit), notices
    if len(slots) > 1:
        raise UserError(
            "hosts",
            f"have {', '.join(map(str, slots))} slots",
            remedy="use hosts with the same number of devices",
        )
    if slots and request.devices is None:
        request = replace(request, devices=slots[0])
    if not inventory["gpus"] and request.device == "cuda":
        raise UserError(
            "--device cuda", f"this machine has no visible NVIDIA GPU, {_UNSEEN}", remedy=_NAME_THEM
        )
    cluster, notices = _this_machine(request, recipe, inventory)
    if request.devices is None and cluster.device == "cpu":
        cluster = local_cluster(inventory, "cpu", None, 1)
    devices = f"{cluster.devices_per_node} x {cluster.device}"
    assumption = f"hosts are assumed to be like this machine: {devices} each"
    if not inventory["gpus"] and request.device == "auto":
        assumption += f"; no GPU is visible here, {_UNSEEN}: if they have GPUs, {_NAME_THEM}"
    return with_placement(cluster, where, has_limit=has_limit), [*notices, assumption]


def with_placement(cluster: Cluster, where: HostPlacement, *, has_limit: bool = False) -> Cluster:
    """Return `cluster` with the hosts, launcher and settings that `where` specifies.

    Raises UserError for a launcher that needs hosts and has none, and for more nodes than hosts.
    """
    kind = where.kind(os.environ, cluster.launcher)
    hosts = tuple(host.name for host in where.hosts) or cluster.hosts
    nodes = where.nodes or (len(hosts) if hosts else cluster.nodes)
    if hosts and nodes > len(hosts):
        raise UserError(f"--nodes {nodes}", there_are(len(hosts), "host"))
    can = capabilities(kind)
    if can.needs_hosts and not hosts:
        raise UserError(f"launcher {kind}", "needs hosts", remedy="specify them with --hosts")
    if can.runs_here and where.hosts:
        raise UserError(
            "--hosts",
            f"launcher {kind} runs only on this machine",
            allowed="launcher ssh, slurm, ray or kubernetes",
        )
    if can.runs_here and nodes > 1:
        raise UserError(
            pluralize(nodes, "node"),
            f"launcher {kind} runs only on this machine",
            allowed="launcher ssh with --hosts, slurm, ray or kubernetes",
        )
    changes: dict[str, Any] = {"launcher": kind, "nodes": nodes, "hosts": hosts[:nodes]}
    if where.interface:
        changes["interface"] = where.interface
    if where.bind:
        changes["bind"] = where.bind
    if where.require_transport:
        changes["require_transport"] = where.require_transport
    if where.ssh_config:
        changes["ssh"] = cluster.ssh.model_copy(update={"config": str(where.ssh_config.resolve())})
    if where.ray_address:
        changes["ray"] = cluster.ray.model_copy(update={"address": where.ray_address})
    allocation = where.allocation or cluster.slurm.allocation or os.environ.get("SLURM_JOB_ID")
    if can.allocations:
        slurm = cluster.slurm.with_variables(os.environ, has_limit=has_limit)
        changes["slurm"] = slurm.model_copy(update={"allocation": allocation})
    return cluster.model_copy(update=changes)


def in_current_allocation(cluster: Cluster) -> tuple[Cluster, list[str]]:
    """Return the cluster for one more run, and notices for the user.

    If the cluster used an allocation, this shell's allocation replaces it. Without one it is
    dropped if it has ended, and the run becomes a job of its own.
    """
    earlier_job = cluster.allocation
    if earlier_job is None:
        return cluster, []
    job, notices = os.environ.get("SLURM_JOB_ID"), list[str]()
    if job is None:
        state = (client.states([earlier_job]) or {}).get(earlier_job)
        job = earlier_job if state and state.state == "RUNNING" else None
        if job is None:
            notices.append(f"allocation {earlier_job} has ended, so this run is a separate job")
    settings = cluster.slurm.model_copy(update={"allocation": job})
    return cluster.model_copy(update={"slurm": settings}), notices


def with_slurm_nodes(request: Request) -> Request:
    """Return the request with this shell's allocation, or with Slurm if a controller answers.

    A request that specifies a launcher, hosts, an allocation or a cluster is returned unchanged.
    """
    where = request.where
    is_placed = where.launcher or where.hosts or where.allocation or where.ray_address
    if is_placed or request.cluster:
        return request
    if job := os.environ.get("SLURM_JOB_ID"):
        return replace(request, where=replace(where, launcher="slurm", allocation=job))
    if client.answers():
        return replace(request, where=replace(where, launcher="slurm"))
    return request


def shared_hosts(request: Request, cluster: Cluster) -> tuple[Host, ...]:
    """Return the hosts to share among runs.

    They are the requested ones, else those that the launcher lists, or this machine.
    """
    if cluster.runs_here:
        return (Host(name=os.uname().nodename),)
    by_name = {host.name: host for host in request.where.hosts}
    names = cluster.hosts or tuple(by_name)
    if names or not cluster.capabilities.lists_hosts:
        return tuple(by_name.get(name, Host(name=name)) for name in names)
    return launcher(cluster.launcher).available_hosts(cluster)[: request.where.nodes]


def _part_of_nodes(cluster: Cluster, count: int) -> Cluster:
    """Return `cluster` with `count` devices used on each node.

    Raises UserError if a node has fewer.
    """
    if count > cluster.devices_per_node:
        raise UserError(
            f"--gpus-per-node {count}",
            f"a node of cluster {cluster.name} has {pluralize(cluster.devices_per_node, 'device')}",
        )
    return cluster.model_copy(update={"devices_per_node": count})


def _this_machine(
    request: Request, recipe: Recipe, inventory: dict[str, Any]
) -> tuple[Cluster, list[str]]:
    """Return a cluster of one node like this machine, and notices for the user."""
    kind, notices = device_kind(request.device, inventory)
    if kind == "cpu":
        cores = inventory["cpu"]["usable_cores"]
        count = request.devices or max(
            min(recipe.devices or 2, 2, cores), recipe.layout.smallest_world
        )
        if count > cores:
            notices.append(f"{pluralize(count, 'process')} share {pluralize(cores, 'core')}")
        return local_cluster(inventory, "cpu", None, count), notices
    return _gpus(request, recipe, inventory, notices)


def _named_cluster(request: Request, name: str) -> Cluster:
    if request.devices is not None or request.device != "auto":
        raise UserError(
            "--cluster",
            "already specifies the devices",
            remedy="omit --gpus, --devices and --device",
        )
    return catalog.cluster(name)


def _gpus(
    request: Request, recipe: Recipe, inventory: dict[str, Any], notices: list[str]
) -> tuple[Cluster, list[str]]:
    available = len(inventory["gpus"])
    smallest_world = recipe.layout.smallest_world
    count = max(min(recipe.devices or available, available), smallest_world)
    count = request.devices or count - count % smallest_world
    if count > available:
        where = (
            f"--devices {count}" if request.devices else f"a layout of {pluralize(count, 'device')}"
        )
        raise UserError(where, f"this machine has {pluralize(available, 'GPU')}")
    if request.devices is None and recipe.devices and recipe.devices > count:
        notices.append(
            f"the recipe uses {pluralize(recipe.devices, 'device')}; this run uses the {count} here"
        )
    first = inventory["gpus"][0]
    name = first["name"]
    try:
        match = catalog.find_device(name)
        notices += [f"device {name}: {match.note}"] if match.note else []
        name = match.device.name
    except UserError:
        notices.append(f"device {name} {_NO_PEAK[' MIG' in name]}, so there is no MFU")
    return local_cluster(inventory, name, first["memory_bytes"], count), notices
