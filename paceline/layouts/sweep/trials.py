"""Run the combinations of a sweep, and turn their runs into rows."""

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
from paceline.layouts.sweep.plan import Combination, Sweep
from paceline.layouts.sweep.result import SweepResult, SweepRow, figure_fields, mark_rows, sentences
from paceline.machines import cancel_orphan
from paceline.runs.outcome import evaluate
from paceline.runs.plan import Plan, refresh
from paceline.runs.tasks.runner import Observer, TaskQueue, TaskRun, TaskRunner
from paceline.runs.tasks.slot import JobSlot, TaskOutcome, plan_on

FINAL_STATUSES = ("oom", "nan")
"""Statuses that a rerun would repeat."""


@dataclass
class SweepTrial:
    """One combination with its runs so far."""

    choice: Combination
    number: int
    """Position in the run order, from 1."""
    results: list[Result] = field(default_factory=list[Result])
    is_final: bool = False
    """True if another run would end like the last one."""
    failed: int = 0
    """Runs of this call without a figure."""
    failure: str | None = None
    """Reason why the last attempt left no run."""
    orphans: list[Path] = field(default_factory=list[Path])
    """Folders of runs whose controller died; they may still have a job in Slurm's queue."""

    def missing(self, repeats: int) -> int:
        """Return the number of runs still needed; runs that failed in this call are not retried."""
        if not self.choice.runs or self.is_final:
            return 0
        return max(0, repeats - sum(map(has_figure, self.results)) - self.failed)

    def add(self, outcome: TaskOutcome) -> None:
        """Record the outcome of a run of this call."""
        self.failure = None if isinstance(outcome, Result) else str(outcome)
        if isinstance(outcome, Result):
            self.results.append(outcome)
            self.is_final = outcome.status in (*FINAL_STATUSES, "timeout")
        self.failed += not (isinstance(outcome, Result) and has_figure(outcome))


def sweep_trials(sweep: Sweep, root: Path) -> list[SweepTrial]:
    """Return every combination with its earlier runs.

    Raises UserError if another process is measuring one of them.
    """
    by_key: dict[str | None, list[tuple[RunRecord, Path]]] = {}
    for folder in run_folders(sweep.name, root):
        record = read_record(folder)
        by_key.setdefault(record.key, []).append((record, folder))
    trials = [SweepTrial(choice, number) for number, choice in enumerate(sweep.choices, start=1)]
    for trial in trials:
        if plan := trial.choice.plan:
            _load_runs(trial, plan, by_key.get(plan.spec.key, []))
    return trials


def run_folders(sweep: str, root: Path) -> list[Path]:
    """Return the folders of all runs of a sweep or a layout search."""
    group = re.compile(re.escape(sweep) + r"-[0-9a-f]{8}")
    members = groups(root).items()
    return [folder for name, folders in members if group.fullmatch(name) for folder in folders]


def sweep_result(
    sweep: Sweep,
    trials: Sequence[SweepTrial],
    *,
    interrupted: bool,
    command: Sequence[str],
    halt_reason: str | None = None,
) -> SweepResult:
    """Return the current result of a sweep."""
    rows = mark_rows([sweep_row(trial) for trial in trials])
    # The next call retries what failed after the halt.
    missing = bool(halt_reason) or any(trial.missing(sweep.repeats) for trial in trials)
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
        halt_reason=halt_reason,
        resume_command=shlex.join(["paceline", *command[1:]]) if missing else None,
        sentences=tuple(sentences(rows)),
    )


def sweep_row(trial: SweepTrial) -> SweepRow:
    """Return the row of one combination."""
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
            **(_placement_fields(choice.plan) if choice.plan else {}),
            **(figure_fields(figures) if good else {}),
        }
    )


