"""Attribution of step time: every moment of a step gets exactly one category."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from paceline.profiles.breakdown import AxisTime, Breakdown
from paceline.profiles.kernels import KINDS
from paceline.profiles.profile import Hot
from paceline.profiles.timeline import (
    NO_INTERVALS,
    Intervals,
    StepSpan,
    Timeline,
    intersect,
    length_s,
    subtract,
    union,
    union_all,
    within,
)

PIPELINE = "pp"
READY_SHARE = 0.1
"""Quantile of a pipeline's message durations that is taken as the duration without waiting."""


def breakdowns(timeline: Timeline) -> tuple[Breakdown, ...]:
    """Return the breakdown of every step, in order.

    Computation comes first, then exposed communication (axis by axis, the pipeline last), then
    waiting for data. The rest is `host_gap`, so the parts add up to the step.
    """
    late = _late_arrivals(dict(timeline.axes()).get(PIPELINE, NO_INTERVALS))
    return tuple(_breakdown(timeline, step, late) for step in timeline.steps)


def _breakdown(timeline: Timeline, step: StepSpan, late: Intervals) -> Breakdown:
    def during(spans: Intervals) -> Intervals:
        return union(within(spans, step.begin_s, step.end_s))

    seconds: dict[str, float] = {"bubble": 0.0}
    computing = NO_INTERVALS
    for kind in KINDS:
        spans = during(timeline.with_label(kind))
        seconds[kind] = length_s(subtract(spans, computing))
        computing = union_all(computing, spans)
    busy, axes = computing, dict[str, AxisTime]()
    for axis, activities in sorted(
        timeline.axes(), key=lambda each: (each[0] == PIPELINE, each[0])
    ):
        spans = during(activities)
        exposed_s = length_s(subtract(spans, busy))
        if axis == PIPELINE:
            seconds["bubble"] = length_s(subtract(during(late), busy))
            exposed_s = max(exposed_s - seconds["bubble"], 0.0)
        overlapped_s = length_s(intersect(spans, computing))
        if exposed_s or overlapped_s:
            axes[axis] = AxisTime(exposed_s=exposed_s, overlapped_s=overlapped_s)
        busy = union_all(busy, spans)
    waiting = subtract(during(timeline.data_wait), busy)
    step_s = step.end_s - step.begin_s
    return Breakdown(
        rank=timeline.rank,
        step=step.number,
        step_time_s=step_s,
        communication=axes,
        data_wait=length_s(waiting),
        host_gap=max(step_s - length_s(union_all(busy, waiting)), 0.0),
        **seconds,
    )


def _late_arrivals(messages: Intervals) -> Intervals:
    """Return the part of each message between stages in which the rank waits for another stage.

    One rank's trace does not separate waiting from sending. The READY_SHARE quantile of all message
    durations is taken as the time to send; anything longer is waiting.
    """
    if not len(messages):
        return NO_INTERVALS
    quick_s = np.quantile(messages[:, 1] - messages[:, 0], READY_SHARE)
    ends = np.maximum(messages[:, 1] - quick_s, messages[:, 0])
    return np.stack([messages[:, 0], ends], axis=1)


MAX_KERNELS = 30
"""Maximum number of kernels in a profile."""
HOST = "(nothing runs on the device)"
HOST_LABEL = "host_gap"
CLOCK_RESOLUTION_S = 1e-9
"""Resolution of the clocks in traces."""

_Totals = dict[tuple[str, str], tuple[int, float]]


def top_kernels(timelines: Sequence[Timeline]) -> tuple[Hot, ...]:
    """Return the longest kernels or operations of all steps together, at most MAX_KERNELS."""
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
    return _longest(totals, timelines)


def critical_path(timelines: Sequence[Timeline]) -> tuple[Hot, ...]:
    """Return the longest activities on the critical path of the steps of each rank.

    The path runs backwards from the end of a step: the activity that ended last among those that
    had started, then the same from its start. Each moment counts once; gaps belong to the host.
    Each rank is analysed by itself; a collective's wait for another rank is not followed.
    """
    totals: _Totals = defaultdict(lambda: (0, 0.0))
    for timeline in timelines:
        order = np.argsort(timeline.spans[:, 0], kind="stable")
        begins, ends = timeline.spans[order].T
        latest = np.maximum.accumulate(ends) if len(ends) else ends
        holder = np.maximum.accumulate(np.where(ends >= latest, np.arange(len(ends)), 0))
        for step in timeline.steps:
            time_s = step.end_s
            while time_s > step.begin_s:
                at = int(np.searchsorted(begins, time_s - CLOCK_RESOLUTION_S)) - 1
                end = max(float(latest[at]), step.begin_s) if at >= 0 else step.begin_s
                if time_s - end > CLOCK_RESOLUTION_S:
                    _add(totals, HOST, HOST_LABEL, 1, time_s - end)
                if end <= step.begin_s:
                    break
                row = order[holder[at]]
                begin = max(float(timeline.spans[row, 0]), step.begin_s)
                name = timeline.names[timeline.name_of[row]]
                label = timeline.labels[timeline.label_of[row]]
                _add(totals, name, label, 1, min(time_s, end) - begin)
                time_s = begin
    return _longest(totals, timelines)


def _add(totals: _Totals, name: str, label: str, n: int, seconds: float) -> None:
    before = totals[name, label]
    totals[name, label] = before[0] + int(n), before[1] + float(seconds)


def _longest(totals: _Totals, timelines: Iterable[Timeline]) -> tuple[Hot, ...]:
    steps = [step for timeline in timelines for step in timeline.steps]
    whole_s = sum(step.end_s - step.begin_s for step in steps)
    longest = sorted(totals.items(), key=lambda item: -item[1][1])[:MAX_KERNELS]
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
