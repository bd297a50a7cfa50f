"""Flow of one run from start to report, which joins engine, launcher, probe and run folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.core.errors import PacelineError, SystemFaultError, UserError
from paceline.core.hardware import Dtype
from paceline.core.job import Job
from paceline.core.result import FINAL
from paceline.core.run import RunSpec
from paceline.core.run_report import RunReport
from paceline.core.secrets import redacted_words
from paceline.core.steps import Step
from paceline.core.units import pluralize, si
from paceline.engines import ends_at_target, engine, last_step
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
from paceline.files.temporary_locks import remove_abandoned
from paceline.machines import Handle, launcher
from paceline.machines.placement import device_kind
from paceline.machines.probe.container import oom_kills
from paceline.machines.probe.gemm import GemmProbe
from paceline.machines.probe.inventory import inventory
from paceline.machines.probe.telemetry import sample_telemetry
from paceline.runs import outcome
from paceline.runs.checkpoints import remove_incomplete_checkpoints
from paceline.runs.data_files import input_texts, make_tokens
from paceline.runs.ending import Ending, log_tail
from paceline.runs.fabric import fabric_proof
from paceline.runs.logged_run import NATIVE, find_run_ending, with_reported_settings
from paceline.runs.plan import Plan, measure_gemm_rate, probe_machine
from paceline.runs.recomputation import merged_lines, run_page
from paceline.runs.run_environment import write_environment
from paceline.runs.step_follower import JobHeartbeat, make_follower

POLL_S = 0.2
START_SILENCE_S = 3600.0
"""Maximum silence of another framework before its first step, which may compile for long."""
TEARDOWN_LIMIT_S = 60.0
"""Maximum time for a launcher to end after the first rank has finished all its steps."""
AFTER_FAILURE_S = 5.0
"""Maximum time for a launcher to end the other ranks after a failure; a stopped one stays."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run: the name of its phase, or the latest step."""

    phase: str
    step: Step | None = None
    total_steps: int = 0
    tokens_per_step: int = 0


Watcher = Callable[[Progress], None]


class UnwrittenReportError(SystemFaultError):
    """Failure to write a measured run's report; `report` can still be shown."""

    def __init__(self, fault: SystemFaultError, report: RunReport) -> None:
        super().__init__(fault.where, fault.what, allowed=fault.allowed, remedy=fault.remedy)
        self.report = report


class CancelledRunError(Exception):
    """Exception for a run that the user stopped; `report` has the results so far."""

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
    is_cancelled: Callable[[], bool] = bool,
    submit: Callable[[Job, Path], Handle] | None = None,
) -> RunReport:
    """Train as planned and return the report; the run folder is complete at any time.

    A failed run is a result with a status, not an exception. KeyboardInterrupt ends the run's
    processes and becomes CancelledRunError. Raises UnwrittenReportError when the disk is full.
    Raises UserError, and leaves no folder, if the engine's framework is not installed or the
    launcher refuses the cluster's settings.

    `group`, `repeat` and `trial` say what the run is part of. `is_cancelled` is polled: it ends a
    run in a thread, which a KeyboardInterrupt does not reach. `submit` replaces the launcher's
    method in order to start several prepared runs together.
    """
    absent = engine(plan.spec.engine).missing(plan.spec)
    if absent:
        raise UserError(f"engine {plan.spec.engine}", absent)
    _ = plan.script  # settings that the launcher refuses are refused before there is a folder
    make_tokens(plan.token_files, lambda phase: watch(Progress(phase)))
    membership = {"tag": tag, "group": group, "repeat": repeat, "trial": trial}
    for place in (Path(tempfile.gettempdir()), root):
        remove_abandoned(place)
    folder, record = _create_run_folder(plan, root, command, membership)
    try:
        runs_here = plan.spec.cluster.runs_here
        if probe and runs_here and not plan.spec.bare:
            watch(Progress("measuring GEMM throughput"))
            record = _with_gemm_rate(record, plan)
        watch(Progress("starting"))
        with sample_telemetry(folder) if runs_here else contextlib.nullcontext():
            record = _launch_and_wait(plan, folder, record, watch, is_cancelled, submit)
    except KeyboardInterrupt:
        record = read_record(folder)  # the launch may have changed the record
        record = _with_ending(record, Ending("cancelled", "interrupted by the user"), None, folder)
        write_value(folder / RUN_FILE, record)
        raise CancelledRunError(finish(folder, root)) from None
    except PacelineError as fault:
        with contextlib.suppress(SystemFaultError):
            ending = Ending("failed", str(fault), hosts=fault.hosts)
            record = _with_ending(read_record(folder), ending, None, folder)
            write_value(folder / RUN_FILE, record)
        raise
    write_value(folder / RUN_FILE, record)
    watch(Progress("writing the report"))
    return finish(folder, root)


