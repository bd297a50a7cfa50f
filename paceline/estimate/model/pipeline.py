"""Steps whose pipelines are followed pass by pass, instead of by a closed form.

The closed form of step.py takes all stages but the slowest for one pass each. Stages may differ by
a layer or by the head; then it matters which rank waits for which, and following every pass tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np

from paceline.core.layout import Schedule
from paceline.core.pipeline import stage_sizes
from paceline.estimate.model.block import passes_again
from paceline.estimate.model.case import Cases, Floats
from paceline.estimate.model.schedule import pipeline_s
from paceline.estimate.model.step import Pieces, StepTime, closed_bubble, pieces, step_of

MOST_PASSES = 400_000
"""Of all ranks in a step; beyond it, a second of work, the closed form stands."""


def followed_step(x: Cases, c: Mapping[str, float]) -> StepTime:
    """Seconds of a step by part.

    Stages are as long as their layers, the last one's head and what every chunk passes on make
    them. The bubble is what the slowest rank waits: the whole pipeline less its own work.
    """
    work = pieces(x, c)
    whole = _pipelines_s(x, work)
    busy = work.num_microbatches * (work.slowest + work.passed)
    waits = np.maximum(0.0, whole - busy) / x.crowding
    return step_of(x, c, work, np.where(np.isnan(whole), closed_bubble(x, work), waits))


def _pipelines_s(x: Cases, work: Pieces) -> Floats:
    """Seconds until the last rank of each pipeline is done; nan where none can be followed."""
    seconds = np.full(x.size, np.nan)
    for row in np.flatnonzero(x.pp > 1).tolist():
        seconds[row] = _pipeline_s(x, work, row)
    return seconds


def _pipeline_s(x: Cases, work: Pieces, row: int) -> float:
    """Of one case; nan for too many passes, and where no schedule of passes fits."""
    pp, vp, m = int(x.pp[row]), max(1, int(x.vp[row])), int(work.num_microbatches[row])
    if 2 * pp * vp * m > MOST_PASSES:
        return np.nan
    beside = (work.passed[row] + work.beside[row]) / vp
    seconds = np.array(_sizes(int(x.layers[row]), pp, vp)) * work.layer[row] + beside
    seconds[-1] += work.head[row]
    # Forward is one pass; backward two, or one where weights are frozen, and recomputes one more.
    again = float(passes_again(x)[row])
    forward = seconds / (2 + (x.frozen[row] == 0) + again)
    chosen = cast(Schedule, str(x.words["schedule"][row]))
    order: Schedule = "interleaved" if vp > 1 and chosen == "1f1b" else chosen
    try:
        return pipeline_s(forward.tolist(), (seconds - forward).tolist(), m, order, vp).total_s
    except ValueError:
        return np.nan


def _sizes(layers: int, pp: int, vp: int) -> list[int]:
    """Layers of each chunk; the first ones have one more where nothing comes out even."""
    try:
        return stage_sizes(layers, pp, vp)
    except ValueError:
        each, rest = divmod(layers, pp * vp)
        return [each + (i < rest) for i in range(pp * vp)]
