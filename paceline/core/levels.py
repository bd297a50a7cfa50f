"""Step times without a single level: bimodal, or without any stable level.

The two levels are separated at the split of the sorted times that maximizes the variance between
both parts (Otsu, IEEE Trans. SMC 9, 1979): w0 w1 (m1 - m0)^2, with shares w and means m.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.core.steps import FloatColumn
from paceline.core.units import compact

MIN_STEPS = 20
"""Minimum number of steps. With fewer, one level often looks like two by chance."""
MIN_SHARE = 0.25
"""Minimum share of the rarer level. Rarer values are spikes, which do not affect the median."""
MIN_EXPLAINED_VARIANCE = 0.95
"""Minimum share of the variance between the levels. Splitting one normal distribution explains
0.64."""
MIN_DISTANCE = 0.05
"""Minimum distance between the levels, relative to the lower one."""
MAX_SAMPLE = 5000


@dataclass(frozen=True)
class TwoLevels:
    """Mean times of two levels in seconds, and the share of steps at the upper level."""

    low_s: float
    high_s: float
    high_share: float


def two_levels(times: FloatColumn, resolution_s: float = 0.0) -> TwoLevels | None:
    """Return the two levels of bimodal step times (seconds); None if the times are not bimodal.

    Levels that differ by one printed digit (`resolution_s`) are one level that was rounded.
    """
    if len(times) < MIN_STEPS:
        return None
    values = np.sort(_sample(times))
    n, shares = len(values), np.arange(1, len(values)) / len(values)
    sums = np.cumsum(values)
    low, high = sums[:-1] / np.arange(1, n), (sums[-1] - sums[:-1]) / np.arange(n - 1, 0, -1)
    between = np.where(
        np.minimum(shares, 1 - shares) >= MIN_SHARE, shares * (1 - shares) * (high - low) ** 2, 0
    )
    at = int(np.argmax(between))
    distance = high[at] - low[at]
    is_separated = distance > max(MIN_DISTANCE * low[at], 1.5 * resolution_s)
    if not is_separated or between[at] < MIN_EXPLAINED_VARIANCE * np.var(values):
        return None
    return TwoLevels(float(low[at]), float(high[at]), float(1 - shares[at]))


def uneven_warning(times: FloatColumn) -> str:
    """Return the warning for figures from an uneven window with these step times (seconds)."""
    mean = f"the figures are those of the mean step, {compact(float(np.mean(times)))} s"
    levels = two_levels(times)
    if levels is None:
        return f"uneven-steps: no five steps in a row are on one level; {mean}"
    low, high = (f"about {compact(level_s)} s" for level_s in (levels.low_s, levels.high_s))
    return (
        f"bimodal-steps: {1 - levels.high_share:.0%} of the steps take {low} "
        f"and {levels.high_share:.0%} {high}; {mean}"
    )


def _sample(times: FloatColumn) -> FloatColumn:
    """Return at most 5,000 random times.

    A regular selection could alias with a period of the steps.
    """
    if len(times) <= MAX_SAMPLE:
        return times
    return times[np.random.default_rng(0).integers(0, len(times), MAX_SAMPLE)]
