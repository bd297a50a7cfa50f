"""The mesh of ranks: pipeline, data, context and tensor axes, the last one innermost.

Ranks of one tensor group are neighbours, so they share a node; pipeline stages lie farthest apart.
ZeRO spreads states over dp x cp: context-parallel ranks hold the same weights as data-parallel
ones.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.trainer.config import MESH_AXES, ConfigError, LayoutConfig


@dataclass(frozen=True)
class MeshAxis:
    """One axis of the mesh as this rank sees it; `group` is None where nothing is exchanged."""

    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None
    ranks: tuple[int, ...] = (0,)
    """World ranks along the axis, this one at `index`."""

    @property
    def name(self) -> str:
        """What functional collectives know the group by."""
        assert self.group is not None, "nothing is exchanged over this axis"
        return self.group.group_name


ALONE = MeshAxis()


@dataclass(frozen=True)
class World:
    """This rank's place among all ranks; `backend` is None when it is alone."""

    rank: int
    local_rank: int
    size: int
    device: torch.device
    backend: str | None


@dataclass(frozen=True)
class Mesh:
    """This rank's axes. `data` is dp x cp; `shard` and `replicate` are its ZeRO split."""

    pp: MeshAxis = ALONE
    dp: MeshAxis = ALONE
    cp: MeshAxis = ALONE
    tp: MeshAxis = ALONE
    data: MeshAxis = ALONE
    replicate: MeshAxis = ALONE
    shard: MeshAxis = ALONE
    device_mesh: DeviceMesh | None = field(default=None, compare=False)
    """Axes pp, replicate, shard, tp: what parameters and optimizer state are spread over."""

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's index on every axis."""
        return {name: getattr(self, name).index for name in MESH_AXES}


def join_world(device_type: str, bind: bool = True) -> World:
    """The world that the launcher's environment variables describe, with its process group.

    `bind` has NCCL make its communicators at once, the groups' by splitting the world's. Raises
    ConfigError where a rank has no GPU.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device_type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"local rank {local_rank}: {torch.cuda.device_count()} GPUs are visible here, "
                "and every rank of a node needs one of its own"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device(device_type)
    if size == 1:
        return World(rank, local_rank, size, device, None)
    backend = "nccl" if device_type == "cuda" else "gloo"
    timeout = collective_limit()
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


def collective_limit() -> timedelta | None:
    """How long a collective may take, None for what PyTorch allows by itself."""
    limit = os.environ.get("PACELINE_COLLECTIVE_LIMIT_S")
    return timedelta(seconds=float(limit)) if limit else None


def rank0_store(rank: int, size: int, timeout: timedelta) -> TCPStore:
    """The store where ranks meet, at MASTER_ADDR alone: torch's own listens on every address."""
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
    """The axes of a layout whose sizes multiply to the world's; every rank must call it."""
    if world.size == 1:
        return Mesh()
    kind, ranks_of_data = world.device.type, dp * layout.cp
    shard = (layout.dp_shard or ranks_of_data) if layout.zero_stage >= 2 else ranks_of_data
    device_mesh = init_device_mesh(
        kind,
        (layout.pp, ranks_of_data // shard, shard, layout.tp),
        mesh_dim_names=("pp", "replicate", "shard", "tp"),
    )
    named = {name: _axis(device_mesh, name) for name in ("pp", "replicate", "shard", "tp")}
    data = _data_axis(world, named, layout)
    if layout.cp == 1:
        return Mesh(**named, data=data, dp=data, device_mesh=device_mesh)
    first = data.index % layout.cp
    dp_axis = MeshAxis(dp, data.index // layout.cp, None, data.ranks[first :: layout.cp])
    cp = _context_axis(world, data, named["shard"], layout)
    return Mesh(**named, data=data, dp=dp_axis, cp=cp, device_mesh=device_mesh)


def _context_axis(world: World, data: MeshAxis, shard: MeshAxis, layout: LayoutConfig) -> MeshAxis:
    """The cp ranks of this rank's replica, with a group of their own where no axis has them.

    A mesh of all four axes would make the groups of pp and tp a second time: communicators of NCCL,
    each with its buffers on every GPU. Nothing is exchanged over dp alone.
    """
    size, tp = layout.cp, layout.tp
    start = data.index - data.index % size
    ranks = data.ranks[start : start + size]
    if ranks == shard.ranks:
        return shard
    blocks = range(0, world.size, size * tp)
    every = [[block + t + tp * i for i in range(size)] for block in blocks for t in range(tp)]
    group, _ = dist.new_subgroups_by_enumeration(every, timeout=collective_limit())
    assert isinstance(group, dist.ProcessGroup), "every rank is in one of them"
    return MeshAxis(size, data.index - start, group, ranks)


def _axis(mesh: DeviceMesh, name: str) -> MeshAxis:
    line = mesh[name]
    ranks = tuple(line.mesh.flatten().tolist())
    group, limit = line.get_group() if len(ranks) > 1 else None, collective_limit()
    if group is not None and limit is not None:
        # The groups of a mesh do not take over the world's limit.
        dist.distributed_c10d._set_pg_timeout(limit, group)
    return MeshAxis(len(ranks), line.get_local_rank(), group, ranks)


def _data_axis(world: World, named: dict[str, MeshAxis], layout: LayoutConfig) -> MeshAxis:
    """dp x cp as one axis: the shard axis, unless hybrid sharding splits it.

    Then it has no group: what goes over all of it goes over its two halves, one after the other.
    """
    replicate, shard = named["replicate"], named["shard"]
    if replicate.size == 1:
        return shard
    size, index = replicate.size * shard.size, replicate.index * shard.size + shard.index
    first = world.rank - index * layout.tp
    return MeshAxis(size, index, None, tuple(first + i * layout.tp for i in range(size)))
