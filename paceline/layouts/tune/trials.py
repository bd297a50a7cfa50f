"""Tries of layouts as runs on this machine or on hosts, kept and recalled like those of a sweep."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from operator import itemgetter
from pathlib import Path

from paceline.compare.over_time.repeats import has_figure
from paceline.core.errors import UserError
from paceline.core.layout import Layout
from paceline.core.result import Result
from paceline.files.run_folder import read_record
from paceline.layouts.sweep.plan import Choice, Sweep
from paceline.layouts.sweep.result import Prediction, SweepRow
from paceline.layouts.sweep.trials import (
    SweepObserver,
    SweepRunner,
    SweepTask,
    SweepTrial,
    folders_of,
    row_of,
    trials_of,
)
from paceline.layouts.tune.candidates import Candidates, settings
from paceline.layouts.tune.search import TrialOutcome
from paceline.machines import slurm
from paceline.runs.tasks.runner import TaskQueue


@dataclass
class LayoutRunner:
    """Runs layouts one at a time; each layout's runs are a group of the tuning."""

    candidates: Candidates
    name: str
    root: Path
    command: list[str]
    tag: str | None = None
    observer: SweepObserver | None = None
    """Who is told of the runs; there must be one before the first."""
    expect: Callable[[int], Prediction | None] = lambda _: None
    """What is expected of a layout just before it runs, for whoever watches."""
    trials: dict[int, SweepTrial] = field(default_factory=dict[int, SweepTrial])
    order: list[SweepTrial] = field(default_factory=list[SweepTrial])
    """The same in the order of their first runs."""
    halted: str | None = None
    """Why nothing more can run, where the allocation has ended."""

    def __call__(self, row: int) -> TrialOutcome:
        """One more run of a layout; KeyboardInterrupt when the user or the allocation ends it."""
        trial = self.trials.get(row)
        if trial is None:
            try:
                trial = self._trial(row)
            except UserError as error:
                return TrialOutcome("refused", None, 0.0, error.what)
        assert self.observer is not None
        for folder in trial.left:
            slurm.abandon(folder)
        sweep, began = self._sweep(trial.choice), time.monotonic()
        runner = SweepRunner(self.observer, self.root, self.command, self.tag, sweep=sweep)
        task = SweepTask(trial, sum(map(has_figure, trial.results)) + 1)
        interrupted = runner.run_tasks(TaskQueue([task]))
        self.halted = runner.halted
        if interrupted or self.halted:
            raise KeyboardInterrupt
        took_s = time.monotonic() - began
        if trial.fault:
            return TrialOutcome("failed", None, took_s, trial.fault)
        return _outcome(trial.results[-1], took_s)

    def recall(self) -> list[tuple[int, TrialOutcome]]:
        """The runs that the tuning has already, in their order.

        What was broken off or failed otherwise is tried again.
        """
        outcomes: list[tuple[str, int, TrialOutcome]] = []
        for row in self._stored():
            trial = self._trial(row)
            kept = [
                result
                for result in trial.results
                if has_figure(result) or (trial.answered and result.status != "ok")
            ]
            for result in kept:
                record = read_record(self.root / result.run)
                began = datetime.fromisoformat(record.created)
                took_s = max(0.0, (record.ended_unix or began.timestamp()) - began.timestamp())
                outcomes.append((record.created, row, _outcome(result, took_s)))
        return [(row, outcome) for _, row, outcome in sorted(outcomes, key=itemgetter(0))]

    def figures(self, row: int) -> SweepRow | None:
        """What the runs of a layout measured together; None for one that has none."""
        return row_of(self.trials[row]) if row in self.trials else None

    def _stored(self) -> Iterator[int]:
        """Rows of layouts of which there are runs."""
        rows = {layout: row for row, layout in enumerate(self.candidates.layouts)}
        specs = [read_record(folder).spec for folder in folders_of(self.name, self.root)]
        layouts = dict.fromkeys(spec.layout for spec in specs if spec)
        yield from (rows[layout] for layout in layouts if layout in rows)

    def _trial(self, row: int) -> SweepTrial:
        plan, layout = self.candidates.plan(row), self.candidates.layouts[row]
        choice = Choice(_unusual(layout), layout, plan, prediction=self.expect(row))
        (trial,) = trials_of(self._sweep(choice), self.root)
        trial.number = len(self.order) + 1
        self.trials[row] = trial
        self.order.append(trial)
        return trial

    def _sweep(self, choice: Choice) -> Sweep:
        spec = self.candidates.spec
        return Sweep(self.name, spec.recipe, spec.variant, (), (choice,))


def _unusual(layout: Layout) -> dict[str, str]:
    """The settings that are not the usual ones, so that a line of progress tells what runs."""
    usual = set(settings(Layout())) - {"layout.micro_batch=1", "layout.recompute=none"}
    pairs = [setting.partition("=") for setting in settings(layout) if setting not in usual]
    return {key: value for key, _, value in pairs}


def _outcome(result: Result, took_s: float) -> TrialOutcome:
    if has_figure(result):
        return TrialOutcome("ok", result.metrics["step_time_s"].value, took_s)
    if result.status == "ok":
        reason = result.reason or "the run has no steady step time"
        return TrialOutcome("incomplete", None, took_s, reason)
    return TrialOutcome(result.status, None, took_s, result.reason)
