"""Activations of feed-forward layers, in the forms that compile well."""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def gelu_tanh(x: Tensor) -> Tensor:
    """x / 2 (1 + tanh u) with u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks, arXiv:1606.08415).

    Inductor's tanh takes longer on a CPU than all else of the function, so there it is compiled as
    the equal x sigmoid(2 u).
    """
    if x.device.type == "cpu" and torch.compiler.is_compiling():
        return x * torch.sigmoid(x * (2 * sqrt(2 / pi)) * (1 + 0.044715 * x * x))
    return functional.gelu(x, approximate="tanh")


class Relu(torch.autograd.Function):
    """max(x, 0), whose gradient is found by the output, which the next product keeps anyway.

    Compiled from PyTorch's own, a block keeps a byte for each element as well, and on a CPU those
    bytes are written one by one (PyTorch 2.13). It would keep them of a comparison here as well, so
    the gradient is a product: where the output is 0, one that has overflowed becomes NaN, not 0.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.clamp_min(0)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:  # type: ignore[override]
        (out,) = ctx.saved_tensors
        return grad_output * out.sign()


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    if x.device.type == "cpu" and torch.compiler.is_compiling():
        return Relu.apply(x)  # type: ignore[no-any-return]
    return functional.relu(x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
}
