"""What a search does next: try a layout, measure one again, or stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import erf, log
from statistics import median
from typing import Literal

import numpy as np

from paceline.estimate.model.case import Bools, Floats
from paceline.layouts.search.residuals import Posterior

MOST_RUNS = 3
"""Of one layout, where several are close."""
MOST_CLOSE = 3
"""Layouts that are measured again to tell them apart."""
CLOSE = 2.0
"""Deviations of a difference within which two layouts are not told apart."""
OPTIMISTIC = 2.0
"""Deviations below its expected time to which a layout may come, the end of its 95 % interval; many
stay untried, so 80 % of each is too few."""
KEPT_BACK = 5
"""One run in so many is kept for measuring again."""

Measured = Mapping[int, Sequence[float]]
"""Seconds of a step in each run of a layout that has a figure, by its row."""
Why = Literal["bound", "budget", "exhausted"]


@dataclass(frozen=True)
class Move:
    """Run a layout for the first time or again; without a row, stop."""

    row: int | None
    why: Why | Literal["try", "again"]


@dataclass(frozen=True)
class SearchState:
    """All that a decision rests on."""

    belief: Posterior
    measured: Measured
    open: Bools
    """Layouts that may be tried: no run yet, and no reason against one."""
    p_oom: Floats
    runs: Mapping[int, int]
    """Runs of every layout that was tried, those without a figure too."""
    runs_left: int


def decide(state: SearchState) -> Move:
    """The next move.

    A layout is worth a try while the optimistic end of its 95 % interval is faster than the best
    one measured; of those the one with the largest expected improvement is tried. A fifth of the
    runs is kept for layouts that are too close to be told apart.
    """
    hopeful = worth_trying(state)
    close = to_repeat(state.measured, state.runs, state.belief.noise_sd)
    if state.runs_left <= 0 and (hopeful.any() or close):
        return Move(None, "budget")
    kept_back = (state.runs_left + sum(state.runs.values())) // KEPT_BACK if close else 0
    if hopeful.any() and state.runs_left > kept_back:
        return Move(_most_improving(state, hopeful), "try")
    if close:
        return Move(close[0], "again")
    if hopeful.any():
        return Move(_most_improving(state, hopeful), "try")
    return Move(None, "bound" if state.open.any() else "exhausted")


def worth_trying(state: SearchState) -> Bools:
    """Open layouts whose optimistic bound beats the best measured."""
    best = best_of(state.measured)
    if best is None:
        return state.open
    optimistic = state.belief.mean - OPTIMISTIC * state.belief.sd
    return state.open & (optimistic < log(seconds_of(state.measured[best])))


def best_of(measured: Measured) -> int | None:
    """The row with the smallest time, None when nothing was measured."""
    return min(measured, key=lambda row: seconds_of(measured[row]), default=None)


def seconds_of(runs: Sequence[float]) -> float:
    """The time of a layout: the median of its runs."""
    return median(runs)


def to_repeat(measured: Measured, runs: Mapping[int, int], noise_sd: float) -> list[int]:
    """The best and what is level with it, the fewest runs first; empty where none is level."""
    best = best_of(measured)
    if best is None:
        return []
    alike = close_to(best, measured, noise_sd)[: MOST_CLOSE - 1]
    waiting = [row for row in (best, *alike) if runs[row] < MOST_RUNS]
    return sorted(waiting, key=lambda row: runs[row]) if alike else []


def close_to(best: int, measured: Measured, noise_sd: float) -> list[int]:
    """Other rows whose times lie within the noise of the best one's, the fastest first."""

    def far(row: int) -> float:
        sd = noise_sd * (1 / len(measured[row]) + 1 / len(measured[best])) ** 0.5
        return log(seconds_of(measured[row]) / seconds_of(measured[best])) / sd

    return sorted((row for row in measured if row != best and far(row) <= CLOSE), key=far)


def expected_improvement(mean: Floats, sd: Floats, best: float) -> Floats:
    """How far ln seconds are expected to fall below `best`, 0 where they do not.

    For a normal belief it is sd (z Phi(z) + phi(z)) with z = (best - mean) / sd, Phi and phi the
    distribution and the density of the standard normal (Jones, Schonlau and Welch, Journal of
    Global Optimization 13, 1998, equation 15).
    """
    z = (best - mean) / sd
    cumulative = np.array([0.5 * (1 + erf(value / 2**0.5)) for value in z])
    density = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
    return sd * (z * cumulative + density)


def _most_improving(state: SearchState, among: Bools) -> int:
    """By expected improvement where memory suffices; the fastest expected one before any figure."""
    best = best_of(state.measured)
    if best is None:
        # What will hardly run says nothing: the fastest that may fit, else the likeliest to fit.
        score = np.where(state.p_oom < 0.5, -state.belief.mean, -1e3 * state.p_oom)
    else:
        now = log(seconds_of(state.measured[best]))
        gain = expected_improvement(state.belief.mean, state.belief.sd, now)
        score = gain * (1 - state.p_oom)
    return int(np.argmax(np.where(among, score, -np.inf)))