def _placement_fields(plan: Plan) -> Mapping[str, Any]:
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
    """Return ok if a run has a figure, else the status of the last run, with the reason."""
    choice = trial.choice
    if any(map(has_figure, trial.results)):
        return "ok", None
    if choice.refusal:
        return "refused", choice.refusal
    if trial.failure:
        return "failed", trial.failure
    if trial.results:
        last = trial.results[-1]
        missing_figure = "the run has no steady step time" if last.status == "ok" else None
        return ("incomplete" if missing_figure else last.status), last.reason or missing_figure
    return ("pruned", choice.prune_reason) if choice.prune_reason else ("waiting", None)


def _load_runs(trial: SweepTrial, plan: Plan, runs: Sequence[tuple[RunRecord, Path]]) -> None:
    """Add earlier runs of the same key on the same kind of machine."""
    for record, folder in runs:
        if not _same_machine(record, plan):
            continue
        status = current_status(record)
        if status in ("queued", "running"):
            raise UserError(
                f"run {record.name}",
                "of this sweep is being measured by another process",
                remedy="wait until it ends, or use another --name",
            )
        result = evaluate(folder).result
        if status == "incomplete":
            trial.orphans.append(folder)
        trial.results.append(result)
        trial.is_final = _is_final(status, record, plan)


def _same_machine(record: RunRecord, plan: Plan) -> bool:
    return record.spec is not None and (
        record.spec.cluster.device_label == plan.spec.cluster.device_label
    )


def _is_final(status: Status, record: RunRecord, plan: Plan) -> bool:
    """Return whether a rerun would end the same; a longer time limit may let it finish."""
    then = record.spec.time_limit_s if record.spec else None
    now = plan.spec.time_limit_s
    if status == "timeout":
        return then is not None and now is not None and now <= then
    return status in FINAL_STATUSES


class SweepTask(NamedTuple):
    """One run of a combination."""

    trial: SweepTrial
    repeat: int
    """Number of the run, from 1."""

    @property
    def plan(self) -> Plan:
        """Plan of the combination."""
        assert self.trial.choice.plan is not None
        return self.trial.choice.plan


SweepObserver = Observer[SweepTask, SweepRow]
"""Receives each run, and the row of the combination when it ends."""


@dataclass
class SweepRunner(TaskRunner[SweepTask, SweepRow]):
    """Runs the tasks of a sweep; a result from a moved run is not recorded."""

    sweep: Sweep = field(kw_only=True)

    def run_of(self, task: SweepTask, slot: JobSlot) -> TaskRun:
        plan = refresh(task.plan, concurrent=len(self.slots) > 1)
        return TaskRun(plan_on(plan, slot), group=self.sweep.group(task.plan))

    def keep(self, task: SweepTask, outcome: TaskOutcome, moved: bool) -> SweepRow | None:
        if moved:
            return None
        task.trial.add(outcome)
        return sweep_row(task.trial)

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
    """Run what is missing and return the result.

    All combinations run once before any is repeated. A failed run becomes a row; a UserError ends
    the sweep. KeyboardInterrupt, the end of the allocation, and the loss of a host in every slot
    end the current runs cleanly and return the result so far.
    """
    runner = SweepRunner(observer, root, command, tag, sweep.slots, sweep=sweep)
    for folder in (folder for trial in trials for folder in trial.orphans):
        cancel_orphan(folder)
    arrays = root / sweep.name if sweep.queued else None
    interrupted = runner.run_tasks(missing_runs(sweep, trials), arrays, sweep.max_parallel)
    return sweep_result(
        sweep, trials, interrupted=interrupted, command=command, halt_reason=runner.stop_reason
    )


def missing_runs(sweep: Sweep, trials: Sequence[SweepTrial]) -> TaskQueue[SweepTask]:
    """Return the missing runs, first runs before repeats."""
    last = sweep.repeats
    return TaskQueue(
        [SweepTask(trial, repeat) for repeat in range(1, last + 1) for trial in trials],
        missing=lambda task: task.trial.missing(last) > last - task.repeat,
    )
