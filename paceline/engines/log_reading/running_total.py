"""Step times from totals that a log carries along: seconds, or tokens, since the run began."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from paceline.core.steps import FloatColumn, IntColumn

__all__ = ["RunningTotals"]


class RunningTotals:
    """What the steps between two lines took, a step: the differences of one or more totals."""

    def __init__(self, num_totals: int = 1) -> None:
        self._index = 0
        self._totals = np.zeros(num_totals)
        self._begun = False
        self.distance = 1
        """Steps between the last two lines."""

    def rates(
        self, index: IntColumn, totals: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.bool_], list[FloatColumn]]:
        """Which lines are of a new step, and of those what one step added to each row of `totals`.

        (T_i - T_i-1) / (n_i - n_i-1), n the step numbers. NaN where a total is not larger than
        before, for then a clock was set back or a run began again. The first line has what came
        before it only where it is step 1; a line of the same step as the one before is left out.
        """
        before = np.concatenate([[self._index], index[:-1]])
        new = index != before
        new[0] |= not self._begun
        index, totals = index[new], totals[:, new]
        if not len(index):
            return new, [np.zeros(0) for _ in totals]
        numbers = np.concatenate([[self._index], index]).astype(np.float64)
        values = np.concatenate([self._totals[:, None], totals], axis=1)
        steps, added = np.diff(numbers), _differences(values)
        unknown = (steps <= 0) | ~(added > 0)
        if not self._begun and index[0] != 1:
            unknown[:, 0] = True
        self.distance = max(1, int(min(steps[-1], 1e9)))
        self._index, self._totals, self._begun = int(index[-1]), totals[:, -1].copy(), True
        per_step = np.where(unknown, math.nan, added) / np.where(steps > 0, steps, 1.0)
        return new, list(per_step)


def _differences(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Differences along each row, NaN beside what is no finite number."""
    return np.diff(np.where(np.isfinite(values), values, math.nan), axis=1)
