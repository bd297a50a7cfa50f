"""Bayesian search over layouts: try one after the other until no better one is expected."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor
from statistics import median
from typing import Literal

import numpy as np

from paceline.core.errors import UserError
from paceline.core.result import Status
from paceline.core.units import pluralize
from paceline.estimate.estimates import MAX_P_OOM_TO_RUN
from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.fit.interval import slopes
from paceline.estimate.fit.posterior import predict
from paceline.estimate.fit.refit import prior_of, refit
from paceline.estimate.model.case import Bools, Cases, Floats
from paceline.layouts.search.decision import (
    SearchState,
    StopReason,
    decide,
    fastest_row,
    promising_rows,
)
from paceline.layouts.search.memory import needs_at_least_memory_of, p_oom_after_runs
from paceline.layouts.search.residuals import LayoutPrior, Posterior, features, posterior_after
from paceline.layouts.tune.candidates import Candidates

_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*")
UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
RUNS = ("trials", "trial", "runs", "run")
ALLOWED = "a time as in 600s, 10m, 1.5h, or a number as in `20 trials`"
MAX_RUNS = 10_000


@dataclass(frozen=True)
class Budget:
    """Budget of a search: a number of runs or seconds; exactly one is set."""

    runs: int | None = None
    seconds: float | None = None

    def runs_left(self, took_s: list[float], complete_s: list[float] | None = None) -> int:
        """Return the number of runs left, assuming the median duration of the runs so far.

        `took_s` has the seconds of all runs, `complete_s` those of runs with a figure, because runs
        that fail early do not predict the duration of complete ones.
        """
        if self.runs is not None:
            return max(0, self.runs - len(took_s))
        seconds_left = (self.seconds or 0.0) - sum(took_s)
        if not took_s:
            return 1 if seconds_left > 0 else 0
        return max(0, floor(seconds_left / max(median(complete_s or took_s), 1e-3)))

    def __str__(self) -> str:
        return pluralize(self.runs, "trial") if self.runs is not None else f"{self.seconds:g} s"


def parse_budget(text: str) -> Budget:
    """Parse a budget such as `10m` or `20 trials`; raise UserError for any other text."""
    match = _TEXT.fullmatch(text.lower())
    number, unit = (float(match[1]), match[2]) if match else (0.0, "")
    if unit in UNITS and number > 0:
        return Budget(seconds=number * UNITS[unit])
    if unit in RUNS and number >= 1 and number.is_integer() and number <= MAX_RUNS:
        return Budget(runs=int(number))
    raise UserError(f"--budget {text}", "is not a budget", allowed=ALLOWED)


TITLE = "step times of this search"
GROWTH = 1.3
"""Growth of the number of runs after which the coefficients are refitted."""


@dataclass
class Learner:
    """Turns the runs so far into a posterior over all layouts."""

    candidates: Candidates
    refitted_evidence: Evidence | None = None
    """Coefficients refitted to the runs; None before the first run or without a time model."""
    _refitted_rows: int = 0
    _features: Floats = field(init=False)
    _root: Floats = field(init=False)
    """Square root of the coefficients' prior covariance."""

    def __post_init__(self) -> None:
        self._features = features(self.candidates.layouts)
        values, vectors = np.linalg.eigh(prior_of(self.candidates.evidence).covariance)
        self._root = vectors * np.sqrt(np.maximum(values, 0.0))

    def belief(self, measured: Mapping[int, Sequence[float]]) -> Posterior:
        """Return the posterior after runs, given as step times by row of the layout."""
        pairs = [(row, seconds) for row, runs in measured.items() for seconds in runs]
        rows, seconds = [row for row, _ in pairs], np.array([s for _, s in pairs], dtype=float)
        return posterior_after(self._prior(rows, seconds), rows, np.log(seconds))

    def _prior(self, rows: list[int], seconds: Floats) -> LayoutPrior:
        """Linearise the time model at the refitted coefficients.

        Around the refitted coefficients r, ln t = ln t(r) + J (c - r), where J is the Jacobian of
        ln t. The mean uses the prior coefficients c, so that runs are not counted twice.
        """
        x, size = self.candidates.x, len(self.candidates.layouts)
        if x is None:
            middle = float(np.log(seconds).mean()) if len(seconds) else 0.0
            return LayoutPrior(self._features, np.full(size, middle), np.zeros((size, 1)))
        before = prior_of(self.candidates.evidence).centre
        now = self._centre(x, rows, seconds) if rows else before
        slope = slopes(x, now)
        log_predicted = np.log(predict(x, now)) + slope @ (before - now)
        return LayoutPrior(self._features, log_predicted, slope @ self._root)

    def _centre(self, x: Cases, rows: list[int], seconds: Floats) -> Floats:
        """Return coefficients refitted to most runs; the linearisation accounts for the others."""
        if self.refitted_evidence is None or len(rows) >= GROWTH * self._refitted_rows:
            self.refitted_evidence = refit(
                self.candidates.evidence, x.pick(np.array(rows)), seconds, TITLE
            )
            self._refitted_rows = len(rows)
        return self.refitted_evidence.fit().centre


Stop = StopReason | Literal["interrupted", "not started"]


@dataclass(frozen=True)
class TrialOutcome:
    """Outcome of one run of a layout."""

    status: Status | Literal["refused"]
    step_time_s: float | None
    """None if the run has no figure."""
    took_s: float
    """Duration of the run in seconds."""
    reason: str | None = None


