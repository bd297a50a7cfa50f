"""Dropout of the residual stream and of attention probabilities.

Ranks that hold the same activations must drop the same elements; all others must draw independent
numbers. Data, context and pipeline ranks have generators of their own; tensor ranks share one
(assembly.py). Where tensor ranks hold different tokens or heads, each seeds a generator from the
next shared number.

The state of a rank's random number generators is saved, restored and made rank-specific here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, compiler
from torch.nn import functional

from paceline.trainer.parallel.mesh import ALONE, MeshAxis
from paceline.trainer.parallel.tensor import TensorParallel


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the generators that dropout uses, by device type."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_rng_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore the states that `rng_states` returned."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


@contextmanager
def preserve_rng(device: torch.device) -> Iterator[None]:
    """Restore the generators on exit, so that the block leaves no trace in them."""
    states = rng_states(device)
    try:
        yield
    finally:
        restore_rng_states(states, device)


@contextmanager
def rank_specific_rng(rank: int, device: torch.device) -> Iterator[None]:
    """Draw different random numbers on each rank inside the block, and the same ones after it.

    The rank's seed derives from the next number of the common generator, so that a restored state
    reproduces it.
    """
    seed = int(torch.randint(2**62, ()).item()) + rank
    with preserve_rng(device):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)
        yield


Compute = Callable[..., Tensor]

INT32_MIN = -(2**31)


def residual_dropout(x: Tensor, p: float, tp: TensorParallel) -> Tensor:
    """Apply dropout with probability `p` to the residual stream (B, t, H)."""
    axis = tp.axis if tp.sequence_parallel else ALONE
    return with_rank_rng(axis, partial(dropout, p=p), x)


def dropout(x: Tensor, p: float) -> Tensor:
    """Set elements to 0 with probability `p` and scale the others by 1 / (1 - p)."""
    if x.device.type == "cpu" and compiler.is_compiling():
        return SeededDropout.apply(x, p)  # type: ignore[no-any-return]
    return functional.dropout(x, p)


class SeededDropout(torch.autograd.Function):
    """Dropout that saves two seeds for the backward pass and recomputes the mask from them.

    Inductor's dropout on CPUs (PyTorch 2.13) draws the elements one by one and saves a byte for
    each.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        seeds = torch.randint(INT32_MIN, -INT32_MIN, (2,), dtype=torch.int32, device=x.device)
        ctx.save_for_backward(seeds)
        ctx.p = p
        return _apply_mask(x, seeds, p)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (seeds,) = ctx.saved_tensors
        return _apply_mask(grad_output, seeds, ctx.p), None


def _apply_mask(x: Tensor, seeds: Tensor, p: float) -> Tensor:
    bits = hash_bits(torch.arange(x.numel(), dtype=torch.int32, device=x.device), seeds)
    mask = bits.view(x.shape) >= min(INT32_MIN + round(p * 2**32), -INT32_MIN - 1)
    return torch.where(mask, x * (1 / (1 - p)), 0)


def hash_bits(index: Tensor, seeds: Tensor) -> Tensor:
    """Hash each int32 index to 32 random bits (lowbias32, Chris Wellons, "hash-prospector").

    The second seed is added after one round of mixing, so that two pairs of seeds cannot give
    shifted copies of the same sequence.
    """
    x = index * -1640531527 + seeds[0]  # 2^32 / the golden ratio
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D + seeds[1]
    x = (x ^ (x >> 15 & 0x1FFFF)) * -2073254261
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D
    return x ^ (x >> 15 & 0x1FFFF)


def with_rank_rng(axis: MeshAxis, compute: Compute, x: Tensor, *more: Tensor) -> Tensor:
    """Return compute(x, ...), where every rank of the axis draws its own random numbers."""
    return compute(x, *more) if axis.size == 1 else RUNNERS["run"](axis, compute, x, *more)


def exclude_rank_rng_from_compile() -> None:
    """Exclude the change of generators from torch.compile, which cannot trace it.

    Call it before compiling. A decorator would import the compiler, which takes seconds.
    """
    disable: Any = compiler.disable
    RUNNERS["run"] = disable(_run_with_rank_rng)


def _run_with_rank_rng(axis: MeshAxis, compute: Compute, x: Tensor, *more: Tensor) -> Tensor:
    with rank_specific_rng(axis.index, x.device):
        return compute(x, *more)


RUNNERS: dict[str, Compute] = {"run": _run_with_rank_rng}
