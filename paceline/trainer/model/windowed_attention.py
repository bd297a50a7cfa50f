"""Causal attention with a sliding window.

Shapes: B sequences of Tq queries and Tk >= Tq keys, N query heads in groups over K key/value heads
of width D. As in `causal_attention`, the last query belongs to the last key.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

HALF_DTYPES = (torch.bfloat16, torch.float16)
MIN_BLOCK_TOKENS = 64
"""Minimum number of queries in a block; smaller GEMMs are dominated by call overhead."""
REQUIRED_ARGUMENTS = frozenset({"window_size", "enable_gqa"})
"""Arguments of the flash kernel's Python function, which PyTorch 2.10 does not have yet."""
KERNELS: dict[str, Any] = {}
"""PyTorch's variable-length flash attention by device type, where it is available."""


def load_kernels(device: torch.device) -> None:
    """Find the device's kernel. Call it before anything is compiled."""
    if device.type != "cuda" or device.type in KERNELS:
        return
    try:
        from torch.nn.attention.varlen import varlen_attn  # imports the compiler, which is slow
    except ImportError:
        return
    if inspect.signature(varlen_attn).parameters.keys() >= REQUIRED_ARGUMENTS:
        KERNELS[device.type] = varlen_attn


def windowed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    dropout: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from (B, Tq, N, D) queries to (B, Tk, K, D) keys in a window; return (B, Tq, N, D).

    A query sees at most `window` keys, its own included. `dropout` is the dropout probability of
    the attention weights. Where the device has no kernel for it, each block of queries attends with
    a mask to the keys that any of them sees, which is (window + block) x Tq work. So do queries
    with `sinks` (N,), as in `causal_attention`.
    """
    plain = sinks is None and q.dtype in HALF_DTYPES and not dropout
    if plain and (kernel := KERNELS.get(q.device.type)):
        return _attend_varlen(kernel, q, k, v, window)
    if q.shape[2] > k.shape[2] and (q.device.type == "cpu" or sinks is not None):
        groups = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    queries, past = q.shape[1], k.shape[1] - q.shape[1]
    size = min(queries, max(MIN_BLOCK_TOKENS, window))
    parts: list[Tensor] = []
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        first = max(0, past + start - window + 1)
        keys = slice(first, past + stop)
        q_block, k_block, v_block = (
            x.transpose(1, 2) for x in (q[:, start:stop], k[:, keys], v[:, keys])
        )
        mask = band(stop - start, past + stop - first, window, q.device)
        if sinks is not None:
            parts.append(attend_with_sinks(q_block, k_block, v_block, mask, dropout, sinks))
            continue
        parts.append(
            functional.scaled_dot_product_attention(
                q_block, k_block, v_block, mask, dropout, enable_gqa=q.shape[2] > k.shape[2]
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2)


def attend_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float, sinks: Tensor
) -> Tensor:
    """Attend from (B, N, Tq, D) queries to (B, N, Tk, D) keys with a mask and sinks (N,).

    `mask` is True where a query sees a key. A sink is one more score of each query, without a
    value. This keeps Tq x Tk probabilities.
    """
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)  # (B, N, Tq, Tk)
    scores = scores.masked_fill(~mask, float("-inf"))
    last = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:3], 1)
    probs = torch.cat([scores, last], -1).softmax(-1)[..., :-1]
    return functional.dropout(probs, dropout) @ v


def band(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Return a (Tq, Tk) mask: which of Tk tokens each of the last Tq tokens sees."""
    positions = torch.arange(keys - queries, keys, device=device).unsqueeze(1)  # (Tq, 1)
    distance = positions - torch.arange(keys, device=device)  # (Tq, Tk)
    return (distance >= 0) & (distance < window)


def _attend_varlen(kernel: Any, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attend with the variable-length flash kernel, which takes all sequences concatenated."""
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    index = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    out = kernel(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        index * queries,
        index * keys,
        queries,
        keys,
        # Number of keys before and after the query's own.
        window_size=(window - 1, 0),
        enable_gqa=q.shape[2] > k.shape[2],
    )
    return out.unflatten(0, (batch, queries))
