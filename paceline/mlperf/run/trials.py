"""Run a series of trials of one benchmark, one seed each, sequentially and resumable."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from pydantic import PositiveFloat

from paceline.core.errors import PacelineError, SystemFaultError, UserError
from paceline.core.result import Result, Status
from paceline.core.run_report import RunReport
from paceline.core.value import NonNegativeInt, PositiveInt, Value
from paceline.files.documents import read_lines, read_value, write_text, write_value
from paceline.files.run_folder import (
    Controller,
    groups,
    is_alive,
    read_record,
    this_controller,
)
from paceline.machines.slurm import Submit
from paceline.machines.slurm.foreign import submitted_logs
from paceline.mlperf.result_logs import read_log
from paceline.mlperf.rules import Benchmark
from paceline.mlperf.score.convergence import ExpectedTime
from paceline.mlperf.score.run_set import copy_telemetry
from paceline.mlperf.score.score import Score
from paceline.runs import flow
from paceline.runs.ending import read_ranks
from paceline.runs.logged_run import log_files
from paceline.runs.plan import Plan
from paceline.runs.tasks.runner import Observer, TaskQueue, TaskRun, TaskRunner
from paceline.runs.tasks.slot import JobSlot, TaskOutcome

TrialStatus = Literal[
    "waiting", "running", "success", "missed", "timeout", "failed", "cancelled", "measured"
]
SeriesStatus = Literal["complete", "running", "unfinished", "stopped", "failed"]
MAX_TAIL = 20
"""Maximum number of log lines shown of a run that failed before run_start."""
FINAL = frozenset({"success", "missed", "timeout", "failed", "measured"})
"""Final statuses; a trial with one of these is not run again."""
STARTED = ("running", "cancelled")
"""Statuses of trials that an earlier controller started and that have no result."""
SERIES_FILE = "series.json"


class TrialState(Value):
    """One trial of a series: its number, seed and outcome."""

    number: NonNegativeInt
    seed: NonNegativeInt
    status: TrialStatus = "waiting"
    """Status of the trial.

    `missed` means that all steps ran without reaching the target. `measured` means a run on random
    samples, which have no target.
    """
    reason: str | None = None
    run: str | None = None
    """Name of its run folder."""
    file: str | None = None
    """Name of its log in the series folder."""
    minutes: float | None = None
    """Run time, run_stop - run_start; None if the run has no such result."""
    samples_to_target: int | None = None
    """Samples at the evaluation that reached the target."""
    last_loss: float | None = None
    """Loss at the last evaluation."""
    samples_per_s: float | None = None
    """Measured samples/s of steady steps."""


class FailedStart(Value):
    """A run that failed before run_start: it does not count as a trial and stops the series."""

    trial: NonNegativeInt
    run: str
    """Name of its run folder."""
    reason: str
    log_tail: tuple[str, ...] = ()
    """Last lines of its log."""


class TrialSeries(Value):
    """Contents of series.json: the request of `paceline mlperf run`, and its trials."""

    schema_version: int = 1
    name: str
    benchmark: str
    label: str
    """Label of everything that the series produces."""
    recipe: str
    variant: str
    overrides: tuple[str, ...] = ()
    key: str
    """Key of the configuration, independent of the seed."""
    synthetic: bool = False
    """True for random samples, which measure speed only."""
    data_digest: str | None = None
    """Digest of a tiny variant's data; None for official benchmarks."""
    first_seed: NonNegativeInt
    num_trials: PositiveInt
    """Number of requested trials."""
    trial_limit_s: PositiveFloat | None = None
    """Maximum time of a trial in seconds; None for no limit."""
    drop_caches: bool = False
    """True if the kernel's file caches are dropped before every trial."""
    trials_per_job: PositiveInt = 1
    """Maximum number of consecutive trials that one job of a submission's script runs."""
    controller: Controller | None = None
    """Process that is running the series now."""
    failed_start: FailedStart | None = None
    """Run that stopped the series, until the same command resumes it."""
    trials: tuple[TrialState, ...] = ()

    @property
    def missing(self) -> list[TrialState]:
        """Trials that have yet to run."""
        return [trial for trial in self.trials if trial.status not in FINAL]

    def with_trial(self, trial: TrialState) -> TrialSeries:
        """Return the series with one trial replaced by its new state."""
        trials = tuple(trial if old.number == trial.number else old for old in self.trials)
        return self.model_copy(update={"trials": trials})

    def up_to(self, num_trials: int) -> TrialSeries:
        """Return the series with `num_trials` trials, one seed each; started trials are kept."""
        started_counts = [trial.number + 1 for trial in self.trials if trial.status != "waiting"]
        count = max(num_trials, *started_counts, 1)
        kept_trials = self.trials[:count]
        new = [
            TrialState(number=n, seed=self.first_seed + n) for n in range(len(kept_trials), count)
        ]
        return self.model_copy(update={"trials": (*kept_trials, *new), "num_trials": count})


