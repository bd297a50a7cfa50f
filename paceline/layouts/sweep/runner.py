"""Runs what is missing of a sweep, one run at a time on each slot of the machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from paceline.core.hardware import Cluster
from paceline.layouts.sweep.plan import Sweep
from paceline.layouts.sweep.result import SweepResult, SweepRow
from paceline.layouts.sweep.trials import SweepTrial, row_of, sweep_result
from paceline.machines import slurm
from paceline.runs.plan import Plan, as_of_now
from paceline.runs.tasks.lost_hosts import TaskOutcome
from paceline.runs.tasks.runner import Observer, TaskQueue, TaskRun, TaskRunner
from paceline.runs.tasks.slot import JobSlot, plan_on


class SweepTask(NamedTuple):
    """One run of a combination."""

    trial: SweepTrial
    repeat: int
    """Which run of it, from 1."""

    @property
    def plan(self) -> Plan:
        """Of its combination, which has one as it runs."""
        assert self.trial.choice.plan is not None
        return self.trial.choice.plan


SweepObserver = Observer[SweepTask, SweepRow]
"""Who is told of each run, and of the combination's row when it has ended."""


@dataclass
class SweepRunner(TaskRunner[SweepTask, SweepRow]):
    """Runs of combinations; of one that was moved once, no other run is."""

    sweep: Sweep = field(kw_only=True)

    def run_of(self, task: SweepTask, slot: JobSlot) -> TaskRun:
        plan = as_of_now(task.plan, beside_others=len(self.slots) > 1)
        return TaskRun(plan_on(plan, slot), group=self.sweep.group(task.plan))

    def keep(self, task: SweepTask, outcome: TaskOutcome, moved: bool) -> SweepRow | None:
        if moved:
            return None
        task.trial.add(outcome)
        return row_of(task.trial)

    def cluster(self, task: SweepTask) -> Cluster:
        return task.plan.spec.cluster

    def key(self, task: SweepTask) -> int:
        return task.trial.number


def run_sweep(
    sweep: Sweep,
    trials: Sequence[SweepTrial],
    root: Path,
    command: list[str],
    observer: SweepObserver,
    *,
    tag: str | None = None,
) -> SweepResult:
    """Run what is missing and return all combinations with what they have.

    Everything runs once before anything is repeated. A run that fails is a row; a UserError ends
    the sweep. KeyboardInterrupt ends what runs cleanly, and then the sweep as far as it came. So
    does the end of the allocation, and the loss of a host of every slot.
    """
    runner = SweepRunner(observer, root, command, tag, sweep.slots, sweep=sweep)
    for folder in (folder for trial in trials for folder in trial.left):
        slurm.abandon(folder)
    arrays = root / sweep.name if sweep.queued else None
    interrupted = runner.run_tasks(missing_runs(sweep, trials), arrays, sweep.at_once)
    return sweep_result(
        sweep, trials, interrupted=interrupted, command=command, halted=runner.halted
    )


def missing_runs(sweep: Sweep, trials: Sequence[SweepTrial]) -> TaskQueue[SweepTask]:
    """The runs that combinations lack, all their first ones first."""
    last = sweep.repeats
    return TaskQueue(
        [SweepTask(trial, repeat) for repeat in range(1, last + 1) for trial in trials],
        missing=lambda task: task.trial.missing(last) > last - task.repeat,
    )
