"""Medians of runs as machines really scatter them, in the order in which they ran.

Written apart from the package and its constants: nothing of Paceline is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
Draw = np.random.Generator
BASE_S = 0.2183
RUNS_A_DAY = 4
"""Runs of one day, where days differ."""


@dataclass(frozen=True)
class RunNoise:
    """One kind of scatter from run to run; its logarithms, one a run in time order."""

    name: str
    logs: Callable[[Draw, int], Values]
    digits: int | None = None
    """Significant digits of the medians; None does not round them."""

    def medians_s(self, rng: Draw, candidate: npt.NDArray[np.bool_], change: float) -> Values:
        """Seconds of each run; those of the candidate are truly slower by `change`."""
        logs = self.logs(rng, len(candidate)) + np.log1p(change) * candidate
        values = BASE_S * np.exp(logs)
        if self.digits is None:
            return values
        return np.array([float(f"{value:.{self.digits}g}") for value in values])


def in_turns(n: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the candidate's among 2 n runs, in the order A B, B A, A B, ..."""
    return np.array([(at + pair) % 2 == 1 for pair in range(n) for at in (0, 1)])


def in_a_row(n: int) -> npt.NDArray[np.bool_]:
    """All of A before all of B."""
    return np.arange(2 * n) >= n


def _normal(deviation: float) -> Callable[[Draw, int], Values]:
    return lambda rng, n: rng.normal(0, deviation, n)


def _fat_tails(rng: Draw, n: int) -> Values:
    return 0.004 * rng.standard_t(3, n) / 3**0.5


def _disturbance(rng: Draw, n: int) -> Values:
    """A tenth of the runs is 2 to 10% slower."""
    return rng.normal(0, 0.004, n) + (rng.random(n) < 0.1) * rng.uniform(0.02, 0.1, n)


def _correlation(rho: float) -> Callable[[Draw, int], Values]:
    def logs(rng: Draw, n: int) -> Values:
        values = rng.normal(0, 0.004, n)
        for at in range(1, n):
            values[at] = rho * values[at - 1] + (1 - rho**2) ** 0.5 * values[at]
        return values

    return logs


def _days(between: float, within: float) -> Callable[[Draw, int], Values]:
    def logs(rng: Draw, n: int) -> Values:
        days = rng.normal(0, between, -(-n // RUNS_A_DAY))
        return rng.normal(0, within, n) + np.repeat(days, RUNS_A_DAY)[:n]

    return logs


def _drift(rng: Draw, n: int) -> Values:
    """A machine that gets 1 to 2% slower, or faster, in the time of ten runs."""
    change = rng.choice([-1, 1]) * rng.uniform(0.01, 0.02)
    return rng.normal(0, 0.003, n) + change * np.arange(n) / 10


def _two_places(rng: Draw, n: int) -> Values:
    """Return placement noise of memory or processes: a third of the runs is 1.2% slower."""
    return rng.normal(0, 0.002, n) + 0.012 * (rng.random(n) < 1 / 3)


def _two_states(rng: Draw, n: int) -> Values:
    """Three of ten runs are 2% slower, independently of each other."""
    return rng.normal(0, 0.002, n) + 0.02 * (rng.random(n) < 0.3)


NORMAL_08 = RunNoise("normal 0.8%", _normal(0.008))
NORMAL_15 = RunNoise("normal 1.5%", _normal(0.015))
NORMAL_3 = RunNoise("normal 3%", _normal(0.03))
RUN_NOISES: tuple[RunNoise, ...] = (
    RunNoise("normal 0.4%", _normal(0.004)),
    NORMAL_08,
    NORMAL_15,
    RunNoise("fat tails", _fat_tails),
    RunNoise("10% of runs disturbed", _disturbance),
    RunNoise("correlation 0.3", _correlation(0.3)),
    RunNoise("correlation 0.8", _correlation(0.8)),
    RunNoise("days differ by 0.5%", _days(0.005, 0.003)),
    RunNoise("days differ by 1%", _days(0.01, 0.003)),
    RunNoise("two independent states", _two_states),
    RunNoise("drift of 1-2% in ten runs", _drift),
    RunNoise("two places", _two_places),
    RunNoise("medians of three digits", _normal(0.004), digits=3),
)
USUAL = "normal 0.4%"
"""The kind of which docs/dev/evidence/statistics.md promises its power."""
