"""Runs a series of MLPerf trials: one seed each, one after the other, to be gone on with at any time."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.result import Result
from paceline.files.run_folder import (
    is_alive,
    read_record,
    read_value,
    this_controller,
    write_text,
    write_value,
)
from paceline.mlperf.result_logs import read_log
from paceline.mlperf.rules import Benchmark
from paceline.mlperf.run.series import SERIES_FILE, TrialSeries, TrialState, TrialStatus
from paceline.mlperf.score.energy import copied_telemetry
from paceline.runs import flow
from paceline.runs.ending import read_ranks
from paceline.runs.plan import Plan

LOG_FILE = Path("mlperf") / "result.txt"
"""Where a run leaves its result lines, inside its folder."""
DROP_FILE = Path("/proc/sys/vm/drop_caches")
ENDED: dict[str, TrialStatus] = {"ok": "missed", "timeout": "timeout"}
"""What a run that did not reach its target is called in the series; any other status is a failure."""


class Observer(Protocol):
    """Who is told how a series goes on."""

    def running(
        self, plan: Plan, trial: TrialState, series: TrialSeries
    ) -> AbstractContextManager[flow.Watcher]:
        """A watcher for one trial, while it runs."""
        ...

    def ended(self, trial: TrialState, series: TrialSeries) -> None:
        """One trial has ended."""
        ...


@dataclass(frozen=True)
class Trials:
    """A series and how its trials are planned."""

    series: TrialSeries
    benchmark: Benchmark
    folder: Path
    """Of the series; the runs lie in `root`."""
    root: Path
    planned: Callable[[TrialState], Plan]


def opened(folder: Path, asked: TrialSeries) -> TrialSeries:
    """The series in `folder` if it measures what is asked for, else a new one.

    Raises UserError when another configuration is there, or another process is at work on it.
    """
    if not (folder / SERIES_FILE).is_file():
        return asked.up_to(asked.wanted)
    known = read_value(folder / SERIES_FILE, TrialSeries)
    if (known.benchmark, known.key, known.first_seed) != (
        asked.benchmark,
        asked.key,
        asked.first_seed,
    ):
        raise UserError(
            str(folder), f"holds a series of {known.benchmark} with another configuration, data or first seed",
            remedy="give this one another name with --name",
        )  # fmt: skip
    if known.controller and known.missing and is_alive(known.controller):
        raise UserError(str(folder), f"process {known.controller.pid} on {known.controller.host} is at work "
                        "on it", remedy="wait until it has ended")  # fmt: skip
    changed = {name: getattr(asked, name) for name in ("trial_limit_s", "drop_caches", "overrides")}
    return known.model_copy(update=changed).up_to(max(asked.wanted, len(known.trials)))


def run_trials(trials: Trials, observer: Observer) -> tuple[TrialSeries, bool]:
    """Run what is missing; the series as far as it came, and whether the user ended it.

    A trial that fails is told and the next one runs. KeyboardInterrupt ends the running trial cleanly
    and then the series. Raises UserError when a trial cannot be planned.
    """
    series = trials.series.model_copy(update={"controller": this_controller()})
    keep(trials.folder, series)
    interrupted = False
    for left in series.missing:
        trial = TrialState(number=left.number, seed=left.seed)
        try:
            if series.drop_caches:
                drop_caches()
            plan = trials.planned(trial)
            series = series.with_trial(trial.model_copy(update={"status": "running"}))
            keep(trials.folder, series)
            with observer.running(plan, trial, series) as watch:
                ended = _run(trials, plan, trial, watch)
        except KeyboardInterrupt:
            ended, interrupted = trial.model_copy(update={"status": "cancelled"}), True
        interrupted = interrupted or ended.status == "cancelled"
        series = series.with_trial(ended)
        keep(trials.folder, series)
        observer.ended(ended, series)
        if interrupted:
            break
    series = series.model_copy(update={"controller": None})
    keep(trials.folder, series)
    return series, interrupted


def keep(folder: Path, series: TrialSeries) -> None:
    """Write series.json."""
    write_value(folder / SERIES_FILE, series)


def _run(trials: Trials, plan: Plan, trial: TrialState, watch: flow.Watcher) -> TrialState:
    group = trials.series.name
    try:
        report = flow.run(plan, trials.root, flow.command_line(), watch, probe=False, group=group)
        result = report.result
    except flow.UnwrittenReportError as fault:
        result = fault.report.result
    except flow.CancelledRunError as cancelled:
        result = cancelled.report.result
    except SystemFaultError as fault:
        # The machine's fault, before anything ran: the same command tries this trial again.
        return trial.model_copy(update={"status": "waiting", "reason": str(fault)})
    return told(trials, trial, result)


def told(trials: Trials, trial: TrialState, result: Result) -> TrialState:
    """What a finished run means for its trial; its log gets its place in the series' folder."""
    run = trials.root / result.run
    # How the run ended; a result is also `incomplete` when too few steps make no figure.
    ended = read_record(run).status
    rate = result.metrics.get("samples_per_s")
    known = {"run": result.run, "samples_per_s": rate.value if rate else None}
    if ended in ("cancelled", "incomplete"):
        return trial.model_copy(update={**known, "status": "cancelled", "reason": result.reason})
    ranks = read_ranks(run, "native")
    first = ranks.get(0)
    losses = [event.loss for event in first.evaluations] if first else []
    file = f"result_{trial.number}.txt"
    log = run / LOG_FILE
    # A trial that died before its first line is one of the series all the same.
    write_text(trials.folder / file, log.read_text(encoding="utf-8") if log.is_file() else "")
    hosts = {rank.start.host for rank in ranks.values() if rank.start}
    copied_telemetry(run, trials.folder, file.removesuffix(".txt"), hosts)
    known |= {"file": file, "last_loss": losses[-1] if losses else None}
    if trials.series.synthetic and ended == "ok":
        return trial.model_copy(update={**known, "status": "measured"})
    said = read_log(trials.folder / file).trials[0]
    fault = said.fault(trials.benchmark)
    known["minutes"] = said.minutes
    if fault is None:
        known["samples_to_target"] = said.samples_to_target
        return trial.model_copy(update={**known, "status": "success"})
    status, why = ENDED.get(ended, "failed"), fault[1] if ended == "ok" else result.reason
    return trial.model_copy(update={**known, "status": status, "reason": why or fault[1]})


def check_cache_drop() -> None:
    """Raise UserError when this process may not drop file caches."""
    if not os.access(DROP_FILE, os.W_OK):
        raise UserError("--drop-caches", f"{DROP_FILE} cannot be written by this user",
                        remedy="run as root, or leave it out: the log then says that caches were "
                        "not cleared")  # fmt: skip


def drop_caches() -> None:
    """Write back and drop the kernel's file caches; raises SystemFaultError when it refuses."""
    os.sync()
    try:
        DROP_FILE.write_text("3\n")
    except OSError as error:
        raise SystemFaultError("--drop-caches", f"{DROP_FILE}: {error.strerror}") from error
