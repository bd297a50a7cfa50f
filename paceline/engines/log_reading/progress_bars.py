"""Step times from the moving average that a tqdm progress bar prints.

tqdm averages over its updates k = 1, 2, ... with a = 0.3: D_k = a dt_k + (1 - a) D_k-1 and the same
of the steps, N_k, and prints D_k / N_k. With one step an update N_k = 1 - (1 - a)^k, so each dt_k
follows from two prints that stand one after the other. Rounding grows by (2 - a) / a. Between bars
that lie further apart the mean step follows from the whole seconds that the bar shows.
"""

from __future__ import annotations

import math

SMOOTHING = 0.3
"""a: tqdm's default weight of the newest update."""

KEPT = 1 - SMOOTHING
PRINTED_UNIT = 0.01
"""Both `s/it` and `it/s` have two decimals."""

ROUNDING_GROWTH = (1 + KEPT) / SMOOTHING
"""(2 - a) / a: the printed unit times this is the unit of a step time."""

FEWEST_SECONDS = 10
"""Between two bars, that a mean step is told from whole seconds."""

MOST_UPDATES = 1000
"""From then on the average has long forgotten how it began."""


class BarTimes:
    """The step times of one bar, as it is drawn again and again."""

    def __init__(self) -> None:
        self._count: int | None = None
        self._weight = self._time_s = 0.0
        self._elapsed_s = math.nan
        self.resolution_s = 0.0
        """What one unit of the last printed digit makes of a step time."""
        self.are_sparse = False
        """True when bars are so rare that the last time follows from whole seconds."""

    def step_time_s(self, count: int, rate: bytes, unit: bytes, elapsed: bytes = b"") -> float:
        """Seconds of step `count` when the bar shows `rate` behind it; NaN where none follow.

        The first bar of a count is the one that counts: one that is drawn again tells nothing new.
        """
        if count == self._count:
            return math.nan
        # The first steps of a run are longer than the others: they are no step time.
        before, before_s = count if self._count is None else self._count, self._elapsed_s
        self._elapsed_s = _elapsed_s(elapsed)
        time_s = self._from_average(count, rate, unit)
        seconds, steps = self._elapsed_s - before_s, count - before
        self.are_sparse = not time_s > 0 and steps > 1 and seconds >= FEWEST_SECONDS
        if self.are_sparse:
            self.resolution_s = 1 / steps
            return seconds / steps
        return time_s

    def _from_average(self, count: int, rate: bytes, unit: bytes) -> float:
        """Seconds of step `count` by the moving average; NaN where the step before is not shown."""
        average = _seconds(rate, unit)
        follows = self._count is not None and count == self._count + 1 and self._weight > 0
        previous_s = self._time_s
        self._count = count
        self._weight = SMOOTHING + KEPT * self._weight if follows else _weight_after(count)
        self._time_s = average * self._weight
        if not average > 0:
            self._weight = 0.0
            return math.nan
        if unit == b"s/it":
            self.resolution_s = PRINTED_UNIT * ROUNDING_GROWTH
        else:
            self.resolution_s = PRINTED_UNIT * average * average * ROUNDING_GROWTH
        if count == 1:
            return average
        time_s = (self._time_s - KEPT * previous_s) / SMOOTHING
        return time_s if follows and time_s > 0 else math.nan


def _weight_after(count: int) -> float:
    """N_k of a bar that was drawn anew for each of `count` steps."""
    return 1 - KEPT ** min(max(count, 1), MOST_UPDATES)


def _elapsed_s(text: bytes) -> float:
    """Seconds of `01:50` or `9:07:58`; NaN of anything else."""
    parts = text.split(b":")
    if not 2 <= len(parts) <= 3 or not all(part.isdigit() and len(part) < 7 for part in parts):
        return math.nan
    seconds = 0
    for part in parts:
        seconds = 60 * seconds + int(part)
    return float(seconds)


def _seconds(rate: bytes, unit: bytes) -> float:
    """Seconds a step; NaN where the bar does not know it yet."""
    try:
        value = float(rate)
    except ValueError:
        return math.nan
    if not 0 < value < 1e9:
        return math.nan
    return value if unit == b"s/it" else 1 / value
