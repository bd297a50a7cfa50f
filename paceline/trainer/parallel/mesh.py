"""The mesh of ranks: pipeline, data, context and tensor axes, the last one innermost.

Ranks of one tensor group are adjacent, so they share a node; pipeline stages are farthest apart.
ZeRO shards states over dp x cp, because context-parallel ranks hold the same weights. The expert
axis divides these ranks: consecutive ones hold different experts, and ranks that are `ep` apart
hold the same ones.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.trainer.config import MESH_AXES, ConfigError, LayoutConfig


@dataclass(frozen=True)
class MeshAxis:
    """One axis of the mesh as this rank sees it; `group` is None without communication."""

    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None
    ranks: tuple[int, ...] = (0,)
    """World ranks along the axis, this one at `index`."""

    @property
    def name(self) -> str:
        """The group's name for functional collectives."""
        assert self.group is not None, "this axis has no group"
        return self.group.group_name


ALONE = MeshAxis()


@dataclass(frozen=True)
class World:
    """This rank and its device in the job; `backend` is None for a single process."""

    rank: int
    local_rank: int
    size: int
    device: torch.device
    backend: str | None


@dataclass(frozen=True)
class Mesh:
    """This rank's axes.

    `data` is dp x cp; `shard` and `replicate` are its ZeRO split, `ep` and `expert_data` its split
    for the weights of experts.
    """

    pp: MeshAxis = ALONE
    dp: MeshAxis = ALONE
    cp: MeshAxis = ALONE
    tp: MeshAxis = ALONE
    data: MeshAxis = ALONE
    replicate: MeshAxis = ALONE
    shard: MeshAxis = ALONE
    ep: MeshAxis = ALONE
    expert_data: MeshAxis = ALONE
    """Ranks that hold the same experts; unused if ep is 1."""
    device_mesh: DeviceMesh | None = field(default=None, compare=False)
    """Mesh with axes pp, replicate, shard, tp for parameters and optimizer state."""
    expert_mesh: DeviceMesh | None = field(default=None, compare=False)
    """Mesh of `expert_data`; None if ep is 1."""

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's index on every axis."""
        return {name: getattr(self, name).index for name in MESH_AXES}


def join_world(device_type: str, bind: bool = True) -> World:
    """Create the process group from the launcher's environment variables.

    With `bind`, NCCL creates its communicators at once and splits the world's for other groups.
    Raise ConfigError where a rank has no GPU.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device_type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"local rank {local_rank}: this node has {torch.cuda.device_count()} visible GPUs; "
                "every rank needs its own GPU, so start fewer ranks per node"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device(device_type)
    if size == 1:
        return World(rank, local_rank, size, device, None)
    backend = "nccl" if device_type == "cuda" else "gloo"
    timeout = collective_timeout()
    common: dict[str, Any] = {
        "device_id": device if device_type == "cuda" and bind else None,
        "timeout": timeout,
    }
    if os.environ.get("PACELINE_STORE") == "rank0":
        store = rank0_store(rank, size, timeout or timedelta(minutes=5))
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, **common)
    else:
        dist.init_process_group(backend, **common)
    return World(rank, local_rank, size, device, backend)


def collective_timeout() -> timedelta | None:
    """Return the timeout of collectives; None for PyTorch's default."""
    limit = os.environ.get("PACELINE_COLLECTIVE_LIMIT_S")
    return timedelta(seconds=float(limit)) if limit else None


