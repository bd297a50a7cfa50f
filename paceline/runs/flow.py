"""One run from start to report: the only module that joins engine, launcher, probe and store."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.core.errors import PacelineError, SystemFaultError, UserError
from paceline.core.hardware import Dtype
from paceline.core.job import Job
from paceline.core.run import RunSpec
from paceline.core.run_report import RunReport
from paceline.core.secrets import redacted_words
from paceline.core.steps import FLOATS, Step, Steps
from paceline.core.units import counted, si
from paceline.engines import engine, last_step
from paceline.files.documents import write_text, write_value
from paceline.files.run_folder import (
    REPORT_FILE,
    RESULT_FILE,
    RUN_FILE,
    STEPS_FILE,
    Repeat,
    RunRecord,
    Trial,
    new_run_folder,
    read_record,
    this_controller,
)
from paceline.machines import Handle, launcher
from paceline.machines.placement import device_kind
from paceline.machines.probe.container import oom_kills
from paceline.machines.probe.gemm import GemmProbe
from paceline.machines.probe.inventory import inventory
from paceline.machines.probe.telemetry import sampled
from paceline.runs import outcome
from paceline.runs.checkpoints import remove_torn_checkpoints
from paceline.runs.data_files import make_tokens, texts_of
from paceline.runs.ending import Ending, log_tail
from paceline.runs.logged_run import NATIVE, ending_of, with_told_facts
from paceline.runs.plan import Plan, probe_machine, reachable_rate
from paceline.runs.step_follower import SignsOfLife, follower
from paceline.runs.surroundings import write_surroundings

POLL_S = 0.2
STEPS_AT_ONCE = 10_000
"""Rows of the columns that are turned into text at once, which bounds the memory it takes."""
TEARDOWN_LIMIT_S = 60.0
"""How long a launcher may take to end after the first rank has finished all its steps."""
AFTER_FAILURE_S = 5.0
"""How long it may take to end the other ranks when one has failed; a stopped one never answers."""


@dataclass(frozen=True)
class Progress:
    """What a watcher is told: a phase by name, or the latest step."""

    phase: str
    step: Step | None = None
    total_steps: int = 0
    tokens_per_step: int = 0


Watcher = Callable[[Progress], None]


class UnwrittenReportError(SystemFaultError):
    """A run was measured and its report cannot be written; `report` can still be shown."""

    def __init__(self, fault: SystemFaultError, report: RunReport) -> None:
        super().__init__(fault.where, fault.what, allowed=fault.allowed, remedy=fault.remedy)
        self.report = report


class CancelledRunError(Exception):
    """The user stopped the run; `report` tells what it had measured."""

    def __init__(self, report: RunReport) -> None:
        super().__init__("the run was cancelled")
        self.report = report


def run(
    plan: Plan,
    root: Path,
    command: list[str],
    watch: Watcher,
    *,
    tag: str | None = None,
    probe: bool = True,
    group: str | None = None,
    repeat: Repeat | None = None,
    trial: Trial | None = None,
    stopped: Callable[[], bool] = bool,
    submit: Callable[[Job, Path], Handle] | None = None,
) -> RunReport:
    """Train as planned and return the report; the run folder holds everything at every moment.

    A failed run is a result with a status, not an exception. KeyboardInterrupt ends the run's
    processes and becomes CancelledRunError. Raises UnwrittenReportError when the disk is full.
    `group`, `repeat` and `trial` say what the run is part of. `stopped` is asked
    again and again: a run in a thread of its own, which no KeyboardInterrupt reaches, ends by it.
    `submit` starts, in the launcher's place and together with other runs, what it has prepared.
    Raises UserError, and leaves no folder, where what the engine runs in is not installed.
    """
    absent = engine(plan.spec.engine).missing(plan.spec)
    if absent:
        raise UserError(f"engine {plan.spec.engine}", absent)
    make_tokens(plan.token_files, lambda phase: watch(Progress(phase)))
    membership = {"tag": tag, "group": group, "repeat": repeat, "trial": trial}
    folder, record = _begin(plan, root, command, membership)
    try:
        here = plan.spec.cluster.runs_here
        if probe and here and not plan.spec.bare:
            watch(Progress("measuring the reachable rate"))
            record = _with_reachable_rate(record, plan)
        watch(Progress("starting"))
        with sampled(folder) if here else contextlib.nullcontext():
            record = _launch_and_wait(plan, folder, record, watch, stopped, submit)
    except KeyboardInterrupt:
        record = read_record(folder)  # it may have been launched meanwhile
        record = _ended(record, Ending("cancelled", "interrupted by the user"), None, folder)
        write_value(folder / RUN_FILE, record)
        raise CancelledRunError(finish(folder, root)) from None
    except PacelineError as fault:
        with contextlib.suppress(SystemFaultError):
            ending = Ending("failed", str(fault), hosts=fault.hosts)
            ended = _ended(read_record(folder), ending, None, folder)
            write_value(folder / RUN_FILE, ended)
        raise
    write_value(folder / RUN_FILE, record)
    watch(Progress("writing the report"))
    return finish(folder, root)


def finish(folder: Path, root: Path) -> RunReport:
    """Compute a folder's result from its raw files, index it, write it with steps and report."""
    # Imported where the page is written: its charts need Altair, which is slow to import, and most
    # verbs import this module only to begin.
    from paceline.report.html import render_document
    from paceline.report.run_document import run_document

    report = _indexed(outcome.evaluate(folder), folder, root)
    written = {RESULT_FILE, STEPS_FILE, REPORT_FILE}
    report = replace(report, files=tuple(sorted({*report.files, *written})))
    try:
        write_value(folder / RESULT_FILE, report.result)
        write_text(folder / STEPS_FILE, _merged_lines(report.steps))
        write_text(folder / REPORT_FILE, render_document(run_document(report)))
    except SystemFaultError as fault:
        raise UnwrittenReportError(fault, report) from fault
    return report