def resume(
    folder: Path,
    root: Path,
    job: Job,
    watch: Watcher,
    *,
    is_cancelled: Callable[[], bool] = bool,
) -> RunReport | None:
    """Follow a run whose controller has died to its end, and return its report.

    A run that has ended is only evaluated. Returns None for a run that ended with its controller.
    KeyboardInterrupt ends the run's job and becomes CancelledRunError.
    """
    record = read_record(folder)
    if record.status not in FINAL:
        now = this_controller()
        if record.controller is None or record.controller.boot_id != now.boot_id:
            # Its monotonic clock does not continue in another boot or on another host.
            record = record.model_copy(update={"launched_monotonic_s": None})
        record = record.model_copy(update={"controller": now})
        try:
            final_record = _follow_orphan(job, folder, record, watch, is_cancelled)
        except KeyboardInterrupt:
            ending = Ending("cancelled", "interrupted by the user")
            write_value(folder / RUN_FILE, _with_ending(record, ending, None, folder))
            raise CancelledRunError(finish(folder, root)) from None
        if final_record is None:
            return None
        write_value(folder / RUN_FILE, final_record)
    watch(Progress("writing the report"))
    return finish(folder, root)


def finish(folder: Path, root: Path) -> RunReport:
    """Compute a run's result from its raw files, write result, steps and report, and index it."""
    report = outcome.evaluate(folder)
    output_files = {RESULT_FILE, STEPS_FILE, REPORT_FILE}
    report = replace(report, files=tuple(sorted({*report.files, *output_files})))
    try:
        write_value(folder / RESULT_FILE, report.result)
        write_text(folder / STEPS_FILE, merged_lines(report.steps))
        write_text(folder / REPORT_FILE, run_page(report))
    except SystemFaultError as fault:
        raise UnwrittenReportError(fault, _indexed(report, folder, root)) from fault
    return _indexed(report, folder, root)


def _indexed(report: RunReport, folder: Path, root: Path) -> RunReport:
    """Add the run to the index; add a warning to the report if the index cannot be written."""
    # Importing SQLAlchemy would take a quarter of the import time of this file.
    from paceline.files.index import Index

    try:
        Index.open(root).add(folder, report.result)
    except SystemFaultError as fault:
        warnings = (*report.result.warnings, f"the index was not updated: {fault}")
        return replace(report, result=report.result.model_copy(update={"warnings": warnings}))
    return report


def _create_run_folder(
    plan: Plan, root: Path, command: list[str], membership: dict[str, Any]
) -> tuple[Path, RunRecord]:
    """Create the run's folder and record; after an error or an interrupt neither remains."""
    folder = new_run_folder(root, plan.spec, membership["tag"])
    try:
        record = _new_record(plan, folder, command).model_copy(update=membership)
        write_value(folder / RUN_FILE, record)
        read_record(folder)  # results of an unreadable record would be lost
        write_environment(folder, plan.spec, plan.inventory, input_texts(plan.token_files))
    except BaseException:  # a folder without a complete record is not a run
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


