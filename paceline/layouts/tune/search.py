"""The search: tries layouts one after the other until nothing better is to be expected."""

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
from paceline.core.units import counted
from paceline.estimate.estimates import MAX_P_OOM_TO_RUN
from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.fit.interval import slopes
from paceline.estimate.fit.posterior import predict
from paceline.estimate.fit.refit import prior_of, refit
from paceline.estimate.model.case import Bools, Cases, Floats
from paceline.layouts.search.decision import SearchState, Why, best_of, decide, worth_trying
from paceline.layouts.search.memory import needs_as_much, odds_after
from paceline.layouts.search.residuals import LayoutPrior, Posterior, believe, features
from paceline.layouts.tune.candidates import Candidates

_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*")
UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
RUNS = ("trials", "trial", "runs", "run")
ALLOWED = "a time as in 600s, 10m, 1.5h, or a number as in `20 trials`"
MOST_RUNS = 10_000


@dataclass(frozen=True)
class Budget:
    """One of the two is given."""

    runs: int | None = None
    seconds: float | None = None

    def left(self, took_s: list[float], whole_s: list[float] | None = None) -> int:
        """Runs that there is still time for, as long as they take what runs took so far.

        `whole_s` are those of `took_s` that came to a figure: what fails soon says nothing of them.
        """
        if self.runs is not None:
            return max(0, self.runs - len(took_s))
        rest = (self.seconds or 0.0) - sum(took_s)
        if not took_s:
            return 1 if rest > 0 else 0
        return max(0, floor(rest / max(median(whole_s or took_s), 1e-3)))

    def __str__(self) -> str:
        return counted(self.runs, "trial") if self.runs is not None else f"{self.seconds:g} s"


def read_budget(text: str) -> Budget:
    """The budget in a text; raises UserError for what is none."""
    match = _TEXT.fullmatch(text.lower())
    number, unit = (float(match[1]), match[2]) if match else (0.0, "")
    if unit in UNITS and number > 0:
        return Budget(seconds=number * UNITS[unit])
    if unit in RUNS and number >= 1 and number.is_integer() and number <= MOST_RUNS:
        return Budget(runs=int(number))
    raise UserError(f"--budget {text}", "is no budget", allowed=ALLOWED)


TITLE = "step times of this tuning"
GROWTH = 1.3
"""Runs over those of the last refit from which coefficients are refitted."""