def _indexed(report: RunReport, folder: Path, root: Path) -> RunReport:
    """The report of an indexed run; an index that cannot be written only adds a warning."""
    # Brings SQLAlchemy along, a quarter of what this file would take to import.
    from paceline.files.index import Index

    try:
        Index.open(root).add(folder, report.result)
    except SystemFaultError as fault:
        warnings = (*report.result.warnings, f"the index was not updated: {fault}")
        return replace(report, result=report.result.model_copy(update={"warnings": warnings}))
    return report


def _begin(
    plan: Plan, root: Path, command: list[str], membership: dict[str, Any]
) -> tuple[Path, RunRecord]:
    """The run's new folder with its record, or neither: an interrupt leaves no empty folder."""
    folder = new_run_folder(root, plan.spec, membership["tag"])
    try:
        record = _new_record(plan, folder, command).model_copy(update=membership)
        write_value(folder / RUN_FILE, record)
        read_record(folder)  # figures of what cannot be read again would be lost
        write_surroundings(folder, plan.spec, plan.inventory, texts_of(plan.token_files))
    except BaseException:  # what has no whole record is no run
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder, record


def _new_record(plan: Plan, folder: Path, command: list[str]) -> RunRecord:
    return RunRecord(
        name=folder.name,
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        command=redacted_words(command, os.environ),
        spec=plan.spec,
        status="queued",
        controller=this_controller(),
        paceline_version=__version__,
        warnings=plan.notices,
    )


def _with_reachable_rate(record: RunRecord, plan: Plan) -> RunRecord:
    probe = reachable_rate(plan.spec, plan.inventory)
    best = probe.best(plan.spec.training.dtype) if probe else None
    if probe is None or best is None:
        warning = "the reachable rate of this machine could not be measured"
        return record.model_copy(update={"warnings": (*record.warnings, warning)})
    on_cpu = plan.spec.cluster.device == "cpu"
    devices = 1 if on_cpu else plan.spec.world_size
    threads = probe.threads if on_cpu else None
    where = counted(threads, "thread") if threads else "one device"
    source = (
        f"best of {sum(r.dtype == best.dtype for r in probe.rows)} matrix products on {where}: "
        f"{best.m}x{best.n}x{best.k} {best.dtype} {si(best.flops_per_s, 'FLOP/s')}, "
        f"{best.statistic.removesuffix(' n')} {best.repeats}, spread {best.spread:.1%}"
    )
    return record.model_copy(
        update={
            "achievable_flops_per_s": best.flops_per_s * devices,
            "achievable_source": source,
        }
    )


