"""The combinations of a sweep with what each has measured so far, and their rows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from paceline.compare.over_time.repeats import group_figures, has_figure
from paceline.core.errors import UserError
from paceline.core.hardware import Cluster
from paceline.core.result import Result, Status
from paceline.files.run_folder import RunRecord, current_status, groups, read_record
from paceline.layouts.sweep.plan import Choice, Sweep
from paceline.layouts.sweep.result import SweepResult, SweepRow, figure_fields, marked, sentences
from paceline.machines import slurm
from paceline.runs.outcome import evaluate
from paceline.runs.plan import Plan, as_of_now
from paceline.runs.tasks.runner import Observer, TaskQueue, TaskRun, TaskRunner
from paceline.runs.tasks.slot import JobSlot, TaskOutcome, plan_on

FINAL_ANSWERS = ("oom", "nan")
"""Statuses that another run of the same would have again."""


@dataclass
class SweepTrial:
    """One combination with what it has so far."""

    choice: Choice
    number: int
    """Its place in the order, from 1."""
    results: list[Result] = field(default_factory=list[Result])
    answered: bool = False
    """Whether another run would end as the last one did."""
    failed: int = 0
    """Runs of this call that gave no figure."""
    fault: str | None = None
    """Why the last try left no run."""
    left: list[Path] = field(default_factory=list[Path])
    """Folders of runs whose controllers died, which may still have a job in Slurm's queue."""

    def missing(self, repeats: int) -> int:
        """Runs that it still needs; what failed in this call is not tried again."""
        if not self.choice.runs or self.answered:
            return 0
        return max(0, repeats - sum(map(has_figure, self.results)) - self.failed)

    def add(self, outcome: TaskOutcome) -> None:
        """Note how a run of this call ended."""
        self.fault = None if isinstance(outcome, Result) else str(outcome)
        if isinstance(outcome, Result):
            self.results.append(outcome)
            self.answered = outcome.status in (*FINAL_ANSWERS, "timeout")
        self.failed += not (isinstance(outcome, Result) and has_figure(outcome))


def trials_of(sweep: Sweep, root: Path) -> list[SweepTrial]:
    """Every combination with the runs that the sweep's groups hold already.

    Raises UserError when another process is measuring one of them.
    """
    by_key: dict[str | None, list[tuple[RunRecord, Path]]] = {}
    for folder in folders_of(sweep.name, root):
        record = read_record(folder)
        by_key.setdefault(record.key, []).append((record, folder))
    trials = [SweepTrial(choice, number) for number, choice in enumerate(sweep.choices, start=1)]
    for trial in trials:
        if plan := trial.choice.plan:
            _recall(trial, plan, by_key.get(plan.spec.key, []))
    return trials


def folders_of(sweep: str, root: Path) -> list[Path]:
    """The folders of all runs of a sweep, or of a tuning, by name."""
    group = re.compile(re.escape(sweep) + r"-[0-9a-f]{8}")
    members = groups(root).items()
    return [folder for name, folders in members if group.fullmatch(name) for folder in folders]


def sweep_result(
    sweep: Sweep,
    trials: Sequence[SweepTrial],
    *,
    interrupted: bool,
    command: Sequence[str],
    halted: str | None = None,
) -> SweepResult:
    """The sweep's rows as they are now, marked, with the sentences that they allow."""
    rows = marked([row_of(trial) for trial in trials])
    # What failed since the fault began is tried again by the next call.
    missing = bool(halted) or any(trial.missing(sweep.repeats) for trial in trials)
    plans = [choice.plan for choice in sweep.choices if choice.plan]
    return SweepResult(
        name=sweep.name,
        recipe=sweep.recipe,
        variant=sweep.variant,
        dimensions={dimension.field: dimension.values for dimension in sweep.dimensions},
        repeats=sweep.repeats,
        flops_convention=plans[0].spec.flops_convention if plans else None,
        stack=sweep.stack,
        rows=rows,
        interrupted=interrupted,
        halted=halted,
        go_on=shlex.join(["paceline", *command[1:]]) if missing else None,
        sentences=tuple(sentences(rows)),
    )


def row_of(trial: SweepTrial) -> SweepRow:
    """The row of one combination."""
    choice = trial.choice
    good = [result for result in trial.results if has_figure(result)]
    figures = dict(good[0].metrics if len(good) == 1 else group_figures(good)) if good else {}
    status, reason = _status(trial)
    return SweepRow.model_validate(
        {
            "settings": choice.settings,
            "status": status,
            "reason": reason,
            "layout": choice.layout,
            "prediction": choice.prediction,
            "runs": tuple(result.run for result in trial.results),
            "run_step_times_s": tuple(result.metrics["step_time_s"].value for result in good),
            **(_placed(choice.plan) if choice.plan else {}),
            **(figure_fields(figures) if good else {}),
        }
    )


def _placed(plan: Plan) -> Mapping[str, Any]:
    spec = plan.spec
    return {
        "key": spec.key,
        "nodes": spec.cluster.nodes,
        "devices": spec.world_size,
        "dp": spec.dp,
        "global_batch": spec.training.global_batch,
        "seq_len": spec.training.seq_len,
    }


def _status(trial: SweepTrial) -> tuple[str, str | None]:
    """ok as soon as one run has a figure, else how the last one ended."""
    choice = trial.choice
    if any(map(has_figure, trial.results)):
        return "ok", None
    if choice.refused:
        return "refused", choice.refused
    if trial.fault:
        return "failed", trial.fault
    if trial.results:
        last = trial.results[-1]
        unjudged = "the run has no steady step time" if last.status == "ok" else None
        return ("incomplete" if unjudged else last.status), last.reason or unjudged
    return ("pruned", choice.pruned) if choice.pruned else ("waiting", None)


def _recall(trial: SweepTrial, plan: Plan, runs: Sequence[tuple[RunRecord, Path]]) -> None:
    """Note those of the runs of the same content that were on the same kind of machine."""
    for record, folder in runs:
        if not _same_machine(record, plan):
            continue
        status = current_status(record)
        if status in ("queued", "running"):
            raise UserError(
                f"run {record.name}",
                "of this sweep is being measured by another process",
                remedy="wait until it has ended, or give the sweep another --name",
            )
        result = evaluate(folder).result
        if status == "incomplete":
            trial.left.append(folder)
        trial.results.append(result)
        trial.answered = _answers(status, record, plan)


def _same_machine(record: RunRecord, plan: Plan) -> bool:
    return record.spec is not None and (
        record.spec.cluster.device_label == plan.spec.cluster.device_label
    )


def _answers(status: Status, record: RunRecord, plan: Plan) -> bool:
    """Whether a run without a figure would end the same again; a longer limit may let it end."""
    then = record.spec.time_limit_s if record.spec else None
    now = plan.spec.time_limit_s
    if status == "timeout":
        return then is not None and now is not None and now <= then
    return status in FINAL_ANSWERS


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
