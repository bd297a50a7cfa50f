"""Run layouts as trials on this machine or on hosts, and recall earlier trials."""

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
from paceline.layouts.sweep.plan import Combination, Sweep
from paceline.layouts.sweep.result import Prediction, SweepRow
from paceline.layouts.sweep.trials import (
    SweepObserver,
    SweepRunner,
    SweepTask,
    SweepTrial,
    run_folders,
    sweep_row,
    sweep_trials,
)
from paceline.layouts.tune.candidates import Candidates, layout_overrides
from paceline.layouts.tune.search import TrialOutcome
from paceline.machines import cancel_orphan
from paceline.runs.tasks.runner import TaskQueue


@dataclass
class LayoutRunner:
    """Runs layouts one at a time; the runs of each layout form a group."""

    candidates: Candidates
    name: str
    root: Path
    command: list[str]
    tag: str | None = None
    observer: SweepObserver | None = None
    """Receives progress; must be set before the first run."""
    expect: Callable[[int], Prediction | None] = lambda _: None
    """Returns the expectation for a layout just before it runs, shown as progress."""
    trials: dict[int, SweepTrial] = field(default_factory=dict[int, SweepTrial])
    order: list[SweepTrial] = field(default_factory=list[SweepTrial])
    """The trials in the order of their first runs."""
    halt_reason: str | None = None
    """Reason why no further run is possible, e.g. the allocation ended."""

    def __call__(self, row: int) -> TrialOutcome:
        """Run a layout once; raise KeyboardInterrupt if the user or the allocation ends it."""
        trial = self.trials.get(row)
        if trial is None:
            try:
                trial = self._trial(row)
            except UserError as error:
                return TrialOutcome("refused", None, 0.0, error.what)
        assert self.observer is not None
        for folder in trial.orphans:
            cancel_orphan(folder)
        sweep, began = self._sweep(trial.choice), time.monotonic()
        runner = SweepRunner(self.observer, self.root, self.command, self.tag, sweep=sweep)
        task = SweepTask(trial, sum(map(has_figure, trial.results)) + 1)
        interrupted = runner.run_tasks(TaskQueue([task]))
        self.halt_reason = runner.stop_reason
        if interrupted or self.halt_reason:
            raise KeyboardInterrupt
        took_s = time.monotonic() - began
        if trial.failure:
            return TrialOutcome("failed", None, took_s, trial.failure)
        return _outcome(trial.results[-1], took_s)

    def recall(self) -> list[tuple[int, TrialOutcome]]:
        """Return earlier runs in order.

        Interrupted runs and those that failed for other reasons than OOM or NaN are left out, so
        that they are tried again.
        """
        outcomes: list[tuple[str, int, TrialOutcome]] = []
        for row in self._stored_rows():
            trial = self._trial(row)
            known_results = [
                result
                for result in trial.results
                if has_figure(result) or (trial.is_final and result.status != "ok")
            ]
            for result in known_results:
                record = read_record(self.root / result.run)
                began = datetime.fromisoformat(record.created)
                took_s = max(0.0, (record.ended_unix or began.timestamp()) - began.timestamp())
                outcomes.append((record.created, row, _outcome(result, took_s)))
        return [(row, outcome) for _, row, outcome in sorted(outcomes, key=itemgetter(0))]

    def figures(self, row: int) -> SweepRow | None:
        """Return the combined figures of a layout's runs; None without runs."""
        return sweep_row(self.trials[row]) if row in self.trials else None

    def _stored_rows(self) -> Iterator[int]:
        """Yield the rows of layouts that have stored runs."""
        rows = {layout: row for row, layout in enumerate(self.candidates.layouts)}
        specs = [read_record(folder).spec for folder in run_folders(self.name, self.root)]
        layouts = dict.fromkeys(spec.layout for spec in specs if spec)
        yield from (rows[layout] for layout in layouts if layout in rows)

    def _trial(self, row: int) -> SweepTrial:
        plan, layout = self.candidates.plan(row), self.candidates.layouts[row]
        choice = Combination(
            _non_default_settings(layout), layout, plan, prediction=self.expect(row)
        )
        (trial,) = sweep_trials(self._sweep(choice), self.root)
        trial.number = len(self.order) + 1
        self.trials[row] = trial
        self.order.append(trial)
        return trial

    def _sweep(self, choice: Combination) -> Sweep:
        spec = self.candidates.spec
        return Sweep(self.name, spec.recipe, spec.variant, (), (choice,))


def _non_default_settings(layout: Layout) -> dict[str, str]:
    """Return the settings that differ from the defaults, for the progress line."""
    usual = set(layout_overrides(Layout())) - {"layout.micro_batch=1", "layout.recompute=none"}
    pairs = [setting.partition("=") for setting in layout_overrides(layout) if setting not in usual]
    return {key: value for key, _, value in pairs}


def _outcome(result: Result, took_s: float) -> TrialOutcome:
    if has_figure(result):
        return TrialOutcome("ok", result.metrics["step_time_s"].value, took_s)
    if result.status == "ok":
        reason = result.reason or "the run has no steady step time"
        return TrialOutcome("incomplete", None, took_s, reason)
    return TrialOutcome(result.status, None, took_s, result.reason)
