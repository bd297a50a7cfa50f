"""Causal attention: PyTorch's kernels, and a blocked form that is faster on CPUs for short sequences.

Shapes: B sequences of T tokens, N query heads in G-sized groups over K key/value heads, D wide.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

LONGEST_BLOCKED = 1024
"""Beyond this the CPU's fused kernel is as fast, and kept probabilities would need T^2 memory."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, T, N, D) queries over (B, T, K, D) keys and values -> (B, T, N, D)."""
    if q.device.type == "cpu" and q.shape[1] <= LONGEST_BLOCKED:
        return BlockedAttention.apply(q, k, v)  # type: ignore[no-any-return]
    groups = q.shape[2] // k.shape[2]
    if groups > 1 and q.dtype not in (torch.bfloat16, torch.float16):
        # On CUDA only the half-precision kernel takes grouped heads without a slow fallback.
        k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
        groups = 1
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=groups > 1
    ).transpose(1, 2)


class BlockedAttention(torch.autograd.Function):
    """Attention as matrix products over blocks of queries, each with the keys up to its end.

    Skipping the blocks above the diagonal halves the work; the probabilities are kept for the
    backward pass. Products run in the inputs' dtype, softmax in fp32 inside.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, seq_len, heads, width = q.shape
        kv_heads = k.shape[2]
        groups = heads // kv_heads
        rows = (q * width**-0.5).view(batch, seq_len, kv_heads, groups, width)
        rows = rows.permute(0, 2, 3, 1, 4).reshape(batch * kv_heads, groups, seq_len, width)
        keys, values = _by_head(k), _by_head(v)
        out = torch.empty_like(rows)
        kept: list[Tensor] = []
        for part in _blocks(seq_len):
            scores = torch.bmm(rows[:, :, part].flatten(1, 2), keys[:, : part.stop].transpose(1, 2))
            size = part.stop - part.start
            future = torch.full((size, size), float("-inf"), dtype=q.dtype).triu_(1)
            scores.view(-1, groups, size, part.stop)[..., part].add_(future)
            kept.append(torch.softmax(scores, dim=-1))
            out[:, :, part] = torch.bmm(kept[-1], values[:, : part.stop]).unflatten(
                1, (groups, size)
            )
        ctx.save_for_backward(rows, keys, values, *kept)
        ctx.shape = q.shape
        return _by_token(out, q.shape)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        rows, keys, values, *kept = ctx.saved_tensors
        batch, seq_len, _, width = ctx.shape
        groups = rows.shape[1]
        grad = grad_output.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4)
        grad = grad.reshape(rows.shape)
        grad_rows, grad_keys, grad_values = (
            torch.empty_like(rows),
            torch.zeros_like(keys),
            torch.zeros_like(values),
        )
        for part, p in zip(_blocks(seq_len), kept, strict=True):
            end, above = part.stop, grad[:, :, part].flatten(1, 2)
            grad_values[:, :end].baddbmm_(p.transpose(1, 2), above)
            by_p = torch.bmm(above, values[:, :end].transpose(1, 2))
            by_score = torch.ops.aten._softmax_backward_data(by_p, p, -1, p.dtype)
            grad_rows[:, :, part] = torch.bmm(by_score, keys[:, :end]).unflatten(1, (groups, -1))
            grad_keys[:, :end].baddbmm_(by_score.transpose(1, 2), rows[:, :, part].flatten(1, 2))
        grad_q = _by_token(grad_rows.mul_(width**-0.5), ctx.shape)
        kv_shape = (batch, -1, seq_len, width)
        return (
            grad_q,
            grad_keys.view(kv_shape).transpose(1, 2),
            grad_values.view(kv_shape).transpose(1, 2),
        )


def _blocks(seq_len: int) -> list[slice]:
    """Blocks of queries: narrow enough to skip most of the future, wide enough for a product."""
    size = max(64, seq_len // 8)
    return [slice(start, min(start + size, seq_len)) for start in range(0, seq_len, size)]


def _by_head(x: Tensor) -> Tensor:
    """(B, T, K, D) -> (B K, T, D)."""
    return x.transpose(1, 2).flatten(0, 1)


def _by_token(x: Tensor, shape: torch.Size) -> Tensor:
    """(B K, G, T, D) -> (B, T, N, D)."""
    batch, seq_len, _, width = shape
    return x.view(batch, -1, seq_len, width).transpose(1, 2)