def _with_gemm_rate(record: RunRecord, plan: Plan) -> RunRecord:
    probe = measure_gemm_rate(plan.spec, plan.inventory)
    best = probe.best(plan.spec.training.dtype) if probe else None
    if probe is None or best is None:
        warning = "the GEMM throughput of this machine could not be measured"
        return record.model_copy(update={"warnings": (*record.warnings, warning)})
    on_cpu = plan.spec.cluster.device == "cpu"
    devices = 1 if on_cpu else plan.spec.world_size
    threads = probe.threads if on_cpu else None
    where = pluralize(threads, "thread") if threads else "one device"
    source = (
        f"best of {sum(r.dtype == best.dtype for r in probe.rows)} GEMMs on {where}: "
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
    is_cancelled: Callable[[], bool],
    submit: Callable[[Job, Path], Handle] | None = None,
) -> RunRecord:
    job_launcher = launcher(plan.spec.cluster.launcher)
    job_launcher.prepare(plan.job, folder)
    kills_before = oom_kills()
    now = {"launched_unix": time.time(), "launched_monotonic_s": time.monotonic()}
    record = record.model_copy(update={"status": "running", **now})
    write_value(folder / RUN_FILE, record)
    job = (submit or job_launcher.submit)(plan.job, folder)
    return _wait(
        job,
        plan.spec,
        folder,
        record,
        watch=watch,
        is_cancelled=is_cancelled,
        kills_before=kills_before,
    )


def _follow_orphan(
    job: Job,
    folder: Path,
    record: RunRecord,
    watch: Watcher,
    is_cancelled: Callable[[], bool],
) -> RunRecord | None:
    """Return the record of a run whose controller has died, at its end; None if it has no end."""
    spec = record.spec
    assert spec is not None
    code: int | None = None
    if spec.cluster.capabilities.outlives_controller:
        machine = launcher(spec.cluster.launcher)
        if handle := machine.attach(job, folder):
            write_value(folder / RUN_FILE, record)
            return _wait(
                handle,
                spec,
                folder,
                record,
                watch=watch,
                is_cancelled=is_cancelled,
                kills_before=oom_kills(),
            )
        code = machine.ended_code(folder)
    ending = find_run_ending(folder, record, code or 0, False, None)
    # With other launchers the processes ended with their controller: only their own words count.
    if code is None and ending.status not in ("ok", "oom", "nan"):
        return None
    return _with_ending(with_reported_settings(record, folder), ending, code, folder)


def _wait(
    job: Handle,
    spec: RunSpec,
    folder: Path,
    record: RunRecord,
    *,
    watch: Watcher,
    is_cancelled: Callable[[], bool],
    kills_before: int,
) -> RunRecord:
    """Follow a started job to its end and return the run's record with that end.

    `kills_before` is the number of processes that the kernel's OOM killer ended before the start.
    """
    try:
        code, ending = _watch(job, spec, folder, watch, is_cancelled)
        while ending is None and job.restart():
            code, ending = _watch(job, spec, folder, watch, is_cancelled)
    except BaseException:  # an interrupt must also end the job
        job.stop()
        raise
    finally:
        remove_incomplete_checkpoints(folder)
    record = record.model_copy(update={"warnings": (*record.warnings, *job.warnings)})
    if ending is not None and spec.engine != NATIVE:
        # A program that hangs after all its steps has still completed its work.
        log_ending = find_run_ending(folder, record, code or 1, False, None)
        if log_ending.status == "ok":
            late = f"it was stopped after its last step: {ending.reason}"
            ending = Ending("ok", None, (late,))
    if ending is None:
        # On other machines the ranks do not use this machine's memory.
        oom_killed = spec.cluster.runs_here and oom_kills() > kills_before
        ending = find_run_ending(folder, record, code, oom_killed, job.verdict())
    if ending.status == "ok" and spec.cluster.require_transport:
        proof = fabric_proof(folder, spec)
        fault = proof.problem if proof else "there is only one rank, and no collectives"
        ending = Ending("failed", fault, on_request=True) if fault else ending
    return _with_ending(with_reported_settings(record, folder), ending, code, folder)