@dataclass
class TriedLayout:
    """One layout with its runs."""

    row: int
    expected: Posterior
    """Posterior over all layouts before the first run of this one."""
    outcomes: list[TrialOutcome] = field(default_factory=list[TrialOutcome])

    @property
    def seconds(self) -> list[float]:
        """Step times of the runs that have one."""
        return [run.step_time_s for run in self.outcomes if run.step_time_s is not None]

    @property
    def memory_is_known(self) -> bool:
        """True if its last run showed whether the memory suffices."""
        return self.outcomes[-1].status in ("ok", "oom", "nan")


@dataclass
class Search:
    """State of a search: the tried layouts in order, and the current posterior."""

    candidates: Candidates
    learner: Learner
    initial_belief: Posterior
    """Posterior before any run."""
    belief: Posterior
    tried_layouts: dict[int, TriedLayout] = field(default_factory=dict[int, TriedLayout])
    stop: Stop = "not started"

    @property
    def measured(self) -> dict[int, list[float]]:
        """Step times by row, for layouts that have any."""
        return {
            row: layout_runs.seconds
            for row, layout_runs in self.tried_layouts.items()
            if layout_runs.seconds
        }

    @property
    def took_s(self) -> list[float]:
        """Seconds of every run; refused layouts have none."""
        return [
            run.took_s
            for layout_runs in self.tried_layouts.values()
            for run in layout_runs.outcomes
            if run.status != "refused"
        ]

    @property
    def is_dominated(self) -> Bools:
        """True for layouts that need at least the memory of one that ran out of memory."""
        layouts, memory_bytes = self.candidates.layouts, self.candidates.memory_bytes
        result = np.zeros(len(layouts), dtype=bool)
        for layout_runs in self.tried_layouts.values():
            if layout_runs.outcomes[-1].status == "oom":
                less = layouts[layout_runs.row]
                more = np.array([needs_at_least_memory_of(layout, less) for layout in layouts])
                result |= more & (memory_bytes >= memory_bytes[layout_runs.row])
        return result

    @property
    def p_oom(self) -> Floats:
        """Probability of each layout to run out of memory, given the runs so far."""
        ran_out = {
            row: layout_runs.outcomes[-1].status == "oom"
            for row, layout_runs in self.tried_layouts.items()
            if layout_runs.memory_is_known
        }
        every = self.candidates
        return p_oom_after_runs(every.memory_bytes, every.limit_bytes, ran_out, every.p_oom)

    @property
    def surely_out(self) -> Bools:
        """True for layouts that fit by the estimate but not according to the runs so far."""
        return self.candidates.likely_to_fit & (self.is_dominated | (self.p_oom > MAX_P_OOM_TO_RUN))

    @property
    def is_open(self) -> Bools:
        """True for layouts that may be tried."""
        is_untried = np.array(
            [row not in self.tried_layouts for row in range(len(self.candidates.layouts))]
        )
        return is_untried & self.candidates.likely_to_fit & ~self.surely_out

    @property
    def best(self) -> int | None:
        """Row of the fastest layout so far."""
        return fastest_row(self.measured)

    def runs_left(self, budget: Budget) -> int:
        """Return the number of runs left in the budget."""
        complete_s = [
            run.took_s
            for layout_runs in self.tried_layouts.values()
            for run in layout_runs.outcomes
            if run.step_time_s
        ]
        return budget.runs_left(self.took_s, complete_s)

    def state(self, budget: Budget) -> SearchState:
        """Return the inputs of the next decision."""
        return SearchState(
            self.belief,
            self.measured,
            self.is_open,
            self.p_oom,
            {row: len(layout_runs.outcomes) for row, layout_runs in self.tried_layouts.items()},
            self.runs_left(budget),
        )

    @property
    def is_promising(self) -> Bools:
        """True for layouts that may still be faster than the best."""
        return promising_rows(self.state(Budget(runs=0)))

    def note(self, row: int, outcome: TrialOutcome) -> None:
        """Record the outcome of a run."""
        self.tried_layouts.setdefault(row, TriedLayout(row, self.belief)).outcomes.append(outcome)
        if outcome.step_time_s is not None:
            self.belief = self.learner.belief(self.measured)


Measure = Callable[[int], TrialOutcome]
"""Runs the layout of a row once; KeyboardInterrupt ends the search."""


def start_search(
    candidates: Candidates, learner: Learner, runs: Sequence[tuple[int, TrialOutcome]] = ()
) -> Search:
    """Return a search with earlier runs, given in order as (row, outcome)."""
    belief = learner.belief({})
    search = Search(candidates, learner, belief, belief)
    for row, outcome in runs:
        search.note(row, outcome)
    return search


def resume_search(search: Search, measure: Measure, budget: Budget) -> None:
    """Try layouts until none can be better than the best, or the budget is used up.

    The recipe's own layout runs first, so that the gain over it is known.
    """
    try:
        while True:
            row = _next(search, budget)
            if row is None:
                return
            search.note(row, measure(row))
    except KeyboardInterrupt:
        search.stop = "interrupted"


def _next(search: Search, budget: Budget) -> int | None:
    """Return the row to run next; at the end None, with the reason in `search.stop`."""
    first = search.candidates.recipe_row
    if first is not None and search.is_open[first] and search.runs_left(budget) > 0:
        return first
    move = decide(search.state(budget))
    if move.why not in ("try", "again"):
        search.stop = move.why
    return move.row
