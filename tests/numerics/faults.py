"""Faults that a comparison must find, put into the trainer's code in running ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from paceline.trainer.data.batches import LocalBatch
from paceline.trainer.model import context_parallel as context
from paceline.trainer.model import decoder
from paceline.trainer.model.attention import causal_attention
from paceline.trainer.model.flux import HeadNorm
from paceline.trainer.model.layers import ColumnParallelLinear
from paceline.trainer.model.network import activation_checkpoint
from paceline.trainer.parallel import collectives, token_exchange
from paceline.trainer.parallel.mesh import World
from paceline.trainer.parallel.tensor import ParamPlan
from paceline.trainer.replica import replica
from paceline.trainer.replica.replica import Replica

Fault = Callable[[World], AbstractContextManager[Any]]


def sound(world: World) -> AbstractContextManager[Any]:
    """No fault."""
    return nullcontext()


def unreduced_gradients(world: World) -> AbstractContextManager[Any]:
    """DDP's communication hook forgets to communicate."""

    def hook(steps: Any, bucket: Any, group: Any) -> torch.futures.Future[Tensor]:
        steps.begin_wait()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    return patch.object(replica, "average_bucket", hook)


def unreduced_inputs(world: World) -> AbstractContextManager[Any]:
    """The gradient of a tensor-parallel region's input is not summed."""
    return patch.object(collectives._Copy, "backward", staticmethod(lambda ctx, grad: (grad, None)))


def unsummed_shares(world: World) -> AbstractContextManager[Any]:
    """With sequence parallel, gradients of norms and the like keep to their own tokens."""
    return patch.object(replica, "all_reduce_coalesced", lambda tensors, axis, factor=1.0: None)


def other_inputs(world: World) -> AbstractContextManager[Any]:
    """Recomputation sees inputs that are a thousandth larger than at first."""

    def drifted(compute: Any, *inputs: Any, **settings: Any) -> Any:
        calls: list[int] = []

        def counted(*parts: Any) -> Any:
            calls.append(1)
            factor = 1.0 if len(calls) == 1 else 1.001
            return compute(*(x * factor if isinstance(x, Tensor) else x for x in parts))

        return activation_checkpoint(counted, *inputs, **settings)

    return patch.object(decoder, "activation_checkpoint", drifted)


def lonely_adapters(world: World) -> AbstractContextManager[Any]:
    """Tensor ranks do not sum their shares of an uncut adapter's gradient."""
    return patch.dict(ColumnParallelLinear.tp_plan, lora_a=ParamPlan())


def lonely_heads(world: World) -> AbstractContextManager[Any]:
    """The norm of queries and keys learns from a rank's own heads alone."""
    return patch.dict(HeadNorm.tp_plan, weight=ParamPlan())


def lonely_streams(world: World) -> AbstractContextManager[Any]:
    """The keys that a rank gave to others bring no gradient back."""

    def own(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.axis.size, dim=1)[ctx.axis.index], None

    return patch.object(collectives._GatherSequence, "backward", staticmethod(own))


def lonely_table(world: World) -> AbstractContextManager[Any]:
    """First and last stage do not tell each other their gradient of the tied embedding."""
    return patch.object(Replica, "_exchange_tied", lambda self: None)


def wrong_weight(world: World) -> AbstractContextManager[Any]:
    """The loss of rank 1 counts a thousandth too much."""
    return _trained(world, lambda train, self, batch, scale: train(self, batch, scale * 1.001))


def own_count(world: World) -> AbstractContextManager[Any]:
    """Every rank divides by its own number of counted targets."""
    from paceline.trainer.trainer import Trainer

    return patch.object(Trainer, "_mean_count", lambda self, batch: batch.num_valid_targets)


def idle_stage(world: World) -> AbstractContextManager[Any]:
    """The stage of rank 1 has no gradient."""

    def train(sound: Any, self: Replica, batch: LocalBatch, scale: float) -> Tensor:
        loss = sound(self, batch, scale)
        for gradient in self.gradients():
            gradient.zero_()
        return loss

    return _trained(world, train)


def lonely_norm(world: World) -> AbstractContextManager[Any]:
    """A stage takes the norm of its own gradients for that of the whole model."""

    def own(self: Replica, loss: Tensor) -> tuple[Tensor, Tensor]:
        norm = torch.nn.utils.get_total_norm(self._gradients_of_norm()[False])
        return norm, collectives.all_reduce(loss.clone(), self.mesh.pp)

    return patch.object(Replica, "norm_and_loss", own)


def drifting_rank(world: World) -> AbstractContextManager[Any]:
    """Rank 1 applies other gradients than those that the ranks agreed on."""

    def train(sound: Any, self: Replica, batch: LocalBatch, scale: float) -> Tensor:
        loss = sound(self, batch, scale)
        for gradient in self.gradients():
            gradient.mul_(1.001)
        return loss

    return _trained(world, train)


def lonely_keys(world: World) -> AbstractContextManager[Any]:
    """Context-parallel ranks attend to their own tokens alone."""
    alone = lambda q, k, v, cp, dropout, window, _: causal_attention(q, k, v, dropout, window)  # noqa: E731
    return patch.dict(context.EXCHANGES, {"all-gather": alone})


def lonely_experts(world: World) -> AbstractContextManager[Any]:
    """Ranks with the same experts do not average their gradients."""
    sound = Replica._reduce_gradients

    def reduce(self: Replica, of_experts: bool) -> None:
        if not of_experts:
            sound(self, of_experts)

    return patch.object(Replica, "_reduce_gradients", reduce)


def lost_results(world: World) -> AbstractContextManager[Any]:
    """The results of experts return one row late."""
    shifted = lambda rows, plan: sound(rows.roll(1, 0), plan)  # noqa: E731
    sound = token_exchange._from_experts
    return patch.object(token_exchange, "_from_experts", shifted)


def broken_rank(world: World) -> AbstractContextManager[Any]:
    """Rank 1 raises an error while the others wait for it."""

    def train(sound: Any, self: Replica, batch: LocalBatch, scale: float) -> Tensor:
        raise RuntimeError("broken on purpose")

    return _trained(world, train)


def _trained(world: World, train: Callable[..., Tensor]) -> AbstractContextManager[Any]:
    """Rank 1 alone trains in another way."""
    sound = Replica.train
    broken = lambda self, batch, scale: train(sound, self, batch, scale)  # noqa: E731
    return patch.object(Replica, "train", broken if world.rank == 1 else sound)


FAULTS: dict[str, Fault] = {
    function.__name__.replace("_", " "): function
    for function in (
        unreduced_gradients, unreduced_inputs, unsummed_shares, other_inputs, lonely_adapters,
        lonely_heads, lonely_streams, lonely_table, wrong_weight, own_count, idle_stage,
        lonely_norm, drifting_rank, lonely_keys, lonely_experts, lost_results, broken_rank,
    )
}  # fmt: skip
