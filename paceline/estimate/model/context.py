"""What context-parallel ranks exchange in a block, by how they get at each other's keys.

t tokens of a micro-batch on a rank, a query and g key/value heads of d numbers, 2 bytes each.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from paceline.estimate.model.case import Cases, Floats
from paceline.estimate.model.collectives import (
    all_reduce_s,
    all_to_all_s,
    group_rate,
    start_s,
)

BYTES = 2


def context_s(x: Cases, c: Mapping[str, float], tokens: Floats, attention: Floats) -> Floats:
    """Seconds of a block's forward and backward pass that its exchanges add.

    `tokens` is t, `attention` the seconds of its forward pass.
    """
    seconds = _passed_on(x, c, tokens, attention)
    for exchange, of in (("all-gather", _gathered), ("all-to-all", _swapped)):
        rows = x.has("cp_exchange", exchange)
        if rows.any():
            seconds = np.where(rows, of(x, c, tokens), seconds)
    return np.where(x.cp > 1, seconds, 0.0)


def _passed_on(x: Cases, c: Mapping[str, float], tokens: Floats, attention: Floats) -> Floats:
    """Around a ring, also where nobody says: attention hides all but `cp_exposed` of it.

    2 tensors of t g d / tp numbers of each of cp - 1 ranks; as much twice again backward.
    """
    moved = (x.cp - 1) * 2 * BYTES * tokens * x.kv_heads * x.head_dim / x.tp
    span = x.tp * x.cp
    needed = moved / group_rate(x, c, span, x.tp) + start_s(x, c, span) * (x.cp - 1)
    hidden = np.minimum(needed, attention)
    return (needed - hidden + c["cp_exposed"] * hidden) * (3 + x.full_recompute)


def _gathered(x: Cases, c: Mapping[str, float], tokens: Floats) -> Floats:
    """All keys and values before attention begins, their gradients summed and scattered after it.

    A gather and a scatter are an all-reduce of the gathered bytes; attention waits for both.
    """
    whole = x.cp * 2 * BYTES * tokens * x.kv_heads * x.head_dim / x.tp
    both = all_reduce_s(x, c, whole, x.cp, x.tp, 2.0)
    again = np.maximum(x.full_recompute, x.selective_recompute)
    return both * (1 + again / 2)


def _swapped(x: Cases, c: Mapping[str, float], tokens: Floats) -> Floats:
    """Queries, keys and values for a share of the heads and all tokens, and the output back.

    Key/value heads are copied until the ranks can share them (lcm); nothing hides the exchanges
    (Jacobs et al., arXiv:2309.14509).
    """
    kv_heads = np.maximum(1, x.kv_heads // x.tp).astype(np.int64)
    shared = np.lcm(kv_heads, x.cp.astype(np.int64)) * x.tp
    head, alone = BYTES * tokens * x.head_dim / x.tp, np.ones(x.size)

    def swap_s(heads: Floats) -> Floats:
        return all_to_all_s(x, c, head * heads, x.cp, x.tp, alone)

    to_tokens, to_heads = swap_s(x.heads + 2 * shared), swap_s(x.heads)
    again = np.maximum(x.full_recompute, x.selective_recompute)
    return to_tokens * (2 + again) + to_heads * (2 + x.full_recompute)
