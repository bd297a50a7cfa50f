"""Activations give what PyTorch's do, in every form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.trainer.model.activations import ACTIVATIONS

PYTORCH = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


def graded(activation: object, x: Tensor) -> tuple[Tensor, Tensor]:
    """Values, and the gradient of their sum."""
    out = activation(x)  # type: ignore[operator]
    return out.detach(), torch.autograd.grad(out.sum(), x)[0]


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*istutils:UserWarning")
def test_values_and_gradients_are_pytorchs(name: str, compiled: bool) -> None:
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([0.0, -60.0, 60.0])])
    x.requires_grad_()
    activation = torch.compile(ACTIVATIONS[name]) if compiled else ACTIVATIONS[name]

    for ours, theirs in zip(graded(activation, x), graded(PYTORCH[name], x), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*istutils:UserWarning")
def test_a_compiled_relu_keeps_no_mask() -> None:
    up, down = nn.Linear(32, 64), nn.Linear(64, 32)
    kept: list[Tensor] = []
    x = torch.randn(16, 32, requires_grad=True)

    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        torch.compile(lambda x: down(ACTIVATIONS["relu"](up(x))))(x).sum().backward()

    assert kept and not any(tensor.dtype == torch.bool for tensor in kept)
