"""Initial weights that depend on the seed and a parameter's name alone, whatever the layout."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.trainer.model.network import Network
from paceline.trainer.parallel.mesh import Mesh
from paceline.trainer.parallel.tensor import ParamPlan, local, tp_plan_of


def mixed_seed(seed: int, part: int) -> int:
    """A seed for one part of a run that differs from the other parts'."""
    return (seed * 1_000_000_007 + part) % 2**63


@torch.no_grad()
def init_weights(model: Network, shapes: dict[str, torch.Size], seed: int, mesh: Mesh) -> None:
    """Fill all parameters, as the model's own `fill` says, and its tables.

    `shapes` are those of the whole parameters. A rank that holds a part takes it from the very
    matrix that a single process would hold, which is made whole for a moment.
    """
    plans = tp_plan_of(model)
    for name, parameter in model.named_parameters():
        target = local(parameter)
        whole = torch.empty(shapes[name], device=target.device, dtype=target.dtype)
        generator = torch.Generator(whole.device)
        generator.manual_seed(mixed_seed(seed, zlib.crc32(name.encode())))
        model.fill(name, whole, generator)
        target.copy_(local_shard(whole, parameter, plans[name], mesh))
    model.make_tables(next(model.parameters()).device)


def local_shard(whole: Tensor, parameter: Tensor, plan: ParamPlan, mesh: Mesh) -> Tensor:
    """What this rank holds of a whole parameter: its tensor shard, and FSDP's rows of that."""
    part = plan.shard(whole, mesh.tp)
    if not isinstance(parameter, DTensor) or mesh.shard.size == 1:
        return part
    rows = part.chunk(mesh.shard.size)
    return rows[mesh.shard.index] if mesh.shard.index < len(rows) else part[:0]


def freeze(model: Network) -> None:
    """Freeze what an adapted model does not train, and keep that in the compute dtype."""
    lora = model.setting.lora
    if lora is None:
        return
    for name, parameter in model.named_parameters():
        if not lora.trains(name):
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(model.setting.dtype)


def count_parameters(model: nn.Module) -> int:
    """Number of parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