def rank0_store(rank: int, size: int, timeout: timedelta) -> TCPStore:
    """Return the rendezvous store; it listens on MASTER_ADDR only, torch's own on all addresses."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listener = -1
    if rank == 0:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((address, port), family=family, backlog=size).detach()
    return TCPStore(
        address,
        port,
        size,
        rank == 0,
        timeout,
        master_listen_fd=None if listener < 0 else listener,
        wait_for_workers=False,
    )


def make_mesh(world: World, layout: LayoutConfig, dp: int) -> Mesh:
    """Return the axes of a layout; every rank must call it."""
    if world.size == 1:
        return Mesh()
    kind, data_ranks = world.device.type, dp * layout.cp
    shard = (layout.dp_shard or data_ranks) if layout.zero_stage >= 2 else data_ranks
    device_mesh = init_device_mesh(
        kind,
        (layout.pp, data_ranks // shard, shard, layout.tp),
        mesh_dim_names=("pp", "replicate", "shard", "tp"),
    )
    axes = {name: _mesh_axis(device_mesh, name) for name in ("pp", "replicate", "shard", "tp")}
    data = _data_axis(world, axes, layout)
    mesh = Mesh(
        pp=axes["pp"],
        dp=data,
        tp=axes["tp"],
        data=data,
        replicate=axes["replicate"],
        shard=axes["shard"],
        device_mesh=device_mesh,
    )
    if layout.cp > 1:
        first = data.index % layout.cp
        dp_axis = MeshAxis(dp, data.index // layout.cp, None, data.ranks[first :: layout.cp])
        cp = _context_axis(world, data, axes["shard"], layout)
        mesh = replace(mesh, dp=dp_axis, cp=cp)
    return _with_expert_axes(mesh, world, layout) if layout.ep > 1 else mesh


def _with_expert_axes(mesh: Mesh, world: World, layout: LayoutConfig) -> Mesh:
    """Return the mesh with the expert axis and the ranks that hold the same experts.

    They have groups of their own, so that tokens do not wait for weights in one queue.
    """
    ep, tp, data = layout.ep, layout.tp, mesh.data
    blocks = [
        [first + tp * i for i in range(data.size)]
        for start in range(0, world.size, data.size * tp)
        for first in range(start, start + tp)
    ]
    tokens = [block[i : i + ep] for block in blocks for i in range(0, data.size, ep)]
    weights = [block[i::ep] for block in blocks for i in range(ep)]
    expert, copies = _enumerated_axis(tokens, world), _enumerated_axis(weights, world)
    assert copies.group is not None, "a group of one rank is a group"
    device_mesh = DeviceMesh.from_group(
        copies.group, world.device.type, mesh_dim_names=("expert_data",)
    )
    return replace(mesh, ep=expert, expert_data=copies, expert_mesh=device_mesh)


def _enumerated_axis(every: list[list[int]], world: World) -> MeshAxis:
    """Return this rank's axis of new groups; every rank is in one of them."""
    group, _ = dist.new_subgroups_by_enumeration(every, timeout=collective_timeout())
    assert isinstance(group, dist.ProcessGroup), "every rank is in one of them"
    ranks = next(tuple(ranks) for ranks in every if world.rank in ranks)
    return MeshAxis(len(ranks), ranks.index(world.rank), group, ranks)


def _context_axis(world: World, data: MeshAxis, shard: MeshAxis, layout: LayoutConfig) -> MeshAxis:
    """Return the cp axis of this rank's replica, with a new group unless another axis has it.

    A second device mesh would create the pp and tp groups again, with NCCL buffers on every GPU.
    Nothing is communicated over dp alone.
    """
    size, tp = layout.cp, layout.tp
    start = data.index - data.index % size
    ranks = data.ranks[start : start + size]
    if ranks == shard.ranks:
        return shard
    blocks = range(0, world.size, size * tp)
    every = [[block + t + tp * i for i in range(size)] for block in blocks for t in range(tp)]
    return _enumerated_axis(every, world)


def _mesh_axis(mesh: DeviceMesh, name: str) -> MeshAxis:
    line = mesh[name]
    ranks = tuple(line.mesh.flatten().tolist())
    group, limit = line.get_group() if len(ranks) > 1 else None, collective_timeout()
    if group is not None and limit is not None:
        # The groups of a device mesh do not inherit the world's timeout.
        dist.distributed_c10d._set_pg_timeout(limit, group)
    return MeshAxis(len(ranks), line.get_local_rank(), group, ranks)


def _data_axis(world: World, axes: dict[str, MeshAxis], layout: LayoutConfig) -> MeshAxis:
    """Return dp x cp as one axis: the shard axis, unless hybrid sharding splits it.

    A split axis has no group; collectives go over `shard` and `replicate` in turn.
    """
    replicate, shard = axes["replicate"], axes["shard"]
    if replicate.size == 1:
        return shard
    size, index = replicate.size * shard.size, replicate.index * shard.size + shard.index
    first = world.rank - index * layout.tp
    return MeshAxis(size, index, None, tuple(first + i * layout.tp for i in range(size)))
