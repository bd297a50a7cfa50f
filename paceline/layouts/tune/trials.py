"""Tries of layouts as runs on this machine or on hosts, stored and found again like those of a sweep."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from paceline.compare.over_time.repeats import has_figure
from paceline.core.errors import UserError
from paceline.core.layout import Layout
from paceline.core.result import Result
from paceline.files.run_folder import groups, read_record
from paceline.layouts.sweep.plan import Choice, Sweep
from paceline.layouts.sweep.result import Prediction, SweepRow
from paceline.layouts.sweep.runner import Observer, run_sweep
from paceline.layouts.sweep.trials import Trial, row_of, trials_of
from paceline.layouts.tune.candidates import Candidates, settings
from paceline.layouts.tune.search import Outcome


@dataclass
class Runs:
    """Runs layouts one at a time; each layout's runs are a group of the tuning."""

    candidates: Candidates
    name: str
    root: Path
    command: list[str]
    tag: str | None = None
    observer: Observer | None = None
    """Who is told of the runs; there must be one before the first."""
    expect: Callable[[int], Prediction | None] = lambda _: None
    """What is expected of a layout just before it runs, for whoever watches."""
    trials: dict[int, Trial] = field(default_factory=dict[int, Trial])
    order: list[Trial] = field(default_factory=list[Trial])
    """The same in the order of their first runs."""
    halted: str | None = None
    """Why nothing more can run, where the allocation has ended."""

    def __call__(self, row: int) -> Outcome:
        """One more run of a layout; raises KeyboardInterrupt when the user, or the allocation, ends it."""
        trial = self.trials.get(row)
        if trial is None:
            try:
                trial = self._trial(row)
            except UserError as error:
                return Outcome("refused", None, 0.0, error.what)
        assert self.observer is not None
        # One more run is wanted, however those before have ended.
        trial.failed, trial.answered = 0, False
        before, began = len(trial.results), time.monotonic()
        wanted = sum(map(has_figure, trial.results)) + 1
        sweep = replace(self._sweep(trial.choice), repeats=wanted)
        done = run_sweep(sweep, [trial], self.root, self.command, self.observer, tag=self.tag)
        self.halted = done.halted
        if done.interrupted or done.halted:
            raise KeyboardInterrupt
        took_s = time.monotonic() - began
        if len(trial.results) == before:
            return Outcome("failed", None, took_s, trial.fault)
        return _outcome(trial.results[-1], took_s)

    def recall(self) -> list[tuple[int, Outcome]]:
        """The runs that the tuning has already, in their order.

        What was broken off or failed otherwise is tried again.
        """
        known: list[tuple[str, int, Outcome]] = []
        for row in self._stored():
            trial = self._trial(row)
            kept = [
                r for r in trial.results if has_figure(r) or (trial.answered and r.status != "ok")
            ]
            for result in kept:
                record = read_record(self.root / result.run)
                began = datetime.fromisoformat(record.created)
                took_s = max(0.0, (record.ended_unix or began.timestamp()) - began.timestamp())
                known.append((record.created, row, _outcome(result, took_s)))
        return [(row, outcome) for _, row, outcome in sorted(known, key=lambda one: one[0])]

    def figures(self, row: int) -> SweepRow | None:
        """What the runs of a layout measured together; None for one that has none."""
        return row_of(self.trials[row]) if row in self.trials else None

    def _stored(self) -> Iterator[int]:
        """Rows of layouts of which there are runs."""
        own = re.compile(re.escape(self.name) + r"-[0-9a-f]{8}")
        rows = {layout: row for row, layout in enumerate(self.candidates.layouts)}
        layouts = [
            record.spec.layout
            for name, folders in groups(self.root).items()
            if own.fullmatch(name)
            for folder in folders
            if (record := read_record(folder)).spec
        ]
        yield from dict.fromkeys(rows[one] for one in layouts if one in rows)

    def _trial(self, row: int) -> Trial:
        plan, layout = self.candidates.plan(row), self.candidates.layouts[row]
        choice = Choice(_told(layout), layout, plan, prediction=self.expect(row))
        (trial,) = trials_of(self._sweep(choice), self.root)
        trial.number = len(self.order) + 1
        self.trials[row] = trial
        self.order.append(trial)
        return trial

    def _sweep(self, choice: Choice) -> Sweep:
        spec = self.candidates.spec
        return Sweep(self.name, spec.recipe, spec.variant, (), (choice,))


def _told(layout: Layout) -> dict[str, str]:
    """The settings that are not the usual ones, so that a line of progress tells what runs."""
    usual = set(settings(Layout())) - {"layout.micro_batch=1", "layout.recompute=none"}
    pairs = [one.partition("=") for one in settings(layout) if one not in usual]
    return {key: value for key, _, value in pairs}


def _outcome(result: Result, took_s: float) -> Outcome:
    if has_figure(result):
        return Outcome("ok", result.metrics["step_time_s"].value, took_s)
    unjudged = result.status == "ok"
    return Outcome(
        "incomplete" if unjudged else result.status, None, took_s,
        result.reason or ("the run has no steady step time" if unjudged else None),
    )  # fmt: skip