@dataclass
class Learner:
    """Turns the runs so far into a belief about all layouts."""

    candidates: Candidates
    refitted: Evidence | None = None
    """The coefficients after the last runs; None before any, and without a time model."""
    _refitted_rows: int = 0
    _features: Floats = field(init=False)
    _root: Floats = field(init=False)
    """A square root of the covariance that the coefficients have before any run."""

    def __post_init__(self) -> None:
        self._features = features(self.candidates.layouts)
        values, vectors = np.linalg.eigh(prior_of(self.candidates.evidence).covariance)
        self._root = vectors * np.sqrt(np.maximum(values, 0.0))

    def belief(self, measured: Mapping[int, Sequence[float]]) -> Posterior:
        """The belief after these runs, by the row of their layout."""
        pairs = [(row, seconds) for row, runs in measured.items() for seconds in runs]
        rows, seconds = [row for row, _ in pairs], np.array([s for _, s in pairs], dtype=float)
        return believe(self._prior(rows, seconds), rows, np.log(seconds))

    def _prior(self, rows: list[int], seconds: Floats) -> LayoutPrior:
        """The time model as a straight line through where its coefficients now are.

        Around the refitted coefficients r, ln t = ln t(r) + J (c - r) with J the slopes of ln t:
        its mean takes the coefficients c from before any run, so that runs count once.
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
        """Coefficients refitted to these runs, or to most: the straight line brings the rest."""
        if self.refitted is None or len(rows) >= GROWTH * self._refitted_rows:
            self.refitted = refit(self.candidates.evidence, x.pick(np.array(rows)), seconds, TITLE)
            self._refitted_rows = len(rows)
        return self.refitted.fit().centre


Stop = Why | Literal["interrupted", "not begun"]


@dataclass(frozen=True)
class TrialOutcome:
    """How one run of a layout ended."""

    status: Status | Literal["refused"]
    step_time_s: float | None
    """None without a figure."""
    took_s: float
    """From its start to its end."""
    reason: str | None = None


@dataclass
class TriedLayout:
    """One layout with its runs."""

    row: int
    expected: Posterior
    """Of all layouts, before its first run."""
    outcomes: list[TrialOutcome] = field(default_factory=list[TrialOutcome])

    @property
    def seconds(self) -> list[float]:
        """Step times of the runs that have one."""
        return [run.step_time_s for run in self.outcomes if run.step_time_s is not None]

    @property
    def showed_memory(self) -> bool:
        """Whether its last run ended for lack of memory or went on without."""
        return self.outcomes[-1].status in ("ok", "oom", "nan")


@dataclass
class Search:
    """All that was tried, in its order, and what is believed now."""

    candidates: Candidates
    learner: Learner
    first: Posterior
    """Before any run."""
    belief: Posterior
    tried: dict[int, TriedLayout] = field(default_factory=dict[int, TriedLayout])
    stop: Stop = "not begun"

    @property
    def measured(self) -> dict[int, list[float]]:
        """Step times by row, of the layouts that have any."""
        return {row: tried.seconds for row, tried in self.tried.items() if tried.seconds}

    @property
    def took_s(self) -> list[float]:
        """Seconds of every run; a layout that was refused had none."""
        return [
            run.took_s
            for tried in self.tried.values()
            for run in tried.outcomes
            if run.status != "refused"
        ]

    @property
    def dominated(self) -> Bools:
        """Layouts that need at least the memory of one that ran out of it, by the estimate too."""
        layouts, needed = self.candidates.layouts, self.candidates.memory_bytes
        dominated = np.zeros(len(layouts), dtype=bool)
        for tried in self.tried.values():
            if tried.outcomes[-1].status == "oom":
                less = layouts[tried.row]
                more = np.array([needs_as_much(layout, less) for layout in layouts])
                dominated |= more & (needed >= needed[tried.row])
        return dominated

    @property
    def p_oom(self) -> Floats:
        """Probability of each layout to run out of memory, after those that did."""
        ran_out = {
            row: tried.outcomes[-1].status == "oom"
            for row, tried in self.tried.items()
            if tried.showed_memory
        }
        every = self.candidates
        return odds_after(every.memory_bytes, every.limit_bytes, ran_out, every.p_oom)

    @property
    def surely_out(self) -> Bools:
        """Layouts that may fit by the estimate, and surely do not, going by those that ran out."""
        return self.candidates.likely_to_fit & (self.dominated | (self.p_oom > MAX_P_OOM_TO_RUN))

    @property
    def open(self) -> Bools:
        """Layouts that may be tried."""
        untried = np.array([row not in self.tried for row in range(len(self.candidates.layouts))])
        return untried & self.candidates.likely_to_fit & ~self.surely_out

    @property
    def best(self) -> int | None:
        """The row of the fastest layout so far."""
        return best_of(self.measured)

    def left(self, budget: Budget) -> int:
        """Runs that the budget has left."""
        whole = [
            run.took_s for tried in self.tried.values() for run in tried.outcomes if run.step_time_s
        ]
        return budget.left(self.took_s, whole)

    def state(self, budget: Budget) -> SearchState:
        """What a decision rests on."""
        return SearchState(
            self.belief,
            self.measured,
            self.open,
            self.p_oom,
            {row: len(tried.outcomes) for row, tried in self.tried.items()},
            self.left(budget),
        )

    @property
    def hopeful(self) -> Bools:
        """Layouts that may still be better than the best."""
        return worth_trying(self.state(Budget(runs=0)))

    def note(self, row: int, outcome: TrialOutcome) -> None:
        """A run has ended."""
        self.tried.setdefault(row, TriedLayout(row, self.belief)).outcomes.append(outcome)
        if outcome.step_time_s is not None:
            self.belief = self.learner.belief(self.measured)


Measure = Callable[[int], TrialOutcome]
"""Runs the layout of a row once; KeyboardInterrupt ends the search as far as it came."""


def begin(
    candidates: Candidates, learner: Learner, runs: Sequence[tuple[int, TrialOutcome]] = ()
) -> Search:
    """A search that has these runs of before, in their order, by the row of their layout."""
    belief = learner.belief({})
    search = Search(candidates, learner, belief, belief)
    for row, outcome in runs:
        search.note(row, outcome)
    return search


def go_on(search: Search, measure: Measure, budget: Budget) -> None:
    """Try until no open layout's optimistic bound beats the best, or the budget is spent.

    The recipe's own layout comes first, so that what is won can be told.
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
    """The row to run next; None, with the reason in `search.stop`, at the end."""
    first = search.candidates.recipe_row
    if first is not None and search.open[first] and search.left(budget) > 0:
        return first
    move = decide(search.state(budget))
    if move.why not in ("try", "again"):
        search.stop = move.why
    return move.row
