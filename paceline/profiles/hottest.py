"""Which kernels take the time of a step, and which of them its end waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from paceline.profiles.profile import Hot
from paceline.profiles.timeline import Timeline

MOST = 30
"""Kernels that are told."""
HOST = "(nothing runs on the device)"
HOST_LABEL = "host_gap"
NEAR_S = 1e-9
"""Clocks of traces count nanoseconds."""

_Totals = dict[tuple[str, str], tuple[int, float]]


def top_kernels(timelines: Sequence[Timeline]) -> tuple[Hot, ...]:
    """The longest kernels or operations of all steps together, MOST at most."""
    totals: _Totals = defaultdict(lambda: (0, 0.0))
    for timeline in timelines:
        inside = np.zeros(len(timeline.spans), dtype=bool)
        for step in timeline.steps:
            begin = timeline.spans[:, 0]
            inside |= (begin >= step.begin_s) & (begin < step.end_s)
        pairs = timeline.name_of[inside] * len(timeline.labels) + timeline.label_of[inside]
        lengths = np.diff(timeline.spans[inside], axis=1)[:, 0]
        counts = np.bincount(pairs) if len(pairs) else np.zeros(0, dtype=int)
        sums = np.bincount(pairs, weights=lengths) if len(pairs) else np.zeros(0)
        for pair in np.flatnonzero(counts):
            name, label = divmod(int(pair), len(timeline.labels))
            _add(totals, timeline.names[name], timeline.labels[label], counts[pair], sums[pair])
    return _ranked(totals, timelines)


def critical_path(timelines: Sequence[Timeline]) -> tuple[Hot, ...]:
    """What the end of each step waited for, from the end to the begin: of what had begun before a
    moment, the activity that ended last; then the same of that one's begin.

    Each moment of the step counts once; where nothing runs it is the host's. Of one rank: for whom
    a collective waits is not followed.
    """
    totals: _Totals = defaultdict(lambda: (0, 0.0))
    for timeline in timelines:
        order = np.argsort(timeline.spans[:, 0], kind="stable")
        begins, ends = timeline.spans[order].T
        latest = np.maximum.accumulate(ends) if len(ends) else ends
        holder = np.maximum.accumulate(np.where(ends >= latest, np.arange(len(ends)), 0))
        for step in timeline.steps:
            moment = step.end_s
            while moment > step.begin_s:
                at = int(np.searchsorted(begins, moment - NEAR_S)) - 1
                end = max(float(latest[at]), step.begin_s) if at >= 0 else step.begin_s
                if moment - end > NEAR_S:
                    _add(totals, HOST, HOST_LABEL, 1, moment - end)
                if end <= step.begin_s:
                    break
                row = order[holder[at]]
                begin = max(float(timeline.spans[row, 0]), step.begin_s)
                name = timeline.names[timeline.name_of[row]]
                label = timeline.labels[timeline.label_of[row]]
                _add(totals, name, label, 1, min(moment, end) - begin)
                moment = begin
    return _ranked(totals, timelines)


def _add(totals: _Totals, name: str, label: str, n: int, seconds: float) -> None:
    before = totals[name, label]
    totals[name, label] = before[0] + int(n), before[1] + float(seconds)


def _ranked(totals: _Totals, timelines: Iterable[Timeline]) -> tuple[Hot, ...]:
    steps = [step for timeline in timelines for step in timeline.steps]
    whole_s = sum(step.end_s - step.begin_s for step in steps)
    longest = sorted(totals.items(), key=lambda item: -item[1][1])[:MOST]
    return tuple(
        Hot(
            name=name,
            label=label,
            n=round(n / len(steps)),
            seconds=seconds / len(steps),
            share=seconds / whole_s if whole_s else 0.0,
        )
        for (name, label), (n, seconds) in longest
    )
