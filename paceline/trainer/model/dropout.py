"""Dropout of the stream and of attention's probabilities.

Ranks that hold the same activations drop the same of them, all others draw apart. Data, context and
pipeline ranks have generators of their own, tensor ranks draw alike (assembly.py). Where these hold
different tokens of the stream, or heads, they draw from a seed that follows from the next number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, compiler
from torch.nn import functional

from paceline.trainer.parallel.mesh import ALONE, Axis
from paceline.trainer.parallel.tensor import TensorParallel
from paceline.trainer.randomness import drawn_apart

Compute = Callable[..., Tensor]


def drop_stream(x: Tensor, share: float, tp: TensorParallel) -> Tensor:
    """(B, t, H) with a share of its elements 0, and the others 1 / (1 - share) times as large."""
    axis = tp.axis if tp.sequence_parallel else ALONE
    return drop_apart(axis, partial(functional.dropout, p=share), x)


def drop_apart(axis: Axis, compute: Compute, x: Tensor, *more: Tensor) -> Tensor:
    """compute(x, ...), for which every rank of the axis draws random numbers of its own."""
    return compute(x, *more) if axis.size == 1 else APART["run"](axis, compute, x, *more)


def keep_draws_from_compiler() -> None:
    """Have torch.compile leave the change of generators alone, because it cannot trace one.

    Done when something is compiled: a decorator would import the compiler, which takes seconds.
    """
    disable: Any = compiler.disable
    APART["run"] = disable(_computed_apart)


def _computed_apart(axis: Axis, compute: Compute, x: Tensor, *more: Tensor) -> Tensor:
    with drawn_apart(axis.index, x.device):
        return compute(x, *more)


APART: dict[str, Compute] = {"run": _computed_apart}