class SeriesReport(Value):
    """Output of `paceline mlperf run`."""

    series: TrialSeries
    folder: str
    status: SeriesStatus
    """Status of the series.

    `stopped` means that a run failed before run_start. `failed` means that every trial ended, and
    none of them normally.
    """
    label: str
    official: Literal[False] = False
    score: Score | None = None
    """Score of the logs so far; None on random samples."""
    expected: ExpectedTime | None = None
    """Expected time to train; only on random samples."""
    warnings: tuple[str, ...] = ()
    resume: str | None = None
    """Command that resumes the series."""


def status_of(series: TrialSeries, alive: bool = False) -> SeriesStatus:
    """Return the status of a series; `alive` means that a process is running it."""
    if series.missing and alive:
        return "running"
    if series.missing:
        return "stopped" if series.failed_start else "unfinished"
    finished_statuses = {"success", "missed", "measured"}
    return (
        "complete"
        if any(trial.status in finished_statuses for trial in series.trials)
        else "failed"
    )


LOG_FILE = Path("mlperf") / "result.txt"
"""Path of the native trainer's result lines inside the run folder."""
TRIAL_LOG = re.compile(r".*_\d{1,2}\.log")
"""Name of a trial's log by the script of a submission."""
DROP_FILE = Path("/proc/sys/vm/drop_caches")
MISSES: dict[str, TrialStatus] = {"ok": "missed", "timeout": "timeout"}
"""Trial status by the status of a run that missed its target; any other one is a failure."""


class TrialTask(NamedTuple):
    """Trial to run, or several with consecutive seeds that one job runs in turn."""

    trial: TrialState
    num_trials: int
    """Number of trials in the series."""
    was_started: bool = False
    """True if an earlier controller started it and did not record its end."""
    later: tuple[TrialState, ...] = ()
    """Trials that the same job runs afterwards."""

    @property
    def trials(self) -> tuple[TrialState, ...]:
        """All trials of the job."""
        return (self.trial, *self.later)


def trial_tasks(series: TrialSeries) -> Iterator[TrialTask]:
    """Yield the missing trials as tasks, up to `trials_per_job` consecutive ones in each.

    Started and new trials do not share a task, because the job of started ones may still run.
    """
    jobs: list[list[TrialState]] = []
    for trial in series.missing:
        last = jobs[-1] if jobs else []
        if (
            last
            and len(last) < series.trials_per_job
            and last[-1].number + 1 == trial.number
            and (last[-1].status in STARTED) == (trial.status in STARTED)
        ):
            last.append(trial)
        else:
            jobs.append([trial])
    for job in jobs:
        first, *later = (TrialState(number=trial.number, seed=trial.seed) for trial in job)
        yield TrialTask(first, len(series.trials), job[0].status in STARTED, tuple(later))


TrialObserver = Observer[TrialTask, TrialState]
"""Observer of each trial and its outcome."""


class PlanTrial(Protocol):
    """Function that plans a job of `count` trials, the first of which is `trial`."""

    def __call__(self, trial: TrialState, count: int = 1) -> Plan:
        """Return the plan."""
        ...


@dataclass(frozen=True)
class Trials:
    """Series of trials, and the function that plans them."""

    series: TrialSeries
    benchmark: Benchmark
    folder: Path
    """Folder of the series; its run folders are in `root`."""
    root: Path
    plan_trial: PlanTrial


def open_series(folder: Path, new: TrialSeries) -> TrialSeries:
    """Return the series in `folder` if it matches the request, else a new one.

    Raises UserError if the folder holds another configuration, or another process is running it.
    """
    if not (folder / SERIES_FILE).is_file():
        return new.up_to(new.num_trials)
    series = read_value(folder / SERIES_FILE, TrialSeries)
    same = ("benchmark", "key", "first_seed")
    if any(getattr(series, name) != getattr(new, name) for name in same):
        raise UserError(
            str(folder),
            f"contains a series of {series.benchmark} with a different configuration, data or "
            "first seed",
            remedy="choose another --name",
        )
    if series.controller and series.missing and is_alive(series.controller):
        process = f"process {series.controller.pid} on {series.controller.host}"
        raise UserError(str(folder), f"is in use by {process}", remedy="wait until it exits")
    updates = {name: getattr(new, name) for name in ("trial_limit_s", "drop_caches", "overrides")}
    return series.model_copy(update=updates).up_to(new.num_trials)


class TrialSetupError(PacelineError):
    """System fault because of which no trial can start (exit code 2)."""


