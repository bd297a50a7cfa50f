"""A step of one case with its pipeline followed pass by pass, where arrays of cases have a closed form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np

from paceline.core.layout import Schedule
from paceline.core.pipeline import stage_sizes
from paceline.estimate.model.case import Cases
from paceline.estimate.model.schedule import pipeline_s
from paceline.estimate.model.step import StepTime, pieces, step_time

MOST_PASSES = 400_000
"""Of all ranks in a step; beyond it, a second of work, the closed form stands."""


def followed_step(x: Cases, c: Mapping[str, float]) -> StepTime:
    """Seconds of a step by part, of one case.

    Stages are as long as their layers, the last one's head and what every chunk passes on make
    them. The bubble is what the slowest rank waits: the whole pipeline less its own work.
    """
    closed = step_time(x, c)
    if x.size != 1 or x.pp[0] <= 1:
        return closed
    total = _pipeline_s(x, c)
    if total is None:
        return closed
    work = pieces(x, c)
    waits = np.maximum(0.0, total - work.num_microbatches * (work.slowest + work.passed))
    return step_time(x, c, bubble=waits / x.crowding)


def _pipeline_s(x: Cases, c: Mapping[str, float]) -> float | None:
    """Seconds until the last rank is done; None where no schedule of passes fits the case."""
    work = pieces(x, c)
    pp, vp, m = int(x.pp[0]), max(1, int(x.vp[0])), int(work.num_microbatches[0])
    if 2 * pp * vp * m > MOST_PASSES:
        return None
    beside = (float(work.passed[0]) + float(work.beside[0])) / vp
    seconds = np.array(_sizes(int(x.layers[0]), pp, vp)) * float(work.layer[0]) + beside
    seconds[-1] += float(work.head[0])
    forward = seconds / float(_passes(x))
    try:
        return pipeline_s(
            forward.tolist(), (seconds - forward).tolist(), m, _schedule(x, vp), vp
        ).total_s
    except ValueError:
        return None


def _passes(x: Cases) -> float:
    """Forward passes that a whole one is worth: backward counts two, or one of frozen weights."""
    return float(2 + (x.frozen[0] == 0) + x.full_recompute[0])


def _schedule(x: Cases, vp: int) -> Schedule:
    chosen = cast(Schedule, str(x.words["schedule"][0]))
    return "interleaved" if vp > 1 and chosen == "1f1b" else chosen


def _sizes(layers: int, pp: int, vp: int) -> list[int]:
    """Layers of each chunk; the first ones have one more where nothing comes out even."""
    try:
        return stage_sizes(layers, pp, vp)
    except ValueError:
        each, rest = divmod(layers, pp * vp)
        return [each + (i < rest) for i in range(pp * vp)]
