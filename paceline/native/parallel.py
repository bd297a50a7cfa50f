"""Data parallelism: how one model is kept equal over the ranks, ZeRO stage by stage.

stage 0  DDP                      parameters, gradients and optimizer state on every rank
stage 1  DDP, sharded optimizer   ZeroRedundancyOptimizer
stage 2  FSDP2, kept gathered     gradients and optimizer state sharded; weights between steps too
stage 3  FSDP2                    weights gathered block by block as well

All stages average gradients over the ranks. Stages 2 and 3 reduce them after every micro-batch, so
they are never held whole; stages 0 and 1 after the last one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from clock import StepClock
from config import LayoutConfig
from model import Decoder
from weights import local


@dataclass(frozen=True)
class World:
    """This rank's place among all ranks; `backend` is None when it is alone."""

    rank: int
    local_rank: int
    size: int
    device: torch.device
    backend: str | None


def join_world(device_type: str) -> World:
    """The world that the launcher's environment variables describe, with its process group."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device_type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device(device_type)
    if size == 1:
        return World(rank, local_rank, size, device, None)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, device_id=device if device_type == "cuda" else None)
    return World(rank, local_rank, size, device, backend)


class Replica:
    """A model that one process trains alone; the other kinds differ in what they exchange."""

    sharded = False

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.module: nn.Module = model

    def train(self, inputs: Tensor, targets: Tensor, scale: float, last: bool) -> Tensor:
        """Scaled loss of one micro-batch, with its gradients added; `last` of its step."""
        loss = self.module(inputs, targets, scale)
        loss.backward()
        return loss.detach()

    def gradients(self) -> list[Tensor]:
        """This rank's gradients, as plain tensors."""
        return [local(p.grad) for p in self.model.parameters() if p.grad is not None]


class DdpReplica(Replica):
    """DDP: buckets of gradients are averaged while the backward pass still runs."""

    def __init__(self, model: Decoder, world: World, steps: StepClock) -> None:
        super().__init__(model)
        self.steps = steps
        ids = [world.device.index] if world.device.type == "cuda" else None
        self.ddp = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
        # DDP reads a hook's annotations and refuses postponed ones, so it gets a hook without any.
        self.ddp.register_comm_hook(steps, lambda steps, bucket: average_bucket(steps, bucket))
        self.module = self.ddp

    def train(self, inputs: Tensor, targets: Tensor, scale: float, last: bool) -> Tensor:
        """Scaled loss of one micro-batch; gradients are exchanged in the last one."""
        if not last:
            with self.ddp.no_sync():
                return super().train(inputs, targets, scale, last)
        loss = super().train(inputs, targets, scale, last)
        self.steps.end_wait()
        return loss


class ShardedReplica(Replica):
    """FSDP2: blocks are gathered before use, gradients reduced to the part that a rank owns."""

    sharded = True

    def __init__(self, model: Decoder, world: World, layout: LayoutConfig) -> None:
        super().__init__(model)
        mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("dp",))
        mixed = model.dtype not in (torch.float32, torch.float64)
        policy = MixedPrecisionPolicy(
            param_dtype=model.dtype if mixed else None,
            reduce_dtype=torch.float32 if mixed else None,
        )
        self.keep_gathered = layout.zero_stage == 2
        for block in model.blocks.values():
            fully_shard(
                block, mesh=mesh, mp_policy=policy, reshard_after_forward=not self.keep_gathered
            )
        # Embedding and head are needed again as soon as the forward pass ends.
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)

    def train(self, inputs: Tensor, targets: Tensor, scale: float, last: bool) -> Tensor:
        """Scaled loss of one micro-batch; stage 2 gathers the weights once a step."""
        assert isinstance(self.module, FSDPModule)
        if self.keep_gathered:
            self.module.set_reshard_after_backward(last)
        return super().train(inputs, targets, scale, last)


def average_bucket(steps: StepClock, bucket: Any) -> torch.futures.Future[Tensor]:
    """DDP's communication hook: the mean over ranks; behind the last bucket there is only waiting."""
    work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG, async_op=True)
    assert work is not None
    if bucket.is_last():
        steps.begin_wait()
    return work.get_future().then(_first)


def _first(future: torch.futures.Future[Any]) -> Tensor:
    return future.value()[0]
