"""Series of run medians with known truth: noise alone, one step, a drift."""

from __future__ import annotations

import numpy as np

from paceline.compare.over_time.step_changes import SeriesFit
from paceline.core.steps import FloatColumn

NOISE = 0.004
"""Relative standard deviation from run to run."""


def noise(n: int, seed: int, spread: float = NOISE) -> FloatColumn:
    """n run medians around 0.2 s that differ by chance alone."""
    return 0.2 * np.exp(np.random.default_rng(seed).normal(0, spread, n))


def lasting_noise(
    n: int, seed: int, spread: float = NOISE, correlation: float = 0.5
) -> FloatColumn:
    """As `noise`, but part of each run's deviation lasts until the next."""
    rest = np.random.default_rng(seed).normal(0, 1, n)
    for at in range(1, n):
        rest[at] = correlation * rest[at - 1] + (1 - correlation**2) ** 0.5 * rest[at]
    return 0.2 * np.exp(spread * rest)


def stepped(n_before: int, n_after: int, ratio: float, seed: int = 0) -> FloatColumn:
    """A series that is slower by `ratio` from one run on."""
    return noise(n_before + n_after, seed) * np.repeat([1, ratio], [n_before, n_after])


def drifting(n: int, ratio: float, seed: int) -> FloatColumn:
    """A series whose last run is slower by `ratio` than its first."""
    return noise(n, seed) * np.exp(np.linspace(0, np.log(ratio), n))


def found_at(fit: SeriesFit, at: int) -> bool:
    """Whether one step is found, and at that run or a neighbour."""
    return len(fit.changes) == 1 and abs(fit.changes[0].at - at) <= 1
