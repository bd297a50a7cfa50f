"""Bounds of the documents in the windows of packed samples.

Bounds of n samples are (n, D + 1) ordered positions from 0 to seq_len: document i of a sample has
the inputs from bound i up to bound i + 1. Samples with fewer than D documents repeat their last
bound. A batch thus carries one integer tensor, and no device has to be synchronized for sizes. A
document split by a window counts as a separate document in each window.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paceline.trainer.model_config import ModelConfig


def window_bounds(ends: Tensor, starts: Sequence[int], seq_len: int) -> Tensor:
    """Return the bounds of windows starting at `starts`; documents end at (documents,) `ends`."""
    inner: list[Tensor] = []
    for start in starts:
        span = torch.tensor([start, start + seq_len], dtype=ends.dtype)
        first, last = torch.searchsorted(ends, span, right=True).tolist()
        inner.append(ends[first:last] - start)
    return _pad_bounds(inner, seq_len)


def piece_bounds(lengths: Sequence[Sequence[int]], seq_len: int) -> Tensor:
    """Return the bounds of samples joined from document pieces of these lengths."""
    return _pad_bounds([torch.tensor([*accumulate(sample)]) for sample in lengths], seq_len)


def _pad_bounds(inner: Sequence[Tensor], seq_len: int) -> Tensor:
    ends = pad_sequence([*inner], batch_first=True, padding_value=seq_len).clamp(max=seq_len)
    edge = ends.new_zeros(len(ends), 1)
    return torch.cat([edge, ends, edge + seq_len], dim=1).to(torch.int32)


def attended_share(bounds: Tensor, model: ModelConfig) -> float:
    """Return the fraction of query-key pairs within documents, averaged over samples and layers.

    A document of l tokens has l^2 pairs without a causal mask. In a layer with a window of w < l
    tokens it has l (2 w - 1) - w (w - 1) pairs, as the harness counts them (core/flops.py).
    """
    seq_len = bounds[:, -1:].double()
    windows = [model.window(layer) for layer in range(model.num_layers)]
    document_pairs, all_pairs = (
        sum(float(_pairs(lengths, window).sum()) for window in windows)
        for lengths in (bounds.diff(dim=1).double(), seq_len)
    )
    return document_pairs / all_pairs


def _pairs(lengths: Tensor, window: int | None) -> Tensor:
    if window is None:
        return lengths.square()
    w = lengths.clamp(max=window)
    return lengths * (2 * w - 1) - w * (w - 1)
