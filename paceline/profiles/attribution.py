"""From a timeline to breakdowns: every moment of a step gets exactly one category."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from paceline.profiles.breakdown import AxisTime, Breakdown
from paceline.profiles.kernels import KINDS
from paceline.profiles.profile import Hot
from paceline.profiles.timeline import (
    NONE,
    Intervals,
    StepSpan,
    Timeline,
    intersect,
    joined,
    length_s,
    subtract,
    union,
    within,
)

PIPELINE = "pp"
QUICK = 0.1
"""The share of a pipeline's messages that is taken to have waited for nobody."""


def breakdowns(timeline: Timeline) -> tuple[Breakdown, ...]:
    """One of every step, in order.

    Computation comes first, then exposed communication (axis by axis, the pipeline's last), then
    waiting for data; what is left is `host_gap`. So the parts add up to the step.
    """
    late = _late(dict(timeline.axes()).get(PIPELINE, NONE))
    return tuple(_breakdown(timeline, step, late) for step in timeline.steps)


def _breakdown(timeline: Timeline, step: StepSpan, late: Intervals) -> Breakdown:
    def during(spans: Intervals) -> Intervals:
        return union(within(spans, step.begin_s, step.end_s))

    seconds: dict[str, float] = {"bubble": 0.0}
    computing = NONE
    for kind in KINDS:
        spans = during(timeline.labelled(kind))
        seconds[kind] = length_s(subtract(spans, computing))
        computing = joined(computing, spans)
    taken, axes = computing, dict[str, AxisTime]()
    for axis, recorded in sorted(timeline.axes(), key=lambda each: (each[0] == PIPELINE, each[0])):
        spans = during(recorded)
        exposed_s = length_s(subtract(spans, taken))
        if axis == PIPELINE:
            seconds["bubble"] = length_s(subtract(during(late), taken))
            exposed_s = max(exposed_s - seconds["bubble"], 0.0)
        hidden_s = length_s(intersect(spans, computing))
        if exposed_s or hidden_s:
            axes[axis] = AxisTime(exposed_s=exposed_s, overlapped_s=hidden_s)
        taken = joined(taken, spans)
    waiting = subtract(during(timeline.data_wait), taken)
    whole_s = step.end_s - step.begin_s
    return Breakdown(
        rank=timeline.rank,
        step=step.number,
        step_time_s=whole_s,
        communication=axes,
        data_wait=length_s(waiting),
        host_gap=max(whole_s - length_s(joined(taken, waiting)), 0.0),
        **seconds,
    )


def _late(messages: Intervals) -> Intervals:
    """The begin of each message between stages, beyond what one takes that nobody is late for.

    One rank's trace cannot tell waiting from sending: of its messages a tenth (QUICK) are taken to
    have found the other side ready, and no message to need longer than these.
    """
    if not len(messages):
        return NONE
    quick_s = np.quantile(messages[:, 1] - messages[:, 0], QUICK)
    ends = np.maximum(messages[:, 1] - quick_s, messages[:, 0])
    return np.stack([messages[:, 0], ends], axis=1)


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
