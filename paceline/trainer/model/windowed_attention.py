"""Causal attention to a window of the past: each token to itself and to those shortly before it.

Shapes: B sequences of Tq queries and Tk >= Tq keys, N query heads in groups over K key/value heads,
D wide. As in `causal_attention`, the last query belongs to the last key.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

HALF = (torch.bfloat16, torch.float16)
SHORTEST_BLOCK = 64
"""Queries; a product over fewer is not worth its call."""
NEEDED = frozenset({"window_size", "enable_gqa"})
"""What the flash kernel's Python form must take: PyTorch 2.10 has it without."""
KERNELS: dict[str, Any] = {}
"""PyTorch's flash attention with a window, by the type of the device that has one."""


def load_kernels(device: torch.device) -> None:
    """Look for the device's kernel; to be done before anything is compiled or attends."""
    if device.type != "cuda" or device.type in KERNELS:
        return
    try:
        from torch.nn.attention.varlen import varlen_attn  # brings the compiler along
    except ImportError:
        return
    if inspect.signature(varlen_attn).parameters.keys() >= NEEDED:
        KERNELS[device.type] = varlen_attn


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, dropout: float = 0.0
) -> Tensor:
    """(B, Tq, N, D) queries over (B, Tk, K, D) keys and values -> (B, Tq, N, D).

    A query sees at most `window` keys, its own included. `dropout` is the share of the
    probabilities that is dropped. Where the device has no kernel for it, blocks of queries attend
    with a mask to the keys that any of them sees, which is (window + block) x Tq work.
    """
    if q.dtype in HALF and not dropout and (kernel := KERNELS.get(q.device.type)):
        return _by_kernel(kernel, q, k, v, window)
    grouped = q.shape[2] > k.shape[2]
    if grouped and q.device.type == "cpu":
        groups = q.shape[2] // k.shape[2]
        k, v, grouped = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2), False
    queries, past = q.shape[1], k.shape[1] - q.shape[1]
    size = min(queries, max(SHORTEST_BLOCK, window))
    parts: list[Tensor] = []
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        first = max(0, past + start - window + 1)
        keys = slice(first, past + stop)
        parts.append(
            functional.scaled_dot_product_attention(
                q[:, start:stop].transpose(1, 2),
                k[:, keys].transpose(1, 2),
                v[:, keys].transpose(1, 2),
                band(stop - start, past + stop - first, window, q.device),
                dropout,
                enable_gqa=grouped,
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2)


def band(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """(Tq, Tk) whether each of the last Tq of Tk tokens sees each of them."""
    behind = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    behind = behind - torch.arange(keys, device=device)
    return (behind >= 0) & (behind < window)


def _by_kernel(kernel: Any, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """The same by the flash kernel, which takes all sequences as one line of tokens."""
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    ends = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    out = kernel(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        ends * queries,
        ends * keys,
        queries,
        keys,
        # Keys before the query's own, and behind it.
        window_size=(window - 1, 0),
        enable_gqa=q.shape[2] > k.shape[2],
    )
    return out.unflatten(0, (batch, queries))
