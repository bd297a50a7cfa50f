"""A series of trials of one benchmark, one seed each, run one after the other and resumable."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import PositiveFloat

from paceline.core.errors import PacelineError, SystemFaultError, UserError
from paceline.core.result import Result
from paceline.core.value import NonNegativeInt, PositiveInt, Value
from paceline.files.documents import read_value, write_text, write_value
from paceline.files.run_folder import Controller, is_alive, read_record, this_controller
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
SeriesStatus = Literal["complete", "running", "unfinished", "failed"]
FINAL = frozenset({"success", "missed", "timeout", "failed", "measured"})
"""A trial that has come to one of these is not run again."""
SERIES_FILE = "series.json"


class TrialState(Value):
    """One trial: its place in the series, and what has become of it."""

    number: NonNegativeInt
    seed: NonNegativeInt
    status: TrialStatus = "waiting"
    """`missed`: all steps were done and the target was not reached. `measured`: on random samples,
    which have no target."""
    reason: str | None = None
    run: str | None = None
    """Its run folder's name."""
    file: str | None = None
    """Its log, in the series' folder."""
    minutes: float | None = None
    samples_to_target: int | None = None
    last_loss: float | None = None
    """Of the last evaluation."""
    samples_per_s: float | None = None


class TrialSeries(Value):
    """series.json: what `paceline mlperf run` was asked for, and its trials."""

    schema_version: int = 1
    name: str
    benchmark: str
    label: str
    """What is said of whatever it yields."""
    recipe: str
    variant: str
    overrides: tuple[str, ...] = ()
    key: str
    """Of the configuration, whatever the seed."""
    synthetic: bool = False
    data_digest: str | None = None
    """Of the small siblings' data."""
    first_seed: NonNegativeInt
    wanted: PositiveInt
    trial_limit_s: PositiveFloat | None = None
    drop_caches: bool = False
    controller: Controller | None = None
    """The process that runs it now."""
    trials: tuple[TrialState, ...] = ()

    @property
    def missing(self) -> list[TrialState]:
        """Trials that are still to run."""
        return [trial for trial in self.trials if trial.status not in FINAL]

    def with_trial(self, trial: TrialState) -> TrialSeries:
        """The series with another state of one trial."""
        changed = tuple(trial if old.number == trial.number else old for old in self.trials)
        return self.model_copy(update={"trials": changed})

    def up_to(self, num_trials: int) -> TrialSeries:
        """The series with so many trials, each with its own seed; none that has begun is lost."""
        begun = [trial.number + 1 for trial in self.trials if trial.status != "waiting"]
        wanted = max(num_trials, *begun, 1)
        kept = self.trials[:wanted]
        new = [TrialState(number=n, seed=self.first_seed + n) for n in range(len(kept), wanted)]
        return self.model_copy(update={"trials": (*kept, *new), "wanted": wanted})


class SeriesAnswer(Value):
    """What `paceline mlperf run` answers."""

    series: TrialSeries
    folder: str
    status: SeriesStatus
    """`failed`: every trial has ended, and none by its own last line."""
    label: str
    official: Literal[False] = False
    score: Score | None = None
    """None on random samples."""
    expected: ExpectedTime | None = None
    """On random samples: how long the training would take."""
    warnings: tuple[str, ...] = ()
    resume: str | None = None
    """The command that goes on."""


def status_of(series: TrialSeries, alive: bool = False) -> SeriesStatus:
    """How far a series has come."""
    if series.missing:
        return "running" if alive else "unfinished"
    ended = {"success", "missed", "measured"}
    return "complete" if any(trial.status in ended for trial in series.trials) else "failed"


LOG_FILE = Path("mlperf") / "result.txt"
"""Where the native trainer leaves its result lines, inside the run folder."""
DROP_FILE = Path("/proc/sys/vm/drop_caches")
MISSES: dict[str, TrialStatus] = {"ok": "missed", "timeout": "timeout"}
"""What a run without its target is called in the series; any other status is a failure."""


class TrialTask(NamedTuple):
    """A trial that is to run."""

    trial: TrialState
    num_trials: int
    """Of the whole series."""


TrialObserver = Observer[TrialTask, TrialState]
"""Who is told of each trial, and what has become of it."""


@dataclass(frozen=True)
class Trials:
    """A series and how its trials are planned."""

    series: TrialSeries
    benchmark: Benchmark
    folder: Path
    """Of the series; the runs lie in `root`."""
    root: Path
    planned: Callable[[TrialState], Plan]


def opened(folder: Path, new: TrialSeries) -> TrialSeries:
    """The series in `folder` if it measures what is asked for, else a new one.

    Raises UserError when another configuration is there, or another process is at work on it.
    """
    if not (folder / SERIES_FILE).is_file():
        return new.up_to(new.wanted)
    series = read_value(folder / SERIES_FILE, TrialSeries)
    same = ("benchmark", "key", "first_seed")
    if any(getattr(series, name) != getattr(new, name) for name in same):
        raise UserError(
            str(folder),
            f"holds a series of {series.benchmark} with another configuration, data or first seed",
            remedy="give this one another name with --name",
        )
    if series.controller and series.missing and is_alive(series.controller):
        process = f"process {series.controller.pid} on {series.controller.host}"
        raise UserError(
            str(folder), f"{process} is at work on it", remedy="wait until it has ended"
        )
    changed = {name: getattr(new, name) for name in ("trial_limit_s", "drop_caches", "overrides")}
    return series.model_copy(update=changed).up_to(new.wanted)


class UnplannedTrialError(PacelineError):
    """The machine lets no trial be prepared (exit code 2)."""


