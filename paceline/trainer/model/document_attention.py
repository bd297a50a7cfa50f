"""Causal attention of packed documents, each of which sees itself alone.

Shapes: B sequences of T tokens, N query heads in groups over K key/value heads, D wide; `documents`
(B, n + 1) whole numbers, the bounds of each sequence's documents from 0 to T, of which some may be
equal (see data/document_bounds.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paceline.trainer.model.attention import causal_attention
from paceline.trainer.model.windowed_attention import HALF, KERNELS, band


def document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor,
    dropout: float = 0.0,
    window: int | None = None,
) -> Tensor:
    """(B, T, N, D) queries over (B, T, K, D) keys and values -> (B, T, N, D).

    `dropout` and `window` are `causal_attention`'s. A GPU is never asked how long documents are,
    which would have the host wait for it. Where its kernel cannot be had, for fp32 or dropout or
    from an old PyTorch, it computes all T x T pairs and masks.
    """
    return COMPUTED["attention"](q, k, v, documents, dropout, window)


def document_kernel(device: torch.device, dtype: torch.dtype, dropout: float) -> str:
    """How documents attend there: `one by one`, by the `varlen` kernel, or `masked`."""
    if device.type == "cpu":
        return "one by one"
    return "varlen" if dtype in HALF and not dropout and device.type in KERNELS else "masked"


def keep_documents_from_compiler() -> None:
    """Have torch.compile leave it alone: lengths are no constants, and a kernel is compiled."""
    disable: Any = torch.compiler.disable
    COMPUTED["attention"] = disable(_computed)


def _computed(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor, dropout: float, window: int | None
) -> Tensor:
    way = document_kernel(q.device, q.dtype, dropout)
    if way == "one by one":
        return one_by_one(q, k, v, documents, dropout, window)
    if way == "varlen":
        return by_kernel(KERNELS[q.device.type], q, k, v, documents, window)
    return masked(q, k, v, documents, dropout, window)


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor, dropout: float, window: int | None
) -> Tensor:
    """The same, one document after the other: no pair that a mask would hide is computed."""
    lengths = [length for length in documents.diff(dim=1).flatten().tolist() if length]
    lines = [x.flatten(0, 1).unsqueeze(0).split(lengths, dim=1) for x in (q, k, v)]
    out = [causal_attention(q, k, v, dropout, window) for q, k, v in zip(*lines, strict=True)]
    return torch.cat(out, dim=1).view(q.shape)


def by_kernel(
    kernel: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, window: int | None
) -> Tensor:
    """The same by the flash kernel, which takes all documents as one line of tokens."""
    batch, tokens = q.shape[:2]
    begins = torch.arange(batch, dtype=torch.int32, device=q.device).unsqueeze(1) * tokens
    line = documents + begins
    bounds = torch.cat([line[:, :-1].flatten(), line[-1, -1:]])
    out = kernel(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        bounds,
        bounds,
        tokens,
        tokens,
        # Keys before the query's own (-1: all of the document's), and behind it.
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[2] > k.shape[2],
    )
    return out.unflatten(0, (batch, tokens))


def masked(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor, dropout: float, window: int | None
) -> Tensor:
    """The same with a mask of B x T x T."""
    tokens, groups = q.shape[1], q.shape[2] // k.shape[2]
    starts = document_starts(documents, torch.arange(tokens, device=q.device))
    seen = starts.unsqueeze(2) == starts.unsqueeze(1)
    seen = seen & band(tokens, tokens, window or tokens, q.device)
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, seen.unsqueeze(1), dropout)
    return out.transpose(1, 2)


COMPUTED: dict[str, Any] = {"attention": _computed}


def restarted(places: Tensor, documents: Tensor | None, offset: int) -> Tensor:
    """(t,) places that count from `offset` in a sequence -> (B, t) that do so in each document."""
    if documents is None:
        return places
    return places - document_starts(documents, places - offset)


def document_starts(documents: Tensor, positions: Tensor) -> Tensor:
    """(B, t) where the documents begin that tokens at (t,) positions belong to."""
    positions = positions.to(documents.dtype).expand(len(documents), -1).contiguous()
    return documents.gather(1, torch.searchsorted(documents, positions, right=True) - 1)
