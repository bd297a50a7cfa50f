"""Interim analysis of pairs of runs: a decision, a stop for futility, or more pairs.

Testing a growing series repeatedly finds a difference by chance far more often than one test at the
end. Each interim analysis therefore has its own level, smaller than the error of all together: the
error is spent over the analyses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import e, log, log1p
from typing import Any, Literal

import numpy as np

from paceline.compare.significance import (
    MARGIN,
    NO_SPREAD,
    Change,
    bounded_exp,
    normal_cdf,
    student_t,
)
from paceline.core.steps import FloatColumn

GRID = 201
"""Number of grid points for the density of the sum; four times as many change no level by 1%."""
BISECTIONS = 40
LARGEST_Z = 8.0


def analysis_points(num_pairs: int) -> tuple[int, ...]:
    """Return the numbers of pairs with an interim analysis: 3 to 6, even numbers, and the last.

    Each analysis costs a little of the error, and later pairs change the result less.
    """
    looks = [n for n in range(3, num_pairs + 1) if n <= 6 or n % 2 == 0]
    return tuple(dict.fromkeys([*looks, num_pairs]))


def error_spent(error: float, fraction: float) -> float:
    """Return the part of `error` that is spent when `fraction` of all pairs is made.

    The spending function is alpha log(1 + (e - 1) t), which approximates Pocock's equal levels.
    Source: Lan and DeMets, "Discrete sequential boundaries for clinical trials", Biometrika 70
    (1983).
    """
    return error * log(1 + (e - 1) * min(1.0, max(0.0, fraction)))


@cache
def nominal_levels(looks: tuple[int, ...], error: float) -> tuple[float, ...]:
    """Return the two-sided level of each interim analysis, so that all together have `error`.

    The levels hold for a normal sum S_n = Z sqrt(n) without drift. Its density within the bounds of
    the earlier analyses is propagated by convolution. Each bound is set so that the probability of
    crossing it is the error spent since the previous analysis. Source: Armitage, McPherson and
    Rowe, J. R. Statist. Soc. A 132 (1969) 235.
    """
    levels: list[float] = []
    sums, weights = np.zeros(1), np.ones(1)
    for at, n in enumerate(looks):
        before = looks[at - 1] if at else 0
        due = error_spent(error, n / looks[-1]) - (
            error_spent(error, before / looks[-1]) if at else 0.0
        )
        step = (n - before) ** 0.5
        bound = _bound(sums, weights, step, n, due)
        levels.append(2 * float(_special().ndtr(-bound)))
        grid = np.linspace(-1, 1, GRID) * bound * n**0.5
        density = np.exp(-(((grid[:, None] - sums) / step) ** 2) / 2) @ weights
        area = np.full(GRID, grid[1] - grid[0])
        area[[0, -1]] /= 2
        sums, weights = grid, density * area / (step * (2 * np.pi) ** 0.5)
    return tuple(levels)


def _bound(sums: FloatColumn, weights: FloatColumn, step: float, n: int, due: float) -> float:
    """Return the two-sided z that is exceeded with probability `due` after n pairs."""
    low, high = 0.0, LARGEST_Z
    for _ in range(BISECTIONS):
        z = (low + high) / 2
        reach = z * n**0.5
        tails = _special().ndtr((sums - reach) / step) + _special().ndtr((-reach - sums) / step)
        low, high = (z, high) if float(tails @ weights) > due else (low, z)
    return (low + high) / 2


def _special() -> Any:
    # Imported by name, because it has no type declarations; only this comparison needs it.
    return import_module("scipy.special")


MIN_PAIRS = 3
"""Number of pairs at the first interim analysis of every plan."""
ERROR = 0.05
"""Largest share of comparisons of identical sides that find a difference at some interim analysis,
and of sides that differ by the margin that are called the same."""
SPENT_ERROR = 0.04
"""Error that the analyses spend to keep ERROR. The levels are those of a normal sum, and the tests
are Student's t: at 1.5 to 3% variation, spending 0.05 gives 5.5 to 6.3%."""
MIN_PAIRS_FOR_SAME = 5
"""Minimum number of pairs to conclude that the sides are the same, or to stop for futility."""
MIN_CHANCE = 0.1
"""Probability of a decision at the last interim analysis below which a series is stopped."""

Conclusion = Literal["higher", "lower", "same", "continue", "futile", "undecided"]
"""Conclusion on the candidate's value. `continue` requests further pairs; `undecided` means that
all pairs are measured."""


@dataclass(frozen=True)
class Design:
    """Settings that must be fixed before the first interim analysis."""

    max_pairs: int = 16
    margin: float = MARGIN
    resolution: float = 0.0
    """Largest relative rounding error of the figures."""

    @property
    def limit(self) -> float:
        """Logarithm of the smallest ratio that matters."""
        return log1p(self.margin) + log1p(self.resolution)

    def levels(self, num_pairs: int) -> tuple[float, float]:
        """Return the two-sided levels after `num_pairs` pairs, which must be a count of the plan.

        The first is the level of the test for a difference, the second that of the equivalence
        test.
        """
        looks = analysis_points(self.max_pairs)
        at = looks.index(num_pairs)
        # Two one-sided tests at level a each are equivalent to a two-sided interval at level 2a.
        difference_level, equivalence_level = (
            nominal_levels(looks, error)[at] for error in (SPENT_ERROR, 2 * SPENT_ERROR)
        )
        return difference_level, equivalence_level


