"""Activations give what PyTorch's do, in every form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.trainer.model.layers import ACTIVATIONS

PYTORCH = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
}


def graded(activation: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Values, and the gradient of their sum."""
    out = activation(x)
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
    assert torch.bool in kept_dtypes(functional.relu), "PyTorch's own would do now"
    assert torch.bool not in kept_dtypes(ACTIVATIONS["relu"])


def kept_dtypes(activation: Callable[[Tensor], Tensor]) -> set[torch.dtype]:
    """Of what a compiled feed-forward keeps for its gradients."""
    up, down, norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)
    kept: set[torch.dtype] = set()

    def keep(tensor: Tensor) -> Tensor:
        kept.add(tensor.dtype)
        return tensor

    ffn = torch.compile(lambda x: norm(x + down(activation(up(x)))))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ffn(torch.randn(2, 16, 32, requires_grad=True)).sum().backward()
    return kept
