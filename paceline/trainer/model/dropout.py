"""Dropout of the stream and of attention's probabilities.

Ranks that hold the same activations drop the same of them, all others draw apart. Data, context and
pipeline ranks have generators of their own, tensor ranks draw alike (assembly.py). Where these hold
different tokens of the stream, or heads, they draw from a seed that follows from the next number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, compiler
from torch.nn import functional

from paceline.trainer.parallel.mesh import ALONE, MeshAxis
from paceline.trainer.parallel.tensor import TensorParallel
from paceline.trainer.randomness import drawn_apart

Compute = Callable[..., Tensor]

LOWEST = -(2**31)
"""The lowest number of int32."""


def drop_stream(x: Tensor, share: float, tp: TensorParallel) -> Tensor:
    """(B, t, H) with a share of its elements 0, and the others 1 / (1 - share) times as large."""
    axis = tp.axis if tp.sequence_parallel else ALONE
    return drop_apart(axis, partial(drop, share=share), x)


def drop(x: Tensor, share: float) -> Tensor:
    """x with a share of its elements 0, and the others 1 / (1 - share) times as large."""
    if x.device.type == "cpu" and compiler.is_compiling():
        return SeededDropout.apply(x, share)  # type: ignore[no-any-return]
    return functional.dropout(x, share)


class SeededDropout(torch.autograd.Function):
    """Dropout that keeps two numbers for the backward pass, and draws anew by them.

    What PyTorch 2.13 compiles for a CPU draws the elements one by one, and stores each one's byte.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        seeds = torch.randint(LOWEST, -LOWEST, (2,), dtype=torch.int32, device=x.device)
        ctx.save_for_backward(seeds)
        ctx.share = share
        return _dropped(x, seeds, share)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (seeds,) = ctx.saved_tensors
        return _dropped(grad_output, seeds, ctx.share), None


def _dropped(x: Tensor, seeds: Tensor, share: float) -> Tensor:
    bits = hashed(torch.arange(x.numel(), dtype=torch.int32, device=x.device), seeds)
    kept = bits.view(x.shape) >= min(LOWEST + round(share * 2**32), -LOWEST - 1)
    return torch.where(kept, x * (1 / (1 - share)), 0)


def hashed(index: Tensor, seeds: Tensor) -> Tensor:
    """Random bits of each number, int32: multiplications and shifts that mix all 32.

    Constants of lowbias32 (Wellons). The second seed comes after a round of mixing, so that no
    other seeds give the same row from elsewhere.
    """
    x = index * -1640531527 + seeds[0]  # 2^32 / the golden ratio
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D + seeds[1]
    x = (x ^ (x >> 15 & 0x1FFFF)) * -2073254261
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D
    return x ^ (x >> 15 & 0x1FFFF)


def drop_apart(axis: MeshAxis, compute: Compute, x: Tensor, *more: Tensor) -> Tensor:
    """compute(x, ...), for which every rank of the axis draws random numbers of its own."""
    return compute(x, *more) if axis.size == 1 else APART["run"](axis, compute, x, *more)


def keep_draws_from_compiler() -> None:
    """Have torch.compile leave the change of generators alone, because it cannot trace one.

    Done when something is compiled: a decorator would import the compiler, which takes seconds.
    """
    disable: Any = compiler.disable
    APART["run"] = disable(_computed_apart)


def _computed_apart(axis: MeshAxis, compute: Compute, x: Tensor, *more: Tensor) -> Tensor:
    with drawn_apart(axis.index, x.device):
        return compute(x, *more)


APART: dict[str, Compute] = {"run": _computed_apart}
