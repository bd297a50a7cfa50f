"""Step times that keep to no one level: two of them in turns, or none at all.

Levels are told apart by the split of the sorted times with the largest variance between its parts
(Otsu, IEEE Trans. SMC 9, 1979): w0 w1 (m1 - m0)^2, with shares w and means m.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.core.steps import FloatColumn
from paceline.core.units import trimmed

FEWEST_STEPS = 20
"""Below these, chance makes two levels of one."""
LEAST_SHARE = 0.25
"""Of the rarer level; what is rarer is a spike, which leaves the median alone."""
LEAST_EXPLAINED = 0.95
"""Share of the variance between the levels; halves of one normal level explain 0.64."""
LEAST_DISTANCE = 0.05
"""Of the levels, over the lower one."""
MOST_SAMPLED = 5000


@dataclass(frozen=True)
class TwoLevels:
    """The mean times of two levels in seconds, and which share of the steps keeps to the upper."""

    low_s: float
    high_s: float
    high_share: float


def two_levels(times: FloatColumn, resolution_s: float = 0.0) -> TwoLevels | None:
    """The two levels that step times (seconds) jump between, or None where there are not two.

    Levels one printed step (`resolution_s`) apart are one level that was rounded.
    """
    if len(times) < FEWEST_STEPS:
        return None
    values = np.sort(_sample(times))
    n, shares = len(values), np.arange(1, len(values)) / len(values)
    sums = np.cumsum(values)
    low, high = sums[:-1] / np.arange(1, n), (sums[-1] - sums[:-1]) / np.arange(n - 1, 0, -1)
    between = np.where(
        np.minimum(shares, 1 - shares) >= LEAST_SHARE, shares * (1 - shares) * (high - low) ** 2, 0
    )
    at = int(np.argmax(between))
    distance = high[at] - low[at]
    apart = distance > max(LEAST_DISTANCE * low[at], 1.5 * resolution_s)
    if not apart or between[at] < LEAST_EXPLAINED * np.var(values):
        return None
    return TwoLevels(float(low[at]), float(high[at]), float(1 - shares[at]))


def uneven_warning(times: FloatColumn) -> str:
    """What is to be said of figures from step times (seconds) of an uneven window."""
    mean = f"the figures are those of the mean step, {trimmed(float(np.mean(times)))} s"
    levels = two_levels(times)
    if levels is None:
        return f"uneven-steps: no five steps in a row keep to one level; {mean}"
    low, high = (f"about {trimmed(level_s)} s" for level_s in (levels.low_s, levels.high_s))
    return (
        f"bimodal-steps: {1 - levels.high_share:.0%} of the steps take {low} "
        f"and {levels.high_share:.0%} {high}; {mean}"
    )


def _sample(times: FloatColumn) -> FloatColumn:
    """At most 5,000 of the times, picked at random: a regular choice may follow their period."""
    if len(times) <= MOST_SAMPLED:
        return times
    return times[np.random.default_rng(0).integers(0, len(times), MOST_SAMPLED)]
