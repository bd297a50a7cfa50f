"""What a rank did and when, whichever tool recorded it: what every reader makes of its files."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

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


COMMUNICATION = "communication "
"""Begin of the label of what moves data between ranks; the axis follows."""


@dataclass(frozen=True)
class StepSpan:
    """When a step ran; steps of one timeline do not overlap."""

    number: int
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """One rank. Activities may overlap and need no order; all times are seconds of one clock."""

    rank: int
    steps: tuple[StepSpan, ...]
    names: tuple[str, ...]
    labels: tuple[str, ...]
    """Kinds of `kernels.KINDS`, or COMMUNICATION with an axis or `unknown`."""
    name_of: NDArray[np.int32]
    """(n,) index of each activity's name."""
    label_of: NDArray[np.int32]
    """(n,) index of each activity's label."""
    spans: Intervals
    """(n, 2). Kernels of all streams, or the own time of operations of the computing threads."""
    data_wait: Intervals = field(default_factory=lambda: NONE)
    """When the program waited for its next batch."""

    def labelled(self, label: str) -> Intervals:
        """The activities of one label, as they were recorded."""
        if label not in self.labels:
            return NONE
        return self.spans[self.label_of == self.labels.index(label)]

    def axes(self) -> Iterator[tuple[str, Intervals]]:
        """Every axis that anything was sent along, with its activities."""
        for label in self.labels:
            if label.startswith(COMMUNICATION):
                yield label.removeprefix(COMMUNICATION), self.labelled(label)


class TimelineBuilder:
    """Collects activities one by one in 24 bytes each."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._labels: dict[str, int] = {}
        self._name_of, self._label_of = array("i"), array("i")
        self._times = array("d")

    def __len__(self) -> int:
        return len(self._name_of)

    def add(self, name: str, label: str, begin_s: float, end_s: float) -> None:
        """One activity; `label` as in `Timeline.labels`."""
        self._name_of.append(self._names.setdefault(name, len(self._names)))
        self._label_of.append(self._labels.setdefault(label, len(self._labels)))
        self._times.append(begin_s)
        self._times.append(end_s)

    def timeline(
        self, rank: int, steps: Sequence[StepSpan], data_wait: Intervals = NONE
    ) -> Timeline:
        """All that was added."""
        return Timeline(
            rank=rank,
            steps=tuple(steps),
            names=tuple(self._names),
            labels=tuple(self._labels),
            name_of=np.array(self._name_of, dtype=np.int32),
            label_of=np.array(self._label_of, dtype=np.int32),
            spans=np.array(self._times, dtype=np.float64).reshape(-1, 2),
            data_wait=data_wait,
        )