@dataclass
class TrialRunner(TaskRunner[TrialTask, TrialState]):
    """Runner of a series' remaining trials; it writes series.json before and after each trial."""

    trials: Trials = field(kw_only=True)
    series: TrialSeries = field(kw_only=True)

    def run_of(self, task: TrialTask, slot: JobSlot) -> TaskRun:
        plan = self._plan_or_stop(task)
        for trial in task.trials:
            self._write(trial.model_copy(update={"status": "running"}))
        return TaskRun(plan, self.series.name)

    def report_of(
        self, task: TrialTask, run: TaskRun, watch: flow.Watcher, submit: Submit | None
    ) -> RunReport:
        """Return the report of the run that an earlier controller left, else of a new run."""
        if task.was_started and (folder := self._earlier_run(run.plan.spec.key)):
            job, is_cancelled = run.plan.job, self.stop.is_set
            try:
                report = flow.resume(folder, self.root, job, watch, is_cancelled=is_cancelled)
            except SystemFaultError as fault:
                # Its job may still run: the trial stays `running`, and no other one may start.
                raise TrialSetupError(fault.where, fault.what, remedy=fault.remedy) from fault
            if report is not None:
                return report
        return super().report_of(task, run, watch, submit)

    def _earlier_run(self, key: str) -> Path | None:
        """Return the newest run of a trial of this series, unless the user cancelled it.

        `key` is the key of the trial's configuration, seed included.
        """
        for folder in reversed(groups(self.root).get(self.series.name, [])):
            record = read_record(folder)
            if record.key == key:
                is_cancelled = record.status == "cancelled" and not _has_result(trial_log(folder))
                return None if is_cancelled else folder
        return None

    def _plan_or_stop(self, task: TrialTask) -> Plan:
        """Return the task's plan, after dropping caches; a system fault here ends the series."""
        try:
            if self.series.drop_caches:
                drop_caches()
            return self.trials.plan_trial(task.trial, len(task.trials))
        except SystemFaultError as fault:  # the next trial would fail too
            raise TrialSetupError(fault.where, fault.what, remedy=fault.remedy) from fault

    def keep(self, task: TrialTask, outcome: TaskOutcome, moved: bool) -> TrialState:
        if not isinstance(outcome, Result):
            # A system fault before anything ran: the same command retries these trials.
            waiting = {"status": "waiting", "reason": str(outcome)}
            return self._write_all(
                task, [trial.model_copy(update=waiting) for trial in task.trials]
            )
        states = finished_trials(self.trials, task, outcome)
        if any(state.status == "cancelled" for state in states):
            self.task_cancelled(task, outcome)
            raise KeyboardInterrupt  # a cancellation by the launcher also ends the series
        if all(state.status == "waiting" for state in states):
            self._stop_series(states[0], outcome)  # the next one would fail before run_start, too
        return self._write_all(task, states)

    def _write_all(self, task: TrialTask, states: Sequence[TrialState]) -> TrialState:
        """Store all states, report all but the last, and return that."""
        for state in states[:-1]:
            self.observer.task_ended(task, self._write(state))
        return self._write(states[-1])

    def _stop_series(self, state: TrialState, result: Result) -> None:
        self.stop.set()
        failure = FailedStart(
            trial=state.number,
            run=result.run,
            reason=state.reason or "",
            log_tail=result.log_tail[-MAX_TAIL:],
        )
        self.series = self.series.model_copy(update={"failed_start": failure})

    def task_cancelled(self, task: TrialTask, result: Result | None) -> None:
        states = [trial.model_copy(update={"status": "cancelled"}) for trial in task.trials]
        if result is not None:
            states = finished_trials(self.trials, task, result)
        self.observer.task_ended(task, self._write_all(task, states))

    def _write(self, state: TrialState) -> TrialState:
        self.series = self.series.with_trial(state)
        write_series(self.trials.folder, self.series)
        return state


def run_trials(trials: Trials, observer: TrialObserver) -> tuple[TrialSeries, bool]:
    """Run the remaining trials; return the series, and whether the user interrupted it.

    A failed trial does not stop the series. A run that fails before run_start does not count as
    a trial and stops it, because the next one would fail too. KeyboardInterrupt ends the running
    trial cleanly and then the series. Raises UserError if a trial cannot be planned, and
    TrialSetupError if the machine is the cause.
    """
    updates = {"controller": this_controller(), "failed_start": None}
    series = trials.series.model_copy(update=updates)
    write_series(trials.folder, series)
    tasks = TaskQueue(trial_tasks(series))
    runner = TrialRunner(observer, trials.root, flow.command_line(), trials=trials, series=series)
    try:
        interrupted = runner.run_tasks(tasks)
    finally:
        series = runner.series.model_copy(update={"controller": None})
        write_series(trials.folder, series)
    return series, interrupted


