"""The search: tries layouts one after the other until nothing better is to be expected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from paceline.core.result import Status
from paceline.estimate.estimates import P_OOM_SURE
from paceline.estimate.model.case import Bools, Floats
from paceline.layouts.search.decision import SearchState, Why, best_of, decide, worth_trying
from paceline.layouts.search.memory_order import needs_as_much
from paceline.layouts.search.oom_odds import odds_after
from paceline.layouts.search.residuals import Belief
from paceline.layouts.tune.budget import Budget
from paceline.layouts.tune.candidates import Candidates
from paceline.layouts.tune.learner import Learner

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
    expected: Belief
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
    first: Belief
    """Before any run."""
    belief: Belief
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
        return self.candidates.likely_to_fit & (self.dominated | (self.p_oom > P_OOM_SURE))

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
