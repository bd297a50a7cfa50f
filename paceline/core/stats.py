"""Robust statistics of step times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.core.steps import FloatColumn

NORMAL_MAD = 1.4826
"""MAD x 1.4826 estimates the standard deviation of a normal distribution."""

BOOTSTRAP_BLOCK = 5
"""Steps per block: neighbouring steps are correlated, so single steps must not be resampled."""

BOOTSTRAP_RESAMPLES = 2000


@dataclass(frozen=True)
class Summary:
    """Location and spread of n values, in their unit."""

    n: int
    median: float
    mean: float
    mad: float
    p05: float
    p95: float
    low: float | None
    high: float | None

    @property
    def relative_spread(self) -> float:
        """1.4826 x MAD / median: a robust coefficient of variation."""
        return NORMAL_MAD * self.mad / self.median if self.median else 0.0

    @property
    def jitter_tax(self) -> float:
        """Mean / median - 1: what spikes cost beyond the steady step."""
        return self.mean / self.median - 1 if self.median else 0.0


def summarize(values: FloatColumn, seed: int = 0) -> Summary:
    """Summary of at least one finite value, with a within-run interval from 2 blocks on."""
    median = float(np.median(values))
    interval = median_interval(values, seed)
    return Summary(
        n=len(values),
        median=median,
        mean=float(np.mean(values)),
        mad=float(np.median(np.abs(values - median))),
        p05=float(np.quantile(values, 0.05)),
        p95=float(np.quantile(values, 0.95)),
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
    )


def median_interval(values: FloatColumn, seed: int = 0) -> tuple[float, float] | None:
    """95 % interval of the median by moving-block bootstrap (Kuensch 1989), None below 2 blocks.

    It says how well this run's steps determine this run's median. It does not cover the
    run-to-run change of the machine; only repeats do.
    """
    n = len(values)
    if n < 2 * BOOTSTRAP_BLOCK:
        return None
    rng = np.random.default_rng(seed)
    num_blocks = -(-n // BOOTSTRAP_BLOCK)
    medians = np.empty(BOOTSTRAP_RESAMPLES)
    for row in range(BOOTSTRAP_RESAMPLES):
        starts = rng.integers(0, n - BOOTSTRAP_BLOCK + 1, size=num_blocks)
        picks = (starts[:, None] + np.arange(BOOTSTRAP_BLOCK)).ravel()[:n]
        medians[row] = np.median(values[picks])
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(low), float(high)
