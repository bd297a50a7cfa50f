"""The steady-state window: which steps a figure may be taken from.

Warm-up ends at the first step that lies, with at least 4 of the 5 from it on, within a band around
the median of the second half. The half-width is the largest of three scaled MADs, the log's
resolution and 0.1 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from paceline.core.result import WindowRecord
from paceline.core.stats import NORMAL_MAD, group_medians
from paceline.core.steps import FloatColumn, Steps

RUN_LENGTH = 5
RUN_WITHIN = 4
MIN_STEADY = 5
MIN_RELATIVE_HALF_WIDTH = 0.001
DRIFT_LIMIT = 0.01
"""A relative change over the window beyond this is called drifting."""


@dataclass(frozen=True)
class Window:
    """The picked rows of a step table, and the record that travels with every figure."""

    rows: npt.NDArray[np.int64]
    record: WindowRecord


def steady_window(steps: Steps, resolution_s: float = 0.0) -> Window:
    """The steady window of the longest stretch with one global batch and one sequence length.

    `resolution_s` is the step of the log's printed times. Steps without a time are left out.
    """
    stretch = _one_batch_size(steps)
    times = steps["step_time_s"][stretch]
    if len(times) == 0:
        return Window(stretch, _record(steps, stretch, 0, "none", None, None))
    half_width = band_half_width(times, resolution_s)
    warmup = warmup_steps(times, half_width)
    if warmup is None or len(times) - warmup < MIN_STEADY:
        start = warmup or 0
        record = _record(steps, stretch[start:], start, "short", half_width, None)
        return Window(stretch[start:], record)
    rows = stretch[warmup:]
    drift, noise = relative_drift(times[warmup:])
    state = "drifting" if abs(drift) > max(DRIFT_LIMIT, 3 * noise) else "steady"
    return Window(rows, _record(steps, rows, warmup, state, half_width, drift))


def band_half_width(times: FloatColumn, resolution_s: float = 0.0) -> float:
    """Half-width of the steady band in seconds, from the second half of the steps."""
    half = times[len(times) // 2 :]
    centre = float(np.median(half))
    mad = float(np.median(np.abs(half - centre)))
    return max(3 * NORMAL_MAD * mad, resolution_s, MIN_RELATIVE_HALF_WIDTH * centre)


def warmup_steps(times: FloatColumn, half_width: float) -> int | None:
    """Steps before the first in the band with 4 of the 5 from it on; None if there is none."""
    centre = float(np.median(times[len(times) // 2 :]))
    inside = np.abs(times - centre) <= half_width
    for start in range(len(times) - RUN_LENGTH + 1):
        if inside[start] and inside[start : start + RUN_LENGTH].sum() >= RUN_WITHIN:
            return start
    return None


def relative_drift(times: FloatColumn) -> tuple[float, float]:
    """Change of the step time over the window relative to its median, and that figure's own noise.

    The change is the Theil-Sen slope times the window's length. Its standard error is that of a
    least-squares slope, sigma sqrt(12 / n), with sigma from the MAD of what the line leaves.
    """
    thinned = group_medians(times, 500)
    first, second = np.triu_indices(len(thinned), 1)
    slope = float(np.median((thinned[second] - thinned[first]) / (second - first)))
    centre = float(np.median(thinned))
    rest = thinned - slope * np.arange(len(thinned))
    sigma = NORMAL_MAD * float(np.median(np.abs(rest - np.median(rest)))) / centre
    return slope * (len(thinned) - 1) / centre, sigma * (12 / len(thinned)) ** 0.5


def _one_batch_size(steps: Steps) -> npt.NDArray[np.int64]:
    """Rows of the longest stretch without a change of global batch or sequence length."""
    timed = np.flatnonzero(np.isfinite(steps["step_time_s"]))
    if len(timed) == 0:
        return timed
    sizes = np.stack([steps["global_batch"][timed], steps["seq_len"][timed]])
    change = (np.diff(np.nan_to_num(sizes, nan=-1.0), axis=1) != 0).any(axis=0)
    stretches = np.split(timed, np.flatnonzero(change) + 1)
    return max(reversed(stretches), key=len)


def _record(
    steps: Steps,
    rows: npt.NDArray[np.int64],
    n_warmup: int,
    state: Literal["steady", "short", "drifting", "none"],
    half_width_s: float | None,
    drift: float | None,
) -> WindowRecord:
    return WindowRecord(
        rule="auto",
        first_step=int(steps.index[rows[0]]) if len(rows) else None,
        last_step=int(steps.index[rows[-1]]) if len(rows) else None,
        n=len(rows),
        n_warmup=n_warmup,
        state=state,
        half_width_s=half_width_s,
        drift=drift,
        global_batch=_only(steps["global_batch"][rows]),
        seq_len=_only(steps["seq_len"][rows]),
    )


def _only(column: FloatColumn) -> int | None:
    return int(column[0]) if len(column) and np.isfinite(column[0]) else None
