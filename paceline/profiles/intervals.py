"""Arithmetic of stretches of time: arrays (n, 2) of begin and end in seconds."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.float64]
"""(n, 2), begin and end; what the functions here return is sorted and does not overlap."""

NONE: Intervals = np.empty((0, 2))


def intervals(begin: Iterable[float], end: Iterable[float]) -> Intervals:
    """(n, 2) of two columns."""
    columns = [np.fromiter(column, dtype=np.float64) for column in (begin, end)]
    return np.stack(columns, axis=1) if len(columns[0]) else NONE


def union(spans: Intervals) -> Intervals:
    """The time that any of them covers."""
    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans):
        return NONE
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    ends = np.maximum.accumulate(spans[:, 1])
    first = np.concatenate([[True], spans[1:, 0] > ends[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([spans[first, 0], ends[last]], axis=1)


def joined(*parts: Intervals) -> Intervals:
    """The time that any interval of any part covers."""
    return union(np.concatenate([NONE, *parts]))


def subtract(spans: Intervals, minus: Intervals) -> Intervals:
    """The time of `spans` that `minus` leaves."""
    spans, minus = union(spans), union(minus)
    if not len(minus) or not len(spans):
        return spans
    gaps = np.stack(
        [np.concatenate([[-np.inf], minus[:, 1]]), np.concatenate([minus[:, 0], [np.inf]])], axis=1
    )
    return intersect(spans, gaps)


def intersect(left: Intervals, right: Intervals) -> Intervals:
    """The time that both cover."""
    left, right = union(left), union(right)
    if not len(left) or not len(right):
        return NONE
    # Each of `left` meets the run of `right` from the first that ends behind its begin to the last
    # that begins before its end.
    first = np.searchsorted(right[:, 1], left[:, 0], side="right")
    last = np.searchsorted(right[:, 0], left[:, 1], side="left")
    counts = np.maximum(last - first, 0)
    mine = np.repeat(np.arange(len(left)), counts)
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    theirs = np.repeat(first, counts) + offsets
    return np.stack(
        [
            np.maximum(left[mine, 0], right[theirs, 0]),
            np.minimum(left[mine, 1], right[theirs, 1]),
        ],
        axis=1,
    )


def within(spans: Intervals, begin: float, end: float) -> Intervals:
    """What of `spans` lies between two moments; they may overlap and stay so."""
    meets = (spans[:, 1] > begin) & (spans[:, 0] < end)
    return np.clip(spans[meets], begin, end)


def length_s(spans: Intervals) -> float:
    """Seconds that intervals cover which do not overlap."""
    return float((spans[:, 1] - spans[:, 0]).sum())
