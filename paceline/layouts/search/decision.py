"""Decide the next step of a search: try a layout, repeat one, or stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import erf, log
from statistics import median
from typing import Literal

import numpy as np

from paceline.estimate.model.case import Bools, Floats
from paceline.layouts.search.residuals import Posterior

MAX_RUNS_PER_LAYOUT = 3
"""Maximum runs of one layout when several are close."""
MAX_CLOSE_LAYOUTS = 3
"""Maximum number of close layouts that are repeated."""
CLOSE_SD = 2.0
"""Standard deviations within which two layouts count as equally fast."""
OPTIMISTIC_SD = 2.0
"""Standard deviations below the mean that count as optimistic, the lower end of the 95% interval.

Many layouts stay untried, so an 80% interval would miss the best one too often.
"""
REPEAT_SHARE = 5
"""One run in five is reserved for repeats."""

StepTimesByRow = Mapping[int, Sequence[float]]
"""Step times in seconds of each measured layout, by its row."""
StopReason = Literal["bound", "budget", "exhausted"]


@dataclass(frozen=True)
class Move:
    """The next action: run the layout of `row`, or stop if it is None."""

    row: int | None
    why: StopReason | Literal["try", "again"]


@dataclass(frozen=True)
class SearchState:
    """Inputs of a decision."""

    belief: Posterior
    measured: StepTimesByRow
    open: Bools
    """True for layouts that have no run yet and may be tried."""
    p_oom: Floats
    runs: Mapping[int, int]
    """Number of runs of every tried layout, including runs without a figure."""
    runs_left: int


def decide(state: SearchState) -> Move:
    """Return the next action.

    A layout is promising while the lower end of its 95% interval is faster than the best measured
    one. The promising layout with the largest expected improvement is tried. A fifth of the runs is
    reserved for repeats of layouts that are too close to rank.
    """
    promising = promising_rows(state)
    close = rows_to_repeat(state.measured, state.runs, state.belief.noise_sd)
    if state.runs_left <= 0 and (promising.any() or close):
        return Move(None, "budget")
    reserved_runs = (state.runs_left + sum(state.runs.values())) // REPEAT_SHARE if close else 0
    if promising.any() and state.runs_left > reserved_runs:
        return Move(_most_improving(state, promising), "try")
    if close:
        return Move(close[0], "again")
    if promising.any():
        return Move(_most_improving(state, promising), "try")
    return Move(None, "bound" if state.open.any() else "exhausted")


def promising_rows(state: SearchState) -> Bools:
    """Return the open layouts whose optimistic bound beats the best measured one."""
    best = fastest_row(state.measured)
    if best is None:
        return state.open
    optimistic = state.belief.mean - OPTIMISTIC_SD * state.belief.sd
    return state.open & (optimistic < log(median(state.measured[best])))


def fastest_row(measured: StepTimesByRow) -> int | None:
    """Return the row with the smallest median step time; None without measurements."""
    return min(measured, key=lambda row: median(measured[row]), default=None)


def rows_to_repeat(measured: StepTimesByRow, runs: Mapping[int, int], noise_sd: float) -> list[int]:
    """Return the best layout and those tied with it, fewest runs first; empty without ties."""
    best = fastest_row(measured)
    if best is None:
        return []
    close_rows = rows_close_to(best, measured, noise_sd)[: MAX_CLOSE_LAYOUTS - 1]
    too_few_runs = [row for row in (best, *close_rows) if runs[row] < MAX_RUNS_PER_LAYOUT]
    return sorted(too_few_runs, key=lambda row: runs[row]) if close_rows else []


def rows_close_to(best: int, measured: StepTimesByRow, noise_sd: float) -> list[int]:
    """Return other rows whose step times are within noise of the best, the fastest first."""

    def far(row: int) -> float:
        sd = noise_sd * (1 / len(measured[row]) + 1 / len(measured[best])) ** 0.5
        return log(median(measured[row]) / median(measured[best])) / sd

    return sorted((row for row in measured if row != best and far(row) <= CLOSE_SD), key=far)


def expected_improvement(mean: Floats, sd: Floats, best: float) -> Floats:
    """Return the expected improvement of ln seconds over `best`.

    For a normal posterior it is sd (z Phi(z) + phi(z)) with z = (best - mean) / sd, where Phi and
    phi are the distribution and density of the standard normal (Jones, Schonlau and Welch, Journal
    of Global Optimization 13, 1998, equation 15).
    """
    z = (best - mean) / sd
    cumulative = np.array([0.5 * (1 + erf(value / 2**0.5)) for value in z])
    density = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
    return sd * (z * cumulative + density)


def _most_improving(state: SearchState, among: Bools) -> int:
    """Return the row with the largest expected improvement, weighted by the chance that it fits.

    Before any measurement, return the one expected to be fastest.
    """
    best = fastest_row(state.measured)
    if best is None:
        # A run that fails teaches little: take the fastest that may fit, else the likeliest to fit.
        score = np.where(state.p_oom < 0.5, -state.belief.mean, -1e3 * state.p_oom)
    else:
        now = log(median(state.measured[best]))
        gain = expected_improvement(state.belief.mean, state.belief.sd, now)
        score = gain * (1 - state.p_oom)
    return int(np.argmax(np.where(among, score, -np.inf)))