def write_series(folder: Path, series: TrialSeries) -> None:
    """Write series.json."""
    write_value(folder / SERIES_FILE, series)


def finished_trials(trials: Trials, task: TrialTask, result: Result) -> list[TrialState]:
    """Return the trials with their outcomes, and copy their logs to the series folder.

    A submission's script continues with the next trial after a failed one. The status of the run is
    then that of its first trial, so that the log of each trial decides.
    """
    run = trials.root / result.run
    # Status of the run: a result is also `incomplete` if it has too few steps for a figure.
    status = read_record(run).status
    if not task.later:
        return [finished_trial(trials, task.trial, result, trial_log(run), status)]
    states: list[TrialState] = []
    for number, trial in enumerate(task.trials, 1):
        log = log_in_job(run, number)
        own_status = "ok" if _has_result(log) else "failed" if status == "ok" else status
        state = finished_trial(trials, trial, result, log, own_status)
        states.append(state.model_copy(update={"samples_per_s": None}))
    return states


def finished_trial(
    trials: Trials, trial: TrialState, result: Result, path: Path | None, status: Status
) -> TrialState:
    """Return the trial with the outcome of its run, and copy its log to the series folder."""
    run = trials.root / result.run
    rate = result.metrics.get("samples_per_s")
    trial = trial.model_copy(
        update={"run": result.run, "samples_per_s": rate.value if rate else None}
    )
    if status in ("cancelled", "incomplete") and not _has_result(path):
        return trial.model_copy(update={"status": "cancelled", "reason": result.reason})
    if path is None or "run_start" not in read_log(path).trials[0].times_ms:
        reason = f"ended before run_start: {result.reason or f'status {status}'}"
        return trial.model_copy(update={"status": "waiting", "reason": reason})
    trial = trial.model_copy(update=_copy_log(trials, trial.number, run, path))
    if trials.series.synthetic and status == "ok":
        return trial.model_copy(update={"status": "measured"})
    log = read_log(trials.folder / str(trial.file)).trials[0]
    fault = log.fault(trials.benchmark)
    if fault is None:
        figures = {"minutes": log.minutes, "samples_to_target": log.samples_to_target}
        return trial.model_copy(update={**figures, "status": "success"})
    reason = (fault[1] if status == "ok" else result.reason) or fault[1]
    failure = {"status": MISSES.get(status, "failed"), "reason": reason}
    return trial.model_copy(update={"minutes": log.minutes, **failure})


def _copy_log(trials: Trials, number: int, run: Path, log: Path) -> dict[str, Any]:
    """Copy a run's log and telemetry to the series folder; return the log's name and last loss."""
    ranks, file = read_ranks(run), f"result_{number}.txt"
    write_text(trials.folder / file, read_lines(log))
    hosts = {rank.start.host for rank in ranks.values() if rank.start}
    copy_telemetry(run, trials.folder, file.removesuffix(".txt"), hosts)
    first = ranks.get(0)
    losses = [event.loss for event in first.evaluations] if first else []
    if not ranks:  # a foreign program reports losses only in its log
        losses = [loss for _, loss in read_log(trials.folder / file).trials[0].evaluations]
    return {"file": file, "last_loss": losses[-1] if losses else None}


def _has_result(log: Path | None) -> bool:
    """Return whether a trial's program reached run_stop before a signal ended it."""
    trial = read_log(log).trials[0] if log else None
    return trial is not None and trial.has_stopped and trial.stop_status != "aborted"


def trial_log(run: Path) -> Path | None:
    """Return the file with a run's result lines: the native trainer's, else the program's log."""
    if (run / LOG_FILE).is_file():
        return run / LOG_FILE
    return next(iter(log_files(run)), None)


def log_in_job(run: Path, number: int) -> Path | None:
    """Return the log of the trial with this number, from 1, in a job of several trials."""
    # Published scripts count from 1, from 01 or from 0.
    logs = [path for path in submitted_logs(run) if TRIAL_LOG.fullmatch(path.name)]
    logs.sort(key=lambda path: int(path.stem.rpartition("_")[2]))
    return logs[number - 1] if number <= len(logs) else None


def check_cache_drop() -> None:
    """Raise UserError when this process may not drop file caches."""
    if not os.access(DROP_FILE, os.W_OK):
        raise UserError(
            "--drop-caches",
            f"{DROP_FILE} is not writable",
            remedy="run as root, or omit it; the log then reports that caches were not cleared",
        )


def drop_caches() -> None:
    """Write back and drop the kernel's file caches; raises SystemFaultError when it refuses."""
    os.sync()
    try:
        DROP_FILE.write_text("3\n")
    except OSError as error:
        raise SystemFaultError("--drop-caches", f"{DROP_FILE}: {error.strerror}") from error
