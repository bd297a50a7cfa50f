"""Tensor parallelism: the sharding of each parameter and the exchanges between sharded layers.

Every module with parameters has a `tp_plan`, which defines by name how tensor ranks shard them. Its
forward pass uses the local shards and communicates through `TensorParallel`.
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
    """Sharding of a parameter over tensor ranks along `shard_dim`; None replicates it.

    `partial_grad`: each rank applies the whole parameter to its own shard of the activations, so
    its gradient is one term of a sum over the ranks.

    `by_expert`: dimension 0 holds experts, which expert ranks share out.
    """

    shard_dim: int | None = None
    partial_grad: bool = False
    by_expert: bool = False

    @property
    def placement(self) -> Placement:
        """The DTensor placement on the tensor axis."""
        return Replicate() if self.shard_dim is None else Shard(self.shard_dim)

    def sums_grad(self, sequence_parallel: bool) -> bool:
        """Return whether the gradient must be summed over the ranks.

        With sequence parallelism each rank applies a replicated parameter only to its own tokens.
        """
        return self.shard_dim is None and (self.partial_grad or sequence_parallel)

    def shard(self, whole: Tensor, axis: MeshAxis, ep: MeshAxis = ALONE) -> Tensor:
        """Return this rank's shard over tensor and expert ranks.

        Raise ValueError where an axis does not divide it.
        """
        if self.by_expert:
            whole = _part("ep", whole, 0, ep)
        return whole if self.shard_dim is None else _part("tp", whole, self.shard_dim, axis)


def _part(name: str, whole: Tensor, dim: int, axis: MeshAxis) -> Tensor:
    if whole.shape[dim] % axis.size:
        raise ValueError(f"{name} {axis.size} does not divide {whole.shape[dim]}")
    return whole.chunk(axis.size, dim)[axis.index]


TpPlan = Mapping[str, ParamPlan]
"""Plan of each parameter of a module or of a model, by name."""
REPLICATED: TpPlan = {"weight": ParamPlan(), "bias": ParamPlan()}
"""Plan of layers that see the same activations on every rank."""
PER_HEAD: TpPlan = {
    "weight": ParamPlan(partial_grad=True),
    "bias": ParamPlan(partial_grad=True),
}
"""Plan of parameters that all heads share while each rank has its own heads."""


@dataclass(frozen=True)
class TensorParallel:
    """Exchanges of a replica's tensor ranks around sharded layers.

    The residual stream (B, t, H) is equal on all ranks (t = T), or with `sequence_parallel` each
    rank holds its T / n tokens of it.
    """

    axis: MeshAxis = ALONE
    sequence_parallel: bool = False

    def gather_input(self, x: Tensor) -> Tensor:
        """Return (B, T, H) of the stream (B, t, H), the input of column-parallel layers."""
        return gather_sequence(x, self.axis) if self.sequence_parallel else copy_to(x, self.axis)

    def reduce_output(self, x: Tensor) -> Tensor:
        """Sum the partial results (B, T, H) of a row-parallel layer to the stream (B, t, H)."""
        if self.sequence_parallel:
            return reduce_scatter_sequence(x, self.axis)
        return reduce_from(x, self.axis)

    def split_sequence(self, rows: Tensor) -> Tensor:
        """Return this rank's rows (t, ...) of (T, ...)."""
        return rows.chunk(self.axis.size)[self.axis.index] if self.sequence_parallel else rows


NO_TP = TensorParallel()
EXPERT_FSDP_DIM = 1
"""Dimension along which FSDP shards the stacked weights of a rank's experts (E / ep, out, in).

A rank may hold fewer experts than there are ranks with the same ones, so dimension 0 would leave
some of them without a shard.
"""


def tp_plan_of(model: nn.Module) -> dict[str, ParamPlan]:
    """Return the plan of every parameter by its name in the model."""
    plans: dict[str, ParamPlan] = {}
    for path, module in model.named_modules():
        plan: TpPlan = getattr(module, "tp_plan", {})
        for key, _ in module.named_parameters(recurse=False):
            name = f"{path}.{key}" if path else key
            assert key in plan, f"{name} is missing in {type(module).__name__}.tp_plan"
            plans[name] = plan[key]
    return plans


def shard_parameters(
    model: nn.Module, axis: MeshAxis, mesh: DeviceMesh | None, ep: MeshAxis = ALONE
) -> None:
    """Replace parameters on the meta device by this rank's shards, DTensors if `mesh` is given.

    The weights of experts stay plain tensors if `ep` spreads them over ranks, because FSDP shards
    them over other ranks than `mesh` knows. Raise ValueError with the name of a parameter that an
    axis does not divide.
    """
    if axis.size == ep.size == 1:
        return
    for name, plan in tp_plan_of(model).items():
        spread = plan.by_expert and ep.size > 1
        if axis.size == 1 and not spread:
            continue
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        parameter = module.get_parameter(key)
        try:
            # Contiguous, which a part along an inner dimension is not and FSDP requires.
            part = plan.shard(parameter.detach(), axis, ep)
            shard = torch.empty_like(part, memory_format=torch.contiguous_format)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if mesh is not None and not spread:
            shard = DTensor.from_local(shard, mesh, [plan.placement], run_check=False)
        setattr(module, key, nn.Parameter(shard, parameter.requires_grad))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or the tensor itself; differentiable."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
