"""Step times that settle late, or leave their level: what the band of the window does not show.

Both tests look at winsorized values (pulled in to four robust standard deviations, so that spikes
count little) and widen their errors for correlated neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.core.stats import NORMAL_MAD, group_medians, mad_around
from paceline.core.steps import FloatColumn

FEWEST_STEPS = 20
"""Below these, chance settles nothing."""
LEAST_SHIFT = 0.01
"""Of a level, over the other: what is smaller is no other machine."""
SHIFT_NOISES = 4.5
"""Standard errors that the best of all places of a shift must exceed; chance gives 3.2 at 5 %."""
TREND_NOISES = 2.0
"""Standard errors by which the begin of the window may be slower than its second half."""
SHORTEST_LEVEL = 5
LONGEST_LEVEL_SHARE = 50
"""A level is no shorter than five steps, nor than a fiftieth of them."""
REACH = 4.0
MOST_STEPS = 2000
"""Longer series are thinned to medians of equal consecutive groups."""
MOST_CORRELATED = 0.95


@dataclass(frozen=True)
class Shift:
    """From the step at place `at` on, steps take `ratio` times as long as before."""

    at: int
    ratio: float


def settling_steps(times: FloatColumn) -> tuple[int, bool]:
    """How many steps at the begin still belong to a fading warm-up, and whether it ends at all.

    As long as the first quarter is slower than the second half, by two standard errors, a tenth is
    left out; not below a third of the steps, nor below 20.
    """
    size, values = _thinned(times)
    least = max(FEWEST_STEPS, len(values) // 3)
    start = 0
    while True:
        rest = values[start:]
        if len(rest) < FEWEST_STEPS or not _still_fades(rest):
            return start * size, True
        step = max(1, len(rest) // 10)
        if len(rest) - step < least:
            return start * size, False
        start += step


def level_shift(times: FloatColumn) -> Shift | None:
    """The one place at which the level changes for good by more than 1 %, None without one.

    Of all places that which parts the variance best, |m2 - m1| / (s sqrt(1/k + 1/(n - k))), the
    scatter s around both levels; the levels are medians.
    """
    size, values = _thinned(times)
    n = len(values)
    if n < FEWEST_STEPS:
        return None
    least = max(SHORTEST_LEVEL, n // LONGEST_LEVEL_SHARE)
    y = winsorized(values)
    places = np.arange(1, n)
    sums = np.cumsum(y)
    means = sums[:-1] / places, (sums[-1] - sums[:-1]) / (n - places)
    weights = np.sqrt(places * (n - places) / n)
    parted = np.abs(means[1] - means[0]) * weights
    parted[: least - 1] = parted[n - least :] = 0.0
    at = int(np.argmax(parted)) + 1
    before, after = float(np.median(values[:at])), float(np.median(values[at:]))
    # Pulled in around either level, or what is left of a warm-up passes for correlated noise.
    residual = winsorized(np.concatenate([values[:at] - before, values[at:] - after]))
    error = float(np.std(residual)) * correlation_widening(residual)
    ratio = after / before
    if parted[at - 1] <= SHIFT_NOISES * error or abs(ratio - 1) <= LEAST_SHIFT:
        return None
    return Shift(at * size, ratio)


def winsorized(values: FloatColumn) -> FloatColumn:
    """`values` with outliers pulled in to four robust standard deviations from the median."""
    centre = float(np.median(values))
    reach = REACH * NORMAL_MAD * mad_around(values, centre)
    return np.clip(values, centre - reach, centre + reach) if reach > 0 else values


def correlation_widening(residual: FloatColumn, fitted: int = 1) -> float:
    """By how much correlated neighbours widen the error of a mean: sqrt((1 + rho) / (1 - rho)).

    rho is the lag-1 autocorrelation, 0 to 0.95, with what so few values take from it added again,
    (fitted + 3 rho) / n: for one fitted mean Kendall's (1 + 3 rho) / n (Biometrika 41 (1954) 403).
    """
    power = float((residual * residual).sum())
    if power <= 0:
        return 1.0
    rho = float((residual[1:] * residual[:-1]).sum()) / power
    if rho > 0:
        rho += (fitted + 3 * rho) / len(residual)
    rho = min(max(rho, 0.0), MOST_CORRELATED)
    return ((1 + rho) / (1 - rho)) ** 0.5


def _still_fades(values: FloatColumn) -> bool:
    y = winsorized(values)
    early, late = y[: len(y) // 4], y[len(y) // 2 :]
    residual = late - late.mean()
    error = float(np.std(residual, ddof=1)) * correlation_widening(residual)
    error *= (1 / len(early) + 1 / len(late)) ** 0.5
    return float(early.mean() - late.mean()) > TREND_NOISES * error


def _thinned(times: FloatColumn) -> tuple[int, FloatColumn]:
    """Steps of a group, and the medians of the groups."""
    size = -(-len(times) // MOST_STEPS)
    return size, group_medians(times, MOST_STEPS)