def _watch(
    job: Handle, spec: RunSpec, folder: Path, watch: Watcher, is_cancelled: Callable[[], bool]
) -> tuple[int, Ending | None]:
    """Follow the first rank until the job ends; return its exit code, and the ending if stopped."""
    steps = make_follower(folder, spec.engine)
    heartbeat = JobHeartbeat(folder, spec.hang_limit_s)
    finished_at: float | None = None
    phase, has_steps = "", False
    while True:
        if is_cancelled():
            raise KeyboardInterrupt
        code = job.poll()
        if job.phase != phase:
            phase = job.phase
            watch(Progress(phase))
        for step in steps.new_steps():
            if not has_steps and (fault := _fabric_fault(folder, spec, watch)):
                return job.stop(), Ending("failed", fault, on_request=True)
            has_steps = True
            watch(_progress(spec, step))
        if code is not None:
            job.sweep()
            return code, None
        if job.timed_out:
            limit = f"the time limit of {spec.time_limit_s:g} s passed"
            return job.stop(), Ending("timeout", limit)
        heartbeat.check()
        if heartbeat.failed_s > AFTER_FAILURE_S:
            return job.stop(), None
        if heartbeat.silent_s > _silence_limit_s(spec, heartbeat, has_steps):
            silence = f"no rank showed activity for {heartbeat.silent_s:.0f} s"
            return job.stop(), Ending("failed", silence)
        if steps.finished:
            finished_at = finished_at or time.monotonic()
            if time.monotonic() - finished_at > TEARDOWN_LIMIT_S:
                return job.stop(), None
        time.sleep(POLL_S)


def _fabric_fault(folder: Path, spec: RunSpec, watch: Watcher) -> str | None:
    """Show what carries collectives, once the first step is there.

    Return why the run does not meet its requirement, as far as the evidence has arrived.
    """
    proof = fabric_proof(folder, spec)
    if proof is None:
        return None
    if proof.is_notable:
        watch(Progress(proof.sentence))
    return proof.problem if proof.label else None


def _silence_limit_s(spec: RunSpec, heartbeat: JobHeartbeat, has_steps: bool) -> float:
    """Return the silence that ends a run, longer before the first step of another program.

    Such a program may compile for half an hour without a line. The native trainer writes all the
    time. A `hang_limit_s` other than the default applies from the start.
    """
    is_default = spec.hang_limit_s == RunSpec.model_fields["hang_limit_s"].default
    waits = spec.engine != NATIVE and not has_steps and is_default
    return max(heartbeat.limit_s, START_SILENCE_S) if waits else heartbeat.limit_s


def _progress(spec: RunSpec, step: Step) -> Progress:
    batch = int(step.global_batch or spec.training.global_batch)
    evaluation = spec.training.evaluation
    stops_early = ends_at_target(spec) or bool(evaluation and evaluation.target)
    total_steps = 0 if stops_early else last_step(spec) or 0
    tokens = 0 if spec.bare else batch * spec.training.seq_len
    return Progress("training", step, total_steps, tokens)


def _with_ending(record: RunRecord, ending: Ending, code: int | None, folder: Path) -> RunRecord:
    on_request = ending.on_request or ending.status in ("cancelled", "timeout")
    tail = () if ending.status == "ok" else tuple(log_tail(folder, ending.rank, on_request))
    return record.model_copy(
        update={
            "status": ending.status,
            "reason": ending.reason,
            "faulty_hosts": ending.hosts,
            "warnings": (*record.warnings, *ending.warnings),
            "ended_unix": time.time(),
            "ended_monotonic_s": time.monotonic(),
            "exit_code": code,
            "log_tail": tail,
        }
    )


def probe_this_machine(dtypes: tuple[Dtype, ...], device: str, fresh: bool) -> GemmProbe:
    """Measure GEMM throughput of this machine's device (`auto`, `cpu` or `cuda`)."""
    machine = inventory()
    kind, _ = device_kind(device, machine)
    return probe_machine(machine, kind, dtypes, fresh=fresh)


def command_line() -> list[str]:
    """Return the command line of this process, for the run record."""
    return [os.path.basename(sys.argv[0]), *sys.argv[1:]]  # noqa: PTH119
