"""Base class of all models: loss, initial weights and activation checkpointing.

Initial weights depend only on the seed and the parameter's name, so all layouts start equal.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from paceline.trainer.model.routing_replay import routing_contexts
from paceline.trainer.parallel.mesh import Mesh
from paceline.trainer.parallel.tensor import EXPERT_FSDP_DIM, ParamPlan, local, tp_plan_of

INIT_STD = 0.02


class Network(nn.Module):
    """A model, or a pipeline stage of one, that returns its scaled loss.

    Parameters have the names of the whole model. The `tp_plan` of the module that owns them defines
    how tensor ranks shard them. Blocks are compiled, recomputed and gathered one by one.
    """

    model: Any
    """The model configuration."""
    setting: Any
    """The `LayerSetting`, whose module imports this one."""
    blocks: nn.ModuleDict
    compiled: bool = False
    """True if the blocks and the loss of the logits are compiled."""
    scale: float = 1.0
    """Factor of the summed loss, set before every step."""
    sample_weights: Tensor | None = None
    """(B,) weights of each sample's targets in an evaluation; None for equal weights."""

    @property
    def shares_embedding(self) -> bool:
        """True if the last stage of a pipeline has a copy of the embedding."""
        return False

    @property
    def tied_copy(self) -> str | None:
        """Name of the tied parameter that another stage owns; None without one."""
        return None

    def all_blocks(self) -> list[nn.Module]:
        """Return the modules that are compiled, recomputed and gathered one by one."""
        return [*self.blocks.values()]

    def make_tables(self, device: torch.device) -> None:
        """Compute the tables of this rank's positions, if any, once before training."""

    def init_parameter(self, name: str, whole: Tensor, generator: torch.Generator) -> None:
        """Initialize a whole parameter: matrices from N(0, 0.02^2), norm weights 1, biases 0.

        A LoRA adapter starts without effect: A is uniform in +-1/sqrt(in), B is 0.
        """
        *_, layer, kind = name.split(".")
        if layer.endswith("norm") and kind == "weight":
            whole.fill_(1)
        elif kind.endswith("bias") or kind == "lora_b":
            whole.zero_()
        elif kind == "lora_a":
            bound = whole.shape[1] ** -0.5
            whole.uniform_(-bound, bound, generator=generator)
        else:
            whole.normal_(0, INIT_STD, generator=generator)


T = TypeVar("T", Tensor, tuple[Tensor, ...])


def activation_checkpoint(
    compute: Callable[..., T],
    *inputs: Any,
    preserve_rng: bool = False,
    routes: bool = False,
    enabled: bool = True,
) -> T:
    """Return compute(*inputs), saving only the inputs and recomputing it in the backward pass.

    Set `preserve_rng` where `compute` draws random numbers, so that the second run repeats them,
    and `routes` where it chooses experts, so that the second run keeps the choice.
    """
    if not enabled:
        return compute(*inputs)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng}
    if routes and not torch.compiler.is_compiling():
        options["context_fn"] = routing_contexts
    return checkpoint(compute, *inputs, **options)


def derive_seed(seed: int, part: int) -> int:
    """Return the seed of one part of a run, which differs from those of the other parts."""
    return (seed * 1_000_000_007 + part) % 2**63


@torch.no_grad()
def init_weights(model: Network, shapes: dict[str, torch.Size], seed: int, mesh: Mesh) -> None:
    """Initialize all parameters with the model's `init_parameter`, and compute its tables.

    Buffers, which are the choice biases of routers, start at 0.

    `shapes` are those of the whole parameters. Each parameter is created whole for a moment, so
    that a rank's shard equals the same part of a single process's matrix.
    """
    plans = tp_plan_of(model)
    for name, parameter in model.named_parameters():
        target = local(parameter)
        whole = torch.empty(shapes[name], device=target.device, dtype=target.dtype)
        generator = torch.Generator(whole.device)
        generator.manual_seed(derive_seed(seed, zlib.crc32(name.encode())))
        model.init_parameter(name, whole, generator)
        target.copy_(local_shard(whole, parameter, plans[name], mesh))
    for buffer in model.buffers():
        buffer.zero_()
    model.make_tables(next(model.parameters()).device)


def local_shard(whole: Tensor, parameter: Tensor, plan: ParamPlan, mesh: Mesh) -> Tensor:
    """Return this rank's part of a whole parameter: its shard, or FSDP's rows of it.

    FSDP shards experts that are spread over ranks along their second dimension.
    """
    part = plan.shard(whole, mesh.tp, mesh.ep)
    if not isinstance(parameter, DTensor):
        return part
    if plan.by_expert and mesh.ep.size > 1:
        return part.chunk(mesh.expert_data.size, EXPERT_FSDP_DIM)[mesh.expert_data.index]
    if mesh.shard.size == 1:
        return part
    rows = part.chunk(mesh.shard.size)
    return rows[mesh.shard.index] if mesh.shard.index < len(rows) else part[:0]


def freeze(model: Network) -> None:
    """Freeze the parameters that LoRA does not train, and store them in the compute dtype."""
    lora = model.setting.lora
    if lora is None:
        return
    for name, parameter in model.named_parameters():
        if not lora.trains(name):
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(model.setting.dtype)


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters, counting tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
