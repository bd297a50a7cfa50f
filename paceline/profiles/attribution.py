"""From a timeline to breakdowns: every moment of a step gets exactly one category."""

from __future__ import annotations

import numpy as np

from paceline.profiles.breakdown import AxisTime, Breakdown
from paceline.profiles.intervals import (
    NONE,
    Intervals,
    intersect,
    joined,
    length_s,
    subtract,
    union,
    within,
)
from paceline.profiles.kernels import KINDS
from paceline.profiles.timeline import StepSpan, Timeline

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
