"""What the trainer asks of a model, whatever it computes.

Initial weights depend on the seed and a parameter's name alone, whatever the layout.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from paceline.trainer.parallel.mesh import Mesh
from paceline.trainer.parallel.tensor import ParamPlan, local, tp_plan_of

INIT_STD = 0.02


class Network(nn.Module):
    """A model, or a pipeline stage of it, that returns its scaled loss.

    Parameters are named as in the whole model, and the module that has them says in its `tp_plan`
    how tensor ranks hold them. `blocks` are what is compiled, recomputed and gathered one by one.
    """

    model: Any
    """The configuration it was made from."""
    setting: Any
    """How it computes: `model.Setting`, which this module lies below."""
    blocks: nn.ModuleDict
    compiled: bool = False
    """Whether its blocks are compiled, and with them what is done to logits."""
    scale: float = 1.0
    """What the summed loss is multiplied with, set before every step."""
    sample_weights: Tensor | None = None
    """(B,) what each target of a sample counts in an evaluation; None where all count the same."""

    @property
    def tied_copy(self) -> str | None:
        """The parameter that is another stage's as well, and only copied here."""
        return None

    def make_tables(self, device: torch.device) -> None:
        """Compute what belongs to this rank's positions, if anything, once before training."""

    def fill(self, name: str, whole: Tensor, generator: torch.Generator) -> None:
        """Initial values of a whole parameter: matrices from N(0, 0.02), norm weights 1, biases 0.

        Adapters begin without effect: the first matrix uniform in +-1/sqrt(in), the second 0.
        """
        *_, layer, kind = name.split(".")
        if layer.endswith("norm") and kind == "weight":
            whole.fill_(1)
        elif kind in ("bias", "lora_b"):
            whole.zero_()
        elif kind == "lora_a":
            bound = whole.shape[1] ** -0.5
            whole.uniform_(-bound, bound, generator=generator)
        else:
            whole.normal_(0, INIT_STD, generator=generator)


T = TypeVar("T", Tensor, tuple[Tensor, ...])


def recomputed(
    compute: Callable[..., T], *inputs: Any, draws: bool = False, when: bool = True
) -> T:
    """What `compute` returns, keeping only its inputs and computing the rest anew for the gradient.

    `draws` says that it draws random numbers, which must then be the same ones; `when` is whether
    to do so at all.
    """
    if not when:
        return compute(*inputs)
    return checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=draws)


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
