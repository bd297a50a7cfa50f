"""What a rank did and when, whichever tool recorded it: what every reader makes of its files."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.profiles.intervals import NONE, Intervals

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