@dataclass(frozen=True)
class PairsAnalysis:
    """Result of one interim analysis. Ratios are candidate over baseline."""

    num_pairs: int
    conclusion: Conclusion
    ratio: float
    low: float
    """Lower end of the interval that, over all interim analyses together, contains the true ratio
    in 95% of series."""
    high: float
    """Upper end of the interval."""
    level: float
    """Share of the error that this interim analysis may spend."""

    @property
    def change(self) -> Change:
        """The conclusion in the terms of a plain comparison."""
        match self.conclusion:
            case "higher" | "lower" | "same":
                return self.conclusion
            case _:
                return "undecided"

    @property
    def largest(self) -> float:
        """The largest difference that is still possible, as a fraction of the baseline."""
        return max(1 - self.low, self.high - 1)


def analyze_at(
    baseline: Sequence[float], candidate: Sequence[float], design: Design
) -> PairsAnalysis:
    """Analyse pairs of positive values; their number must be one of the plan.

    d = log(candidate / baseline) of each pair cancels what both runs of a pair share (day,
    temperature, other jobs). Its mean is tested by Student's t at the level of this interim
    analysis. Different: the interval excludes rounding, and the mean is beyond the margin. The
    same: the interval lies within the margin. The t-test uses the levels of the normal sum: the
    significance level approach of Jennison and Turnbull, "Group Sequential Methods" (2000), section
    4.4.
    """
    logs = np.log(np.asarray(candidate, dtype=np.float64)) - np.log(
        np.asarray(baseline, dtype=np.float64)
    )
    n, mean = len(logs), float(logs.mean())
    deviation = max(float(logs.std(ddof=1)), NO_SPREAD)
    difference_level, equivalence_level = design.levels(n)
    wide, narrow = (
        student_t(1 - level / 2, n - 1) * deviation / n**0.5
        for level in (difference_level, equivalence_level)
    )
    conclusion: Conclusion = "undecided" if n >= design.max_pairs else "continue"
    if abs(mean) > design.limit and abs(mean) - wide > log1p(design.resolution):
        conclusion = "higher" if mean > 0 else "lower"
    elif n >= MIN_PAIRS_FOR_SAME and abs(mean) + narrow < design.limit:
        conclusion = "same"
    elif conclusion == "continue" and n >= MIN_PAIRS_FOR_SAME:
        chance = chance_at_the_end(mean, deviation, n, design)
        conclusion = "futile" if chance < MIN_CHANCE else conclusion
    low, high = bounded_exp(mean - wide), bounded_exp(mean + wide)
    return PairsAnalysis(n, conclusion, bounded_exp(mean), low, high, difference_level)


def chance_at_the_end(mean: float, deviation: float, num_pairs: int, design: Design) -> float:
    """Return the probability of a decision at the last interim analysis.

    It is the largest over three true differences: the observed mean and one standard error to
    either side. The last mean is normal around (n mean + (N - n) truth) / N with the standard
    deviation s sqrt(N - n) / N.
    """
    max_pairs, error = design.max_pairs, deviation / num_pairs**0.5
    difference_level, equivalence_level = design.levels(max_pairs)
    wide, narrow = (
        student_t(1 - level / 2, max_pairs - 1) * deviation / max_pairs**0.5
        for level in (difference_level, equivalence_level)
    )
    beyond, inside = max(design.limit, log1p(design.resolution) + wide), design.limit - narrow
    spread = deviation * (max_pairs - num_pairs) ** 0.5 / max_pairs
    chances: list[float] = []
    for truth in (mean - error, mean, mean + error):
        centre = (num_pairs * mean + (max_pairs - num_pairs) * truth) / max_pairs
        difference_chance = normal_cdf((centre - beyond) / spread) + normal_cdf(
            (-beyond - centre) / spread
        )
        equivalence_chance = (
            normal_cdf((inside - centre) / spread) - normal_cdf((-inside - centre) / spread)
            if inside > 0
            else 0.0
        )
        chances.append(difference_chance + equivalence_chance)
    return max(chances)


def analyze_pairs(
    baseline: Sequence[float], candidate: Sequence[float], design: Design
) -> list[PairsAnalysis]:
    """Return every interim analysis of the plan up to the available pairs.

    Numbers of pairs that are not in the plan are not analysed, because they have no share of the
    error.
    """
    looks = [look for look in analysis_points(design.max_pairs) if look <= len(baseline)]
    return [analyze_at(baseline[:look], candidate[:look], design) for look in looks]
