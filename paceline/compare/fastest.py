"""Probability that the option with the fastest runs is the fastest of several options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.compare.significance import NO_SPREAD

DRAWS = 20_000
"""Number of Monte Carlo draws. A probability of 0.5 is known to 0.004, one of 0.95 to 0.002."""
MIN_CHANCE = 0.05
"""Options with at least this probability of being faster than the best count as tied with it."""


@dataclass(frozen=True)
class RankedOption:
    """One option in the ranking of all options."""

    chance: float
    """Probability that it is the fastest of all, 0 to 1."""
    faster_than_best: float
    """Probability that it is faster than the option with the fastest measured runs."""


def rank_options(seconds: Sequence[Sequence[float]], best: int) -> tuple[RankedOption, ...] | None:
    """Rank options by the times of their runs, or return None when no option ran twice.

    The model: the runs of all options have the same variation (standard deviation sigma of the
    logarithm). With the pooled variance s^2 with nu degrees of freedom and an uninformative prior,
    sigma^2 is distributed as nu s^2 / chi^2_nu. The true log time of an option is normal around the
    mean of its n runs, with standard deviation sigma / sqrt n. The probabilities are frequencies
    over 20,000 seeded draws of both.

    Variation that the runs did not sample (other days, other nodes) is not included. Source: Gelman
    et al., Bayesian Data Analysis (2013), section 3.2.
    """
    logs = [np.log(np.asarray(runs, dtype=np.float64)) for runs in seconds]
    counts = np.array([len(runs) for runs in logs])
    degrees = int((counts - 1).sum())
    if degrees < 1:
        return None
    squares = sum(float(((runs - runs.mean()) ** 2).sum()) for runs in logs)
    rng = np.random.default_rng(0)
    sigma = np.sqrt(np.maximum(squares, NO_SPREAD**2) / rng.chisquare(degrees, DRAWS))
    means = np.array([runs.mean() for runs in logs])
    leader, fastest = _draw(rng, means[best], sigma, counts[best]), np.full(DRAWS, np.inf)
    winner, beats = np.full(DRAWS, -1), np.zeros(len(logs))
    for at, (mean, count) in enumerate(zip(means, counts, strict=True)):
        times = leader if at == best else _draw(rng, mean, sigma, count)
        beats[at] = np.mean(times < leader)
        winner = np.where(times < fastest, at, winner)
        fastest = np.minimum(times, fastest)
    return tuple(
        RankedOption(float(np.mean(winner == at)), float(beats[at])) for at in range(len(logs))
    )


def _draw(
    rng: np.random.Generator,
    mean: float,
    sigma: np.ndarray[tuple[int], np.dtype[np.float64]],
    count: int,
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return mean + rng.standard_normal(DRAWS) * sigma / count**0.5
