"""Causal attention within packed documents.

Shapes: B sequences of T tokens, N query heads in groups over K key/value heads of width D.
`documents` holds (B, n + 1) integers: the bounds of each sequence's documents from 0 to T. Equal
neighbors mark empty documents (see data/samples.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paceline.trainer.model.attention import causal_attention
from paceline.trainer.model.windowed_attention import (
    HALF_DTYPES,
    KERNELS,
    attend_with_sinks,
    band,
)


def document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor,
    dropout: float = 0.0,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend within documents from (B, T, N, D) queries to (B, T, K, D) keys.

    `dropout`, `window` and `sinks` are those of `causal_attention`. Document lengths are never read
    back from a GPU, because that would synchronize it with the CPU. Where the variable-length
    kernel is unavailable (fp32, dropout, sinks, an old PyTorch), a GPU computes all T x T pairs
    with a mask.
    """
    return COMPILABLE["attention"](q, k, v, documents, dropout, window, sinks)


def document_kernel(
    device: torch.device, dtype: torch.dtype, dropout: float, sinks: bool = False
) -> str:
    """Return how documents attend: `per document`, with the `varlen` kernel, or `masked`."""
    if device.type == "cpu":
        return "per document"
    plain = dtype in HALF_DTYPES and not dropout and not sinks
    return "varlen" if plain and device.type in KERNELS else "masked"


def exclude_documents_from_compile() -> None:
    """Exclude document attention from torch.compile, because document lengths vary."""
    disable: Any = torch.compiler.disable
    COMPILABLE["attention"] = disable(_attend)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor,
    dropout: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    kernel = document_kernel(q.device, q.dtype, dropout, sinks is not None)
    if kernel == "per document":
        return attend_per_document(q, k, v, documents, dropout, window, sinks)
    if kernel == "varlen":
        return attend_varlen(KERNELS[q.device.type], q, k, v, documents, window)
    return attend_masked(q, k, v, documents, dropout, window, sinks)


def attend_per_document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor,
    dropout: float,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend in one document after the other, so that no masked pair is computed."""
    lengths = [length for length in documents.diff(dim=1).flatten().tolist() if length]
    # (1, B T, N, D) of all sequences -> one (1, length, N, D) for each document
    split = [x.flatten(0, 1).unsqueeze(0).split(lengths, dim=1) for x in (q, k, v)]
    documents_qkv = zip(*split, strict=True)
    out = [causal_attention(q, k, v, dropout, window, sinks) for q, k, v in documents_qkv]
    return torch.cat(out, dim=1).view(q.shape)


def attend_varlen(
    kernel: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, window: int | None
) -> Tensor:
    """Attend with the variable-length flash kernel, which takes all documents concatenated."""
    batch, tokens = q.shape[:2]
    offsets = torch.arange(batch, dtype=torch.int32, device=q.device).unsqueeze(1) * tokens
    absolute = documents + offsets  # (B, n + 1) bounds in the concatenated tokens
    bounds = torch.cat([absolute[:, :-1].flatten(), absolute[-1, -1:]])  # (B n + 1,)
    out = kernel(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        bounds,
        bounds,
        tokens,
        tokens,
        # Number of keys before (-1: all of the document's) and after the query's own.
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[2] > k.shape[2],
    )
    return out.unflatten(0, (batch, tokens))


def attend_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor,
    dropout: float,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with a (B, T, T) mask."""
    tokens, groups = q.shape[1], q.shape[2] // k.shape[2]
    starts = document_starts(documents, torch.arange(tokens, device=q.device))
    same_document = starts.unsqueeze(2) == starts.unsqueeze(1)  # (B, T, T)
    mask = (same_document & band(tokens, tokens, window or tokens, q.device)).unsqueeze(1)
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if sinks is not None:
        return attend_with_sinks(q, k, v, mask, dropout, sinks).transpose(1, 2)
    return functional.scaled_dot_product_attention(q, k, v, mask, dropout).transpose(1, 2)


COMPILABLE: dict[str, Any] = {"attention": _attend}
"""The function in use, which `exclude_documents_from_compile` replaces."""


def restart_positions(positions: Tensor, documents: Tensor | None, offset: int) -> Tensor:
    """Restart (t,) positions, which count from `offset`, in each document; return (B, t)."""
    if documents is None:
        return positions
    return positions - document_starts(documents, positions - offset)


def document_starts(documents: Tensor, positions: Tensor) -> Tensor:
    """Return (B, t) starts of the documents that the tokens at (t,) positions belong to."""
    positions = positions.to(documents.dtype).expand(len(documents), -1).contiguous()
    return documents.gather(1, torch.searchsorted(documents, positions, right=True) - 1)
