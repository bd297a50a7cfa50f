"""What a tuning yields: one row a layout that was tried, the best of them, and what was learned."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from paceline.core.layout import Layout
from paceline.core.result import Status
from paceline.core.value import NonNegativeInt, PositiveInt, Value


class Expected(Value):
    """An expected step time; 80 % lie between low and high."""

    step_time_s: PositiveFloat
    low_s: PositiveFloat
    high_s: PositiveFloat


class TuneRow(Value):
    """One layout that was tried."""

    number: PositiveInt
    """Its place in the order of first tries."""
    layout: Layout
    label: str
    dp: PositiveInt
    status: Status | Literal["refused"]
    reason: str | None = None
    step_time_s: float | None = None
    """Of several runs the median of their medians."""
    num_runs: NonNegativeInt
    tokens_per_s: float | None = None
    before: Expected
    """Before any run of the tuning."""
    expected: Expected
    """Just before its own first run."""
    after: Expected
    """After all runs."""
    memory_bytes: float | None = None
    """Measured, of the fullest rank."""
    memory_kind: str | None = None
    runs: tuple[str, ...] = ()
    """Folders of its runs."""
    own: bool = False
    """The recipe's own layout."""
    p_best: float | None = None
    """Probability that it is the fastest of those that were tried, 0 to 1; None where none of them
    ran twice."""
    best: bool = False
    level: bool = False
    """Not told apart from the best."""

    @property
    def prediction_error(self) -> float | None:
        """Expected just before its run over measured step time, minus 1."""
        return self.expected.step_time_s / self.step_time_s - 1 if self.step_time_s else None


class Untried(Value):
    """A layout that was not tried, and why."""

    layout: Layout
    label: str
    after: Expected
    reason: str


class Effect(Value):
    """The best layout with one setting changed."""

    setting: str
    """`micro_batch 4`."""
    instead_of: str
    ratio: PositiveFloat
    """Step time over the best one's."""
    measured: bool
    """Else expected after all runs."""


class TuneResult(Value):
    """What `paceline tune` prints as JSON."""

    schema_version: int = 1
    name: str
    recipe: str
    variant: str | None = None
    device: str
    devices: PositiveInt
    oversubscribed: bool
    """More processes than physical cores."""
    budget: str
    num_runs: NonNegativeInt
    took_s: float
    """Of all runs together."""
    n_layouts: NonNegativeInt
    """Layouts that can run."""
    n_infeasible: NonNegativeInt
    n_pruned: NonNegativeInt
    """Out of memory by the estimate."""
    n_dominated: NonNegativeInt
    """Not tried because of those that ran out of memory: they need as much, or surely too much."""
    n_hopeful: NonNegativeInt
    """Layouts that may still be faster than the best at the stop, or be the first with a figure."""
    stop: Literal["bound", "budget", "exhausted", "interrupted", "not begun"]
    rows: tuple[TuneRow, ...]
    effects: tuple[Effect, ...] = ()
    untried: tuple[Untried, ...] = ()
    """The most promising ones that were not tried."""
    recipe_file: str | None = None
    """The best layout as a recipe."""
    go_on: str | None = None
    """The command that goes on; None when the search is over."""
    evidence: str
    sentences: tuple[str, ...] = ()

    @property
    def best(self) -> TuneRow | None:
        """The fastest row."""
        return next((row for row in self.rows if row.best), None)
