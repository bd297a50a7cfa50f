"""The blocked attention is attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attention
from attention import BlockedAttention, causal_attention

SHAPES = [(2, 130, 4, 2, 8), (1, 64, 3, 3, 6), (2, 37, 4, 1, 8), (1, 600, 2, 1, 4), (1, 1, 2, 2, 4)]
"""Batch, tokens, heads, key/value heads, width: also lengths that are no whole number of blocks."""


def with_gradients(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    out = causal_attention(q, k, v)
    above = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out, *torch.autograd.grad(out, (q, k, v), above)]


@pytest.mark.parametrize(("batch", "tokens", "heads", "kv_heads", "width"), SHAPES)
def test_blocks_give_what_the_kernel_gives(
    batch: int, tokens: int, heads: int, kv_heads: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (
        torch.randn(batch, tokens, n, width, dtype=torch.float64, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    )
    blocked = with_gradients(q, k, v)
    monkeypatch.setattr(attention, "LONGEST_BLOCKED", 0)

    for found, wanted in zip(blocked, with_gradients(q, k, v), strict=True):
        assert found.shape == wanted.shape
        assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-12)


def test_its_gradients_are_those_of_its_output() -> None:
    q, k, v = (torch.randn(1, 5, n, 2, dtype=torch.float64, requires_grad=True) for n in (2, 1, 1))

    assert torch.autograd.gradcheck(BlockedAttention.apply, (q, k, v))


@pytest.mark.parametrize("length", [0, 1024])
def test_half_precision_stays_close(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LONGEST_BLOCKED", length)
    q, k, v = (torch.randn(2, 100, n, 16) for n in (4, 2, 2))
    half = causal_attention(q.bfloat16(), k.bfloat16(), v.bfloat16()).float()

    assert (half - causal_attention(q, k, v)).norm() < 0.02 * half.norm()
