"""Activations that are computed anew in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.checkpoint import checkpoint

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