@dataclass
class TrialRunner(TaskRunner[TrialTask, TrialState]):
    """Trials of a series that go on; its file is written before and after each."""

    trials: Trials = field(kw_only=True)
    series: TrialSeries = field(kw_only=True)

    def run_of(self, task: TrialTask, slot: JobSlot) -> TaskRun:
        plan = self._planned(task.trial)
        self._write(task.trial.model_copy(update={"status": "running"}))
        return TaskRun(plan, self.series.name)

    def _planned(self, trial: TrialState) -> Plan:
        """The trial's plan, with caches dropped; what the machine refuses here ends the series."""
        try:
            if self.series.drop_caches:
                drop_caches()
            return self.trials.planned(trial)
        except SystemFaultError as fault:  # the next trial would meet the same
            raise UnplannedTrialError(fault.where, fault.what, remedy=fault.remedy) from fault

    def keep(self, task: TrialTask, outcome: TaskOutcome, moved: bool) -> TrialState:
        if not isinstance(outcome, Result):
            # The machine's fault, before anything ran: the same command tries this trial again.
            waiting = {"status": "waiting", "reason": str(outcome)}
            return self._write(task.trial.model_copy(update=waiting))
        state = finished_trial(self.trials, task.trial, outcome)
        if state.status == "cancelled":  # by the launcher: it ends the series as the user does
            self.cancelled(task, outcome)
            raise KeyboardInterrupt
        return self._write(state)

    def cancelled(self, task: TrialTask, result: Result | None) -> None:
        state = task.trial.model_copy(update={"status": "cancelled"})
        if result is not None:
            state = finished_trial(self.trials, task.trial, result)
        self.observer.ended(task, self._write(state))

    def _write(self, state: TrialState) -> TrialState:
        self.series = self.series.with_trial(state)
        write_series(self.trials.folder, self.series)
        return state


def run_trials(trials: Trials, observer: TrialObserver) -> tuple[TrialSeries, bool]:
    """Run what is missing; the series as far as it came, and whether the user ended it.

    After a trial that fails the next one runs. KeyboardInterrupt ends the running trial cleanly and
    then the series. Raises UserError when a trial cannot be planned, UnplannedTrialError where the
    machine is to blame for that.
    """
    series = trials.series.model_copy(update={"controller": this_controller()})
    write_series(trials.folder, series)
    tasks = TaskQueue(
        TrialTask(TrialState(number=trial.number, seed=trial.seed), len(series.trials))
        for trial in series.missing
    )
    runner = TrialRunner(observer, trials.root, flow.command_line(), trials=trials, series=series)
    interrupted = runner.run_tasks(tasks)
    series = runner.series.model_copy(update={"controller": None})
    write_series(trials.folder, series)
    return series, interrupted


def write_series(folder: Path, series: TrialSeries) -> None:
    """Write series.json."""
    write_value(folder / SERIES_FILE, series)


def finished_trial(trials: Trials, trial: TrialState, result: Result) -> TrialState:
    """What a finished run means for its trial; its log gets its place in the series' folder."""
    run = trials.root / result.run
    # How the run ended; a result is also `incomplete` when too few steps make no figure.
    status = read_record(run).status
    rate = result.metrics.get("samples_per_s")
    trial = trial.model_copy(
        update={"run": result.run, "samples_per_s": rate.value if rate else None}
    )
    if status in ("cancelled", "incomplete"):
        return trial.model_copy(update={"status": "cancelled", "reason": result.reason})
    trial = trial.model_copy(update=_kept_log(trials, trial.number, run))
    if trials.series.synthetic and status == "ok":
        return trial.model_copy(update={"status": "measured"})
    log = read_log(trials.folder / str(trial.file)).trials[0]
    fault = log.fault(trials.benchmark)
    if fault is None:
        reached = {"minutes": log.minutes, "samples_to_target": log.samples_to_target}
        return trial.model_copy(update={**reached, "status": "success"})
    reason = (fault[1] if status == "ok" else result.reason) or fault[1]
    failure = {"status": MISSES.get(status, "failed"), "reason": reason}
    return trial.model_copy(update={"minutes": log.minutes, **failure})


def _kept_log(trials: Trials, number: int, run: Path) -> dict[str, Any]:
    """Put a run's log and telemetry into the series' folder; the log's name and its last loss."""
    ranks, file, log = read_ranks(run), f"result_{number}.txt", trial_log(run)
    # A trial that died before its first line is one of the series all the same.
    text = log.read_text(encoding="utf-8", errors="replace") if log else ""
    write_text(trials.folder / file, text)
    hosts = {rank.start.host for rank in ranks.values() if rank.start}
    copy_telemetry(run, trials.folder, file.removesuffix(".txt"), hosts)
    first = ranks.get(0)
    losses = [event.loss for event in first.evaluations] if first else []
    if not ranks:  # of a foreign program its log tells
        losses = [loss for _, loss in read_log(trials.folder / file).trials[0].evaluations]
    return {"file": file, "last_loss": losses[-1] if losses else None}


def trial_log(run: Path) -> Path | None:
    """The file of a run with its result lines: the native trainer's, else the program's log."""
    if (run / LOG_FILE).is_file():
        return run / LOG_FILE
    return next(iter(log_files(run)), None)


def check_cache_drop() -> None:
    """Raise UserError when this process may not drop file caches."""
    if not os.access(DROP_FILE, os.W_OK):
        raise UserError(
            "--drop-caches",
            f"{DROP_FILE} cannot be written by this user",
            remedy="run as root, or leave it out: the log then says that caches were not cleared",
        )


def drop_caches() -> None:
    """Write back and drop the kernel's file caches; raises SystemFaultError when it refuses."""
    os.sync()
    try:
        DROP_FILE.write_text("3\n")
    except OSError as error:
        raise SystemFaultError("--drop-caches", f"{DROP_FILE}: {error.strerror}") from error
