"""One look at pairs of runs: decided, not worth going on, or more pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log1p
from typing import Literal

import numpy as np

from paceline.compare.sequential.spending import looks_up_to, nominal_levels
from paceline.compare.significance import (
    MARGIN,
    NO_SPREAD,
    Change,
    bounded_exp,
    normal_cdf,
    student_t,
)

FEWEST_PAIRS = 3
"""At the first look of every plan."""
ERROR = 0.05
"""Of identical sides, so many are called different at some look."""
ERROR_SAME = 0.04
"""Of sides that differ by the margin, so many are called the same at some look; below ERROR,
because pairs that follow each other are not quite independent."""
FEWEST_FOR_SAME = 5
"""Pairs; what finds no difference, and what gives up, takes more than what finds one."""
MIN_CHANCE = 0.1
"""A series with less chance of a decision at its last look is given up."""

Answer = Literal["higher", "lower", "same", "goes on", "futile", "undecided"]
"""Of the candidate's value; `goes on` asks for further pairs, `undecided` has no more to ask."""


@dataclass(frozen=True)
class Design:
    """What must be settled before the first look."""

    most_pairs: int = 16
    margin: float = MARGIN
    resolution: float = 0.0
    """How far the figures may be rounded, relative."""

    @property
    def limit(self) -> float:
        """Logarithm of the smallest ratio that matters."""
        return log1p(self.margin) + log1p(self.resolution)

    def levels(self, num_pairs: int) -> tuple[float, float]:
        """The two-sided level of the look at so many pairs, one of the plan, to tell sides apart
        and to call them the same.
        """
        looks = looks_up_to(self.most_pairs)
        at = looks.index(num_pairs)
        # Two one-sided tests at an error each are a two-sided interval at twice as much.
        apart, alike = (nominal_levels(looks, error)[at] for error in (ERROR, 2 * ERROR_SAME))
        return apart, alike


@dataclass(frozen=True)
class PairsLook:
    """What the pairs say at one look; ratios of candidate over baseline."""

    num_pairs: int
    answer: Answer
    ratio: float
    low: float
    high: float
    """Interval of the ratio that, over all looks together, holds the truth in 95 % of series."""
    level: float
    """Error that this look may spend."""

    @property
    def change(self) -> Change:
        """The answer as of any comparison."""
        match self.answer:
            case "higher" | "lower" | "same":
                return self.answer
            case _:
                return "undecided"

    @property
    def largest(self) -> float:
        """The largest difference that is still possible, as a fraction of the baseline."""
        return max(1 - self.low, self.high - 1)


def look_at(baseline: Sequence[float], candidate: Sequence[float], design: Design) -> PairsLook:
    """The look at pairs of positive values, one of each side, as many as a look of the plan has.

    d = log(candidate / baseline) of each pair, so that what both runs of a pair share (day, heat,
    neighbours) is gone; its mean is tested by Student's t at the level that this look may spend.
    Different: the interval excludes rounding, and the mean is beyond the margin. The same: the
    interval lies inside the margin. The t has the normal sum's levels: the significance level
    approach of Jennison and Turnbull, "Group Sequential Methods" (2000), section 4.4.
    """
    logs = np.log(np.asarray(candidate, dtype=np.float64)) - np.log(
        np.asarray(baseline, dtype=np.float64)
    )
    n, mean = len(logs), float(logs.mean())
    deviation = max(float(logs.std(ddof=1)), NO_SPREAD)
    apart, alike = design.levels(n)
    wide, narrow = (
        student_t(1 - level / 2, n - 1) * deviation / n**0.5 for level in (apart, alike)
    )
    answer: Answer = "undecided" if n >= design.most_pairs else "goes on"
    if abs(mean) > design.limit and abs(mean) - wide > log1p(design.resolution):
        answer = "higher" if mean > 0 else "lower"
    elif n >= FEWEST_FOR_SAME and abs(mean) + narrow < design.limit:
        answer = "same"
    elif answer == "goes on" and n >= FEWEST_FOR_SAME:
        chance = chance_at_the_end(mean, deviation, n, design)
        answer = "futile" if chance < MIN_CHANCE else answer
    low, high = bounded_exp(mean - wide), bounded_exp(mean + wide)
    return PairsLook(n, answer, bounded_exp(mean), low, high, apart)


def chance_at_the_end(mean: float, deviation: float, num_pairs: int, design: Design) -> float:
    """Chance of a decision at the last look, for the likeliest true differences the largest.

    Tried are the observed mean and one standard error to either side. The last mean is normal
    around (n mean + (N - n) truth) / N with the deviation s sqrt(N - n) / N.
    """
    most, error = design.most_pairs, deviation / num_pairs**0.5
    apart, alike = design.levels(most)
    wide, narrow = (
        student_t(1 - level / 2, most - 1) * deviation / most**0.5 for level in (apart, alike)
    )
    beyond, inside = max(design.limit, log1p(design.resolution) + wide), design.limit - narrow
    spread = deviation * (most - num_pairs) ** 0.5 / most
    chances: list[float] = []
    for truth in (mean - error, mean, mean + error):
        centre = (num_pairs * mean + (most - num_pairs) * truth) / most
        apart_chance = normal_cdf((centre - beyond) / spread) + normal_cdf(
            (-beyond - centre) / spread
        )
        alike_chance = (
            normal_cdf((inside - centre) / spread) - normal_cdf((-inside - centre) / spread)
            if inside > 0
            else 0.0
        )
        chances.append(apart_chance + alike_chance)
    return max(chances)


def looks_along(
    baseline: Sequence[float], candidate: Sequence[float], design: Design
) -> list[PairsLook]:
    """Every look of the plan up to the pairs that there are.

    There are none at the pairs between: the error is spent at those of the plan.
    """
    looks = [look for look in looks_up_to(design.most_pairs) if look <= len(baseline)]
    return [look_at(baseline[:look], candidate[:look], design) for look in looks]
