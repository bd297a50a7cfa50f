"""Which layers and micro-batches a pipeline rank holds, as arrays over many cases.

Symbols: p ranks (pp), v chunks a rank (vp), m micro-batches of a replica in a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from paceline.core.layout import Schedule
from paceline.core.pipeline import kept_layers, stage_sizes
from paceline.estimate.model.case import Bools, Cases, Floats
from paceline.estimate.model.weights import num_microbatches


@dataclass(frozen=True)
class Stage:
    """What the tensor ranks of one pipeline rank hold together."""

    layers: Floats
    """Of all its chunks together."""
    kept: Floats
    """Layers times the micro-batches whose activations of them are alive at once."""
    deferred: Floats
    """Micro-batches whose gradients of weights wait: zero-bubble puts off as many as ranks lie
    before (Qi et al., arXiv:2401.10241)."""
    first: Bools
    """Whether the rank is the first one, which has the embedding."""
    last: Bools
    """Whether it is the last one, which has the head."""

    @property
    def alive(self) -> Floats:
        """Layers times micro-batches that are kept for either part of their backward pass."""
        return self.kept + self.layers * self.deferred


def stage(x: Cases, rank: int) -> Stage:
    """The pipeline rank `rank` of every case, counted from the end when negative.

    Layers that stages cannot share equally go to the first ones. A case with fewer ranks gets its
    last. Cases that share all that matters here are counted once.
    """
    pp, vp = np.maximum(x.pp, 1).astype(int), np.maximum(x.vp, 1).astype(int)
    ranks = np.where(rank < 0, pp - 1, np.minimum(rank, pp - 1))
    m = np.maximum(1, np.floor(num_microbatches(x))).astype(int)
    # 1f1b with chunks is the interleaved schedule.
    chunked = x.has("schedule", "1f1b") & (vp > 1) & (pp > 1)
    schedule = np.where(chunked, "interleaved", x.words["schedule"])
    # Beyond two full rounds of p nothing changes, except where all micro-batches are kept.
    steady = (m % pp == 0) & (schedule != "gpipe")
    m = np.where(steady, np.minimum(m, 2 * pp), m)
    names = np.unique(schedule)
    schedules: list[Schedule] = [cast(Schedule, str(name)) for name in names]
    columns = [x.layers.astype(int), pp, vp, ranks, m, np.searchsorted(names, schedule)]
    unique, inverse = np.unique(np.column_stack(columns), axis=0, return_inverse=True)
    keys: list[list[int]] = unique.tolist()
    held = [_held(key, schedules[key[-1]]) for key in keys]
    layers, kept = np.array(held, dtype=float).reshape(-1, 2)[inverse.reshape(-1)].T
    split = x.has("schedule", "zero-bubble") & (pp > 1)
    deferred = np.where(split, np.minimum(ranks, m), 0).astype(float)
    return Stage(layers, kept, deferred, ranks == 0, ranks == pp - 1)


def _held(key: list[int], schedule: Schedule) -> tuple[int, int]:
    """(layers, layers x micro-batches alive at once) of a rank; `key` begins with these five."""
    num_layers, pp, vp, rank, microbatches = key[:5]
    try:
        sizes = stage_sizes(num_layers, pp, vp)
    except ValueError:
        each, rest = divmod(num_layers, pp * vp)
        sizes = [each + (i < rest) for i in range(pp * vp)]
    return sum(sizes[rank::pp]), kept_layers(sizes, pp, rank, schedule, microbatches)