def _launch_and_wait(
    plan: Plan,
    folder: Path,
    record: RunRecord,
    watch: Watcher,
    stopped: Callable[[], bool],
    submit: Callable[[Job, Path], Handle] | None = None,
) -> RunRecord:
    job_launcher = launcher(plan.spec.cluster.launcher)
    job_launcher.prepare(plan.job, folder)
    kills_before = oom_kills()
    now = {"launched_unix": time.time(), "launched_monotonic_s": time.monotonic()}
    record = record.model_copy(update={"status": "running", **now})
    write_value(folder / RUN_FILE, record)
    job = (submit or job_launcher.submit)(plan.job, folder)
    try:
        code, ending = _watch(job, plan.spec, folder, watch, stopped)
        while ending is None and job.restart():
            code, ending = _watch(job, plan.spec, folder, watch, stopped)
    except BaseException:
        job.stop()
        raise
    finally:
        remove_torn_checkpoints(folder)
    record = record.model_copy(update={"warnings": (*record.warnings, *job.warnings)})
    if ending is not None and plan.spec.engine != NATIVE:
        # A program that hangs when all its work is done has done its work.
        by_log = ending_of(folder, record, code or 1, False, None)
        if by_log.status == "ok":
            late = f"it was ended behind its last step: {ending.reason}"
            ending = Ending("ok", None, (late,))
    if ending is None:
        # Elsewhere the ranks do not share this machine's memory.
        killed = plan.spec.cluster.runs_here and oom_kills() > kills_before
        ending = ending_of(folder, record, code, killed, job.verdict())
    return _ended(with_told_facts(record, folder), ending, code, folder)


def _watch(
    job: Handle, spec: RunSpec, folder: Path, watch: Watcher, stopped: Callable[[], bool]
) -> tuple[int, Ending | None]:
    """Follow the first rank until the job ends; the exit code, and how it ended if we ended it."""
    steps = follower(folder, spec.engine)
    signs = SignsOfLife(folder, spec.hang_limit_s)
    finished_at: float | None = None
    phase = ""
    while True:
        if stopped():
            raise KeyboardInterrupt
        code = job.poll()
        if job.phase != phase:
            phase = job.phase
            watch(Progress(phase))
        for step in steps.new_steps():
            watch(_progress(spec, step))
        if code is not None:
            job.sweep()
            return code, None
        if job.timed_out:
            limit = f"the time limit of {spec.time_limit_s:g} s passed"
            return job.stop(), Ending("timeout", limit)
        signs.look()
        if signs.failed_s > AFTER_FAILURE_S:
            return job.stop(), None
        if signs.silent_s > signs.limit_s:
            silence = f"no rank gave a sign of life for {signs.silent_s:.0f} s"
            return job.stop(), Ending("failed", silence)
        if steps.finished:
            finished_at = finished_at or time.monotonic()
            if time.monotonic() - finished_at > TEARDOWN_LIMIT_S:
                return job.stop(), None
        time.sleep(POLL_S)


def _progress(spec: RunSpec, step: Step) -> Progress:
    tokens = 0 if spec.bare else spec.training.global_batch * spec.training.seq_len
    return Progress("training", step, last_step(spec) or 0, tokens)


def _ended(record: RunRecord, ending: Ending, code: int | None, folder: Path) -> RunRecord:
    on_request = ending.status in ("cancelled", "timeout")
    tail = () if ending.status == "ok" else tuple(log_tail(folder, ending.rank, on_request))
    return record.model_copy(
        update={
            "status": ending.status,
            "reason": ending.reason,
            "faulty_hosts": ending.hosts,
            "warnings": (*record.warnings, *ending.warnings),
            "ended_unix": time.time(),
            "exit_code": code,
            "log_tail": tail,
        }
    )


def _merged_lines(steps: Steps) -> Iterator[str]:
    """The ranks merged, one JSON object a step; null where the log said no number."""
    for start in range(0, len(steps), STEPS_AT_ONCE):
        part = steps.select(slice(start, start + STEPS_AT_ONCE))
        columns = {name: part[name].tolist() for name in FLOATS}
        for row, number in enumerate(part.index.tolist()):
            values = {name: column[row] for name, column in columns.items()}
            finite = {name: value if isfinite(value) else None for name, value in values.items()}
            yield json.dumps({"step": number, **finite}) + "\n"


def probe_this_machine(dtypes: tuple[Dtype, ...], device: str, fresh: bool) -> GemmProbe:
    """The matrix-product probe of this machine's device (`auto`, `cpu` or `cuda`)."""
    machine = inventory()
    kind, _ = device_kind(device, machine)
    return probe_machine(machine, kind, dtypes, fresh=fresh)


def command_line() -> list[str]:
    """How this process was called, for the record."""
    return [os.path.basename(sys.argv[0]), *sys.argv[1:]]  # noqa: PTH119
