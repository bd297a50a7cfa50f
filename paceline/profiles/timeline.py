"""Timeline of a rank's activities, the common result of all trace readers."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import UserError

Intervals = NDArray[np.float64]
"""(n, 2): start and end. Functions in this module return sorted intervals without overlap."""

NO_INTERVALS: Intervals = np.empty((0, 2))


def intervals(begin: Iterable[float], end: Iterable[float]) -> Intervals:
    """Return intervals (n, 2) from two columns."""
    columns = [np.fromiter(column, dtype=np.float64) for column in (begin, end)]
    return np.stack(columns, axis=1) if len(columns[0]) else NO_INTERVALS


def union(spans: Intervals) -> Intervals:
    """Return the time that any of the intervals covers."""
    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans):
        return NO_INTERVALS
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    ends = np.maximum.accumulate(spans[:, 1])
    first = np.concatenate([[True], spans[1:, 0] > ends[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([spans[first, 0], ends[last]], axis=1)


def union_all(*parts: Intervals) -> Intervals:
    """Return the time that any interval of any part covers."""
    return union(np.concatenate([NO_INTERVALS, *parts]))


def subtract(spans: Intervals, minus: Intervals) -> Intervals:
    """Return the time of `spans` outside `minus`."""
    spans, minus = union(spans), union(minus)
    if not len(minus) or not len(spans):
        return spans
    gaps = np.stack(
        [np.concatenate([[-np.inf], minus[:, 1]]), np.concatenate([minus[:, 0], [np.inf]])], axis=1
    )
    return intersect(spans, gaps)


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Return the time that both cover."""
    a, b = union(a), union(b)
    if not len(a) or not len(b):
        return NO_INTERVALS
    # Each interval of `a` overlaps with a contiguous range of `b`: from the first that ends after
    # its start to the last that starts before its end.
    first = np.searchsorted(b[:, 1], a[:, 0], side="right")
    last = np.searchsorted(b[:, 0], a[:, 1], side="left")
    counts = np.maximum(last - first, 0)
    mine = np.repeat(np.arange(len(a)), counts)
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    theirs = np.repeat(first, counts) + offsets
    return np.stack(
        [
            np.maximum(a[mine, 0], b[theirs, 0]),
            np.minimum(a[mine, 1], b[theirs, 1]),
        ],
        axis=1,
    )


def within(spans: Intervals, begin: float, end: float) -> Intervals:
    """Return `spans` clipped to two times; intervals may still overlap."""
    meets = (spans[:, 1] > begin) & (spans[:, 0] < end)
    return np.clip(spans[meets], begin, end)


def length_s(spans: Intervals) -> float:
    """Return the total length in seconds of intervals without overlap."""
    return float((spans[:, 1] - spans[:, 0]).sum())


COMMUNICATION = "communication "
"""Prefix of the labels of communication; the axis follows."""


@dataclass(frozen=True)
class StepSpan:
    """Start and end of a step; steps of one timeline do not overlap."""

    number: int
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """Activities of one rank, in any order and possibly overlapping, in seconds of one clock."""

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
    """(n, 2): kernels of all streams, or the self time of operations of the computing threads."""
    data_wait: Intervals = field(default_factory=lambda: NO_INTERVALS)
    """Times in which the program waited for its next batch."""

    def with_label(self, label: str) -> Intervals:
        """Return the activities with one label, as recorded."""
        if label not in self.labels:
            return NO_INTERVALS
        return self.spans[self.label_of == self.labels.index(label)]

    def axes(self) -> Iterator[tuple[str, Intervals]]:
        """Yield every axis with communication, and its activities."""
        for label in self.labels:
            if label.startswith(COMMUNICATION):
                yield label.removeprefix(COMMUNICATION), self.with_label(label)


MAX_ACTIVITIES = 4_000_000
"""Maximum number of activities in memory, 24 bytes each."""
MAX_STEPS = 2_000
MAX_LABELS = 100
MAX_NAME_CHARS = 1 << 26
"""Maximum length of all different names together."""


class TimelineBuilder:
    """Builder of a timeline; each activity takes 24 bytes. Raises UserError beyond a limit."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._name_chars = 0
        self._names: dict[str, int] = {}
        self._labels: dict[str, int] = {}
        self._name_of, self._label_of = array("i"), array("i")
        self._times = array("d")

    def __len__(self) -> int:
        return len(self._name_of)

    def add(self, name: str, label: str, begin_s: float, end_s: float) -> None:
        """Add one activity; `label` as in `Timeline.labels`. It does not end before it begins."""
        if name not in self._names:
            self._name_chars += len(name)
        self._name_of.append(self._names.setdefault(name, len(self._names)))
        self._label_of.append(self._labels.setdefault(label, len(self._labels)))
        self._require(len(self), MAX_ACTIVITIES, "kernels or operations")
        self._require(len(self._labels), MAX_LABELS, "kinds of communication")
        self._require(self._name_chars, MAX_NAME_CHARS, "characters of names")
        self._times.append(begin_s)
        self._times.append(max(begin_s, end_s))

    def timeline(
        self, rank: int, steps: Sequence[StepSpan], data_wait: Intervals = NO_INTERVALS
    ) -> Timeline:
        """Return the timeline of all activities; the builder must not be used afterwards."""
        self._require(len(steps), MAX_STEPS, "steps")
        return Timeline(
            rank=rank,
            steps=tuple(steps),
            names=tuple(self._names),
            labels=tuple(self._labels),
            name_of=np.frombuffer(self._name_of, dtype=np.int32),
            label_of=np.frombuffer(self._label_of, dtype=np.int32),
            spans=np.frombuffer(self._times, dtype=np.float64).reshape(-1, 2),
            data_wait=data_wait,
        )

    def _require(self, count: int, limit: int, what: str) -> None:
        if count > limit:
            raise UserError(
                str(self._path), f"holds more than {limit:,} {what}", remedy="profile fewer steps"
            )
