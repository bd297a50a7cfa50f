"""Run-to-run variation of one machine, estimated from its history."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.core.units import pluralize
from paceline.core.value import NonNegativeInt, Value

MIN_OCCASIONS = 5
"""Minimum number of occasions (days) for an estimate of the variation between them."""


class RunVariation(Value):
    """Relative standard deviations of the step time of one configuration on one machine."""

    within: float
    """Standard deviation between runs of one occasion (a day)."""
    between: float
    """Standard deviation between occasions, beyond that of their runs; the total if no occasion has
    two runs."""
    degrees: float
    """Degrees of freedom of the larger part."""
    n_runs: NonNegativeInt
    n_occasions: NonNegativeInt

    @property
    def single(self) -> float:
        """Standard deviation of one run on any occasion."""
        return (self.within**2 + self.between**2) ** 0.5

    @property
    def words(self) -> str:
        """The variation and its source, for people."""
        return (
            f"{100 * self.single:.2g}% from run to run, by {pluralize(self.n_runs, 'run')} of "
            f"{pluralize(self.n_occasions, 'day')} in this machine's history"
        )


def estimate_run_variation(
    occasions: Sequence[Sequence[float]], levels: Sequence[float], num_levels: int = 1
) -> RunVariation | None:
    """Estimate the variation of runs around the level of their occasion.

    Returns None with fewer than five occasions. One-way analysis of variance of r = log(value /
    level): within^2 = sum (r - mean_k)^2 / (N - K), between^2 = (sum n_k mean_k^2 / (K - levels) -
    within^2) / n0, n0 = (N - sum n_k^2 / N) / (K - 1), not below 0. Outliers are not clipped, so a
    machine that disturbs its runs gets a wide estimate.
    """
    residuals = [
        np.log(values) - np.log(level) for values, level in zip(occasions, levels, strict=True)
    ]
    n, k = sum(map(len, residuals)), len(residuals)
    if k - num_levels < MIN_OCCASIONS - 1:
        return None
    sizes = np.array([len(residual) for residual in residuals])
    means = np.array([float(residual.mean()) for residual in residuals])
    within = sum(float(((residual - residual.mean()) ** 2).sum()) for residual in residuals) / max(
        1, n - k
    )
    typical = (n - float((sizes**2).sum()) / n) / (k - 1)
    above = float((sizes * means**2).sum()) / (k - num_levels)
    return RunVariation(
        within=within**0.5,
        between=max(0.0, (above - within) / typical) ** 0.5,
        degrees=float(k - num_levels),
        n_runs=n,
        n_occasions=k,
    )
