"""Which layers and micro-batches a pipeline rank holds, as arrays over many cases."""

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
    """What the tensor ranks of one pipeline rank hold, all of its chunks together."""

    layers: Floats
    kept: Floats
    """Layers times the micro-batches whose activations of them are alive at once."""
    deferred: Floats
    """Micro-batches whose weights' gradients wait: zero-bubble puts off as many as ranks lie before."""
    first: Bools
    last: Bools

    @property
    def alive(self) -> Floats:
        """Layers times micro-batches that are kept for either part of their backward pass."""
        return self.kept + self.layers * self.deferred


def stage(x: Cases, rank: int) -> Stage:
    """The pipeline rank `rank` of every case, counted from the end when negative.

    Layers that stages cannot share equally go to the first ones. A case with fewer ranks gets its last.
    """
    pp, vp = np.maximum(x.pp, 1).astype(int), np.maximum(x.vp, 1).astype(int)
    ranks = np.where(rank < 0, pp - 1, np.minimum(rank, pp - 1))
    m = np.maximum(1, np.floor(num_microbatches(x))).astype(int)
    # Beyond two full rounds nothing changes, except where all micro-batches are kept.
    chunked = x.has("schedule", "1f1b") & (vp > 1) & (pp > 1)
    schedule = np.where(chunked, "interleaved", x.words["schedule"])
    steady = (m % pp == 0) & (schedule != "gpipe")
    m = np.where(steady, np.minimum(m, 2 * pp), m)
    keys = np.array([*zip(x.layers.astype(int), pp, vp, ranks, m, strict=True)])
    names = np.unique(schedule)
    orders: list[Schedule] = [cast(Schedule, str(name)) for name in names]
    keys = np.column_stack([keys, np.searchsorted(names, schedule)])
    unique, where = np.unique(keys, axis=0, return_inverse=True)
    rows: list[list[int]] = unique.tolist()
    held = [_held(row, orders[row[-1]]) for row in rows]
    layers, kept = np.array(held, dtype=float).reshape(-1, 2)[where.reshape(-1)].T
    split = x.has("schedule", "zero-bubble") & (pp > 1)
    deferred = np.where(split, np.minimum(ranks, m), 0).astype(float)
    return Stage(layers, kept, deferred, ranks == 0, ranks == pp - 1)


def _held(row: list[int], schedule: Schedule) -> tuple[int, int]:
    """(layers, layers x micro-batches alive at once) of a rank; `row` is the beginning of a key."""
    num_layers, pp, vp, rank, microbatches = row[:5]
    try:
        sizes = stage_sizes(num_layers, pp, vp)
    except ValueError:
        each, rest = divmod(num_layers, pp * vp)
        sizes = [each + (i < rest) for i in range(pp * vp)]
    return sum(sizes[rank::pp]), kept_layers(sizes, pp, rank, schedule, microbatches)
