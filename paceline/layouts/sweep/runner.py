"""Runs what is missing of a sweep, on one part of the machines after the other or on several at once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import Protocol

from paceline.compare.over_time.repeats import has_figure
from paceline.core.errors import SystemFaultError
from paceline.core.result import Result
from paceline.layouts.sweep.plan import Sweep
from paceline.layouts.sweep.result import SweepResult, SweepRow
from paceline.layouts.sweep.trials import Trial, row_of, told
from paceline.machines.slurm.array import Gathering, Submit
from paceline.runs import flow
from paceline.runs.places.losses import Losses, is_lost, why_ended
from paceline.runs.places.part import MOST_AT_ONCE, Part, plan_on
from paceline.runs.places.work import abandon_left, allocation_fault, side_by_side
from paceline.runs.plan import as_of_now

Task = tuple[Trial, int]
"""A combination and which run of it."""


class Observer(Protocol):
    """Who is told how a sweep goes on; its functions may be called from several threads."""

    def running(self, trial: Trial, repeat: int) -> AbstractContextManager[flow.Watcher]:
        """A watcher for one run of a combination, while it runs."""
        ...

    def ended(self, trial: Trial, row: SweepRow) -> None:
        """A run has ended; the row as it is now."""
        ...

    def lost(self, part: Part, why: str, for_good: bool) -> None:
        """A host of this part is lost: nothing more runs on it, or the same run once more."""
        ...


def run_sweep(
    sweep: Sweep,
    trials: Sequence[Trial],
    root: Path,
    command: list[str],
    observer: Observer,
    *,
    tag: str | None = None,
) -> SweepResult:
    """Run what is missing and return all combinations with what they have.

    Everything runs once before anything is repeated. A run that fails is a row; a UserError ends the
    sweep. KeyboardInterrupt ends what runs cleanly, and then the sweep as far as it came. So does the
    end of the allocation, and the loss of a host of every part.
    """
    doing = Doing(sweep, trials, root, command, observer, tag)
    interrupted = doing.run()
    return told(sweep, trials, interrupted=interrupted, command=command, halted=doing.halted)


@dataclass
class Doing:
    """A sweep that goes on."""

    sweep: Sweep
    trials: Sequence[Trial]
    root: Path
    command: list[str]
    observer: Observer
    tag: str | None = None
    halted: str | None = None
    """Why nothing more is run although it was not stopped."""
    stop: Event = field(default_factory=Event)
    _lock: Lock = field(default_factory=Lock)
    _tasks: list[Task] = field(init=False)
    _losses: Losses = field(init=False)

    def __post_init__(self) -> None:
        self._losses = Losses(self.sweep.parts)
        repeats = range(1, self.sweep.repeats + 1)
        self._tasks = [(trial, repeat) for repeat in repeats for trial in self.trials]

    def run(self) -> bool:
        """Run what is missing; whether the user has broken it off."""
        for trial in self.trials:
            abandon_left(trial.left)
        try:
            return self._run_queued() if self.sweep.queued else self._run_on_parts()
        except KeyboardInterrupt:
            return True

    def _run_on_parts(self) -> bool:
        interrupted = self._losses.share(lambda _: self._is_left(), self.stop, self._work)
        self.halted = self.halted or self._losses.halted
        return interrupted

    def _work(self, part: Part) -> None:
        """One run after the other on a part, until nothing is left or a host of it is lost."""
        while not self.stop.is_set() and (task := self._take()):
            ended = self._run_once(task, part)
            if ended is None or not self._note(task, part, ended):
                return

    def _run_queued(self) -> bool:
        """All runs as arrays in Slurm's queue, each followed by a thread of its own."""
        interrupted = False
        while not (interrupted or self.stop.is_set()):
            batch = [task for _ in range(MOST_AT_ONCE) if (task := self._take())]
            if not batch:
                break
            place = self.root / self.sweep.name
            jobs = Gathering(len(batch), place, self.sweep.at_once, abandoned=self.stop.is_set)
            places = [Part(number) for number in range(1, len(batch) + 1)]
            interrupted = side_by_side(places, self.stop, partial(self._queue, batch, jobs))
        return interrupted

    def _queue(self, batch: Sequence[Task], jobs: Gathering, part: Part) -> None:
        task = batch[part.number - 1]
        with jobs.place_for_one() as submit:
            ended = self._run_once(task, part, submit)
        if ended is not None:
            self._note(task, part, ended)

    def _take(self) -> Task | None:
        """The next run that is still missing."""
        with self._lock:
            while self._tasks:
                task = self._tasks.pop(0)
                if self._is_missing(task):
                    return task
        return None

    def _is_left(self) -> bool:
        with self._lock:
            return any(map(self._is_missing, self._tasks))

    def _is_missing(self, task: Task) -> bool:
        trial, repeat = task
        return trial.missing(self.sweep.repeats) > self.sweep.repeats - repeat

    def _note(self, task: Task, part: Part, ended: Result | SystemFaultError) -> bool:
        """Keep how a run ended; whether the part can go on."""
        trial, plan = task[0], task[0].choice.plan
        lost = plan is not None and is_lost(part, plan.spec.cluster, ended, self.root)
        again = lost and self._losses.note(part, trial.number, why_ended(ended))
        with self._lock:
            if again:
                self._tasks.insert(0, task)
            else:
                trial.add(ended)
                self.observer.ended(trial, row_of(trial))
        if plan and lost:
            on = replace(part, hosts=part.hosts or plan.spec.cluster.hosts)
            self.observer.lost(on, why_ended(ended), part in self._losses.lost)
        if not (isinstance(ended, Result) and has_figure(ended)) and self.halted is None:
            self.halted = self._allocation_fault(trial)
            if self.halted:
                self.stop.set()
        return part not in self._losses.lost

    def _allocation_fault(self, trial: Trial) -> str | None:
        plan = trial.choice.plan
        return allocation_fault(plan.spec.cluster) if plan else None

    def _run_once(
        self, task: Task, part: Part, submit: Submit | None = None
    ) -> Result | SystemFaultError | None:
        """How one run ended; None when it was stopped, as all are."""
        trial, repeat = task
        plan = trial.choice.plan
        assert plan is not None
        try:
            with self.observer.running(trial, repeat) as watch:
                report = flow.run(
                    plan_on(as_of_now(plan, len(self.sweep.parts) > 1), part), self.root,
                    self.command, watch, tag=self.tag, probe=False, group=self.sweep.group(plan),
                    stopped=self.stop.is_set, submit=submit,
                )  # fmt: skip
        except flow.UnwrittenReportError as fault:
            return fault.report.result
        except flow.CancelledRunError:
            if self.stop.is_set():
                return None
            raise KeyboardInterrupt from None
        except SystemFaultError as fault:
            return fault
        return report.result
