"""Error spending: the level of each interim analysis of a growing series.

Testing a growing series repeatedly finds a difference by chance far more often than one test at the
end. Each interim analysis therefore has its own level, smaller than the error of all together.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from math import e, log
from typing import Any

import numpy as np

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
