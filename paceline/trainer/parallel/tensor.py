"""Tensor parallelism: how ranks hold each parameter, and what they exchange between the cuts.

Every module with parameters has a `tp_plan` that says, by their names in it, how tensor ranks hold
them; its forward pass takes the local shards and exchanges through `TensorParallel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from paceline.trainer.parallel.collectives import (
    copy_to,
    gather_sequence,
    reduce_from,
    reduce_scatter_sequence,
)
from paceline.trainer.parallel.mesh import ALONE, MeshAxis


@dataclass(frozen=True)
class ParamPlan:
    """How tensor ranks hold a parameter: each its shard along `shard_dim`, or all of it on each.

    `partial_grad`: a rank applies the whole parameter to its own shard of the activations, so its
    gradient is one term of a sum over the ranks.
    """

    shard_dim: int | None = None
    partial_grad: bool = False

    @property
    def placement(self) -> Placement:
        """On the tensor axis of a device mesh."""
        return Replicate() if self.shard_dim is None else Shard(self.shard_dim)

    def sums_grad(self, sequence_parallel: bool) -> bool:
        """Whether gradients are to be summed over the ranks.

        With sequence parallelism each rank has applied a whole parameter to its own tokens alone.
        """
        return self.shard_dim is None and (self.partial_grad or sequence_parallel)

    def shard(self, whole: Tensor, axis: MeshAxis) -> Tensor:
        """This rank's shard of a whole parameter; ValueError where the axis does not divide it."""
        if self.shard_dim is None:
            return whole
        if whole.shape[self.shard_dim] % axis.size:
            raise ValueError(f"tp {axis.size} does not divide {whole.shape[self.shard_dim]}")
        return whole.chunk(axis.size, self.shard_dim)[axis.index]


TpPlan = Mapping[str, ParamPlan]
"""Of a module's own parameters, or of a whole model's, by name."""
REPLICATED: TpPlan = {"weight": ParamPlan(), "bias": ParamPlan()}
"""The same activations go through it on every rank."""
PER_HEAD: TpPlan = {
    "weight": ParamPlan(partial_grad=True),
    "bias": ParamPlan(partial_grad=True),
}
"""One for all heads, of which every rank has its own."""


@dataclass(frozen=True)
class TensorParallel:
    """What a replica's tensor ranks exchange around layers that hold shards.

    The residual stream (B, t, H) is the same on all ranks, t = T, or with `sequence_parallel` each
    rank has its T / n tokens of it.
    """

    axis: MeshAxis = ALONE
    sequence_parallel: bool = False

    def gather_input(self, x: Tensor) -> Tensor:
        """The stream (B, t, H) -> (B, T, H), which column-parallel layers read."""
        return gather_sequence(x, self.axis) if self.sequence_parallel else copy_to(x, self.axis)

    def reduce_output(self, x: Tensor) -> Tensor:
        """Partial sums (B, T, H) of a row-parallel layer -> the stream (B, t, H)."""
        if self.sequence_parallel:
            return reduce_scatter_sequence(x, self.axis)
        return reduce_from(x, self.axis)

    def split_sequence(self, rows: Tensor) -> Tensor:
        """(T, ...) by token -> (t, ...), the rows of this rank's stream."""
        return rows.chunk(self.axis.size)[self.axis.index] if self.sequence_parallel else rows


NO_TP = TensorParallel()


def tp_plan_of(model: nn.Module) -> dict[str, ParamPlan]:
    """The plan of every parameter, by its name in the model, as the module that has it says."""
    plans: dict[str, ParamPlan] = {}
    for path, module in model.named_modules():
        plan: TpPlan = getattr(module, "tp_plan", {})
        for key, _ in module.named_parameters(recurse=False):
            name = f"{path}.{key}" if path else key
            assert key in plan, f"{name}: {type(module).__name__}.tp_plan does not say who holds it"
            plans[name] = plan[key]
    return plans


def shard_parameters(model: nn.Module, axis: MeshAxis, mesh: DeviceMesh | None) -> None:
    """Replace parameters (on meta) by this rank's shards: DTensors over `mesh`, or plain ones.

    Raises ValueError with the name of a parameter that the axis does not divide.
    """
    if axis.size == 1:
        return
    for name, plan in tp_plan_of(model).items():
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        parameter = module.get_parameter(key)
        try:
            shard = torch.empty_like(plan.shard(parameter.detach(), axis))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if mesh is not None:
            shard = DTensor.from_local(shard, mesh, [plan.placement], run_check=False)
        setattr(module, key, nn.Parameter(shard, parameter.requires_grad))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, or the tensor itself; autograd follows it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
