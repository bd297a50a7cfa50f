"""Result of a run folder: status, speed and confidence.

Only files are read, so this works during a run, after it was killed, and years later.
"""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from paceline.compare.judge import single_run_verdict
from paceline.compare.published import compare_with_references
from paceline.core.binding import Place, binding_warnings
from paceline.core.metrics import measure
from paceline.core.ranks import find_straggler, memory_by_part, merge_ranks, rank_summaries
from paceline.core.result import (
    MemoryByPart,
    Metric,
    RankMemory,
    Result,
    Status,
    WindowRecord,
)
from paceline.core.run import RunSettings
from paceline.core.run_report import RunReport
from paceline.core.steps import Steps
from paceline.core.timed_run import TimedRun, timed_run
from paceline.core.units import pluralize
from paceline.core.window import MIN_STEADY, Window, steady_window, uneven_warning
from paceline.files.documents import read_json
from paceline.files.events import RankLog, StartEvent
from paceline.files.run_folder import (
    INVENTORY_FILE,
    SCRIPT_FILE,
    RunRecord,
    current_status,
    read_record,
    run_files,
)
from paceline.machines.placement import find_device
from paceline.machines.slurm.foreign import submitted_logs
from paceline.machines.slurm.record import orphan_job
from paceline.runs.ending import Ending, file_text, log_tail, read_ranks, stacks
from paceline.runs.fabric import fabric_proof, fabric_warnings
from paceline.runs.logged_run import evaluate_log, find_run_ending, has_only_log, report_from_log
from paceline.runs.rank_files import contradiction, missing_ranks_warning
from paceline.runs.run_energy import (
    RunTelemetry,
    device_warnings,
    energy_metrics,
    run_telemetry,
    with_throttling,
)

JITTER_WARNING = 0.1
"""Mean step time / median - 1 above which a warning reports spikes."""
SPREAD_WARNING = 0.1
"""Relative spread of the steady steps above which a warning reports uncertain results."""
MIN_TIMED_STEPS = 30
"""Minimum number of timed steps of published fine-tuning benchmarks."""


def evaluate(folder: Path) -> RunReport:
    """Compute the report of a run folder from its raw files.

    Raises UserError when run.json is missing or unreadable.
    """
    record = read_record(folder)
    report = _evaluate(folder, record)
    proof = fabric_proof(folder, record.spec) if record.spec else None
    if proof is None:
        return report
    warnings = (*report.result.warnings, *fabric_warnings(proof))
    fields = {"fabric": proof, "warnings": warnings}
    return replace(report, result=report.result.model_copy(update=fields))


def _evaluate(folder: Path, record: RunRecord) -> RunReport:
    if record.spec is None:
        return evaluate_log(folder, record)
    if has_only_log(folder, record.spec):
        ending = _ending(record, folder)
        record_with_warnings = record.model_copy(
            update={"warnings": (*record.warnings, *ending.warnings)}
        )
        return report_from_log(folder, record_with_warnings, ending.status, ending.reason)
    facts = record.settings
    ranks = read_ranks(folder)
    series = {rank: Steps.of(log.steps) for rank, log in ranks.items()}
    merged = merge_ranks(series)
    window = steady_window(merged) if len(merged) else None
    ending = _ending(record, folder)
    status, reason = _checked_status(ending.status, ending.reason, window)
    if status == "ok" and (fault := contradiction(record.spec, ranks, series, merged)):
        status, reason = "failed", fault
    result = _result(
        folder, record, ranks, series, merged=merged, window=window, status=status, reason=reason
    )
    return RunReport(
        result=result,
        steps=merged,
        spec=None if record.spec.bare else record.spec,
        facts=facts,
        command=shlex.join(record.command),
        job_script=file_text(folder / SCRIPT_FILE),
        inventory=read_json(folder / INVENTORY_FILE),
        folder=str(folder),
        files=run_files(folder),
        stacks={} if status == "ok" else stacks(folder),
    )


def _ending(record: RunRecord, folder: Path) -> Ending:
    """Return the run's status, and the reason if it did not end well."""
    status = current_status(record)
    return (
        orphan_status(record, folder) if status == "incomplete" else Ending(status, record.reason)
    )


def orphan_status(record: RunRecord, folder: Path) -> Ending:
    """Return the status of a run whose controller is gone; its Slurm job may still run."""
    reason = record.reason or "the controller ended before the run did"
    job = orphan_job(folder)
    if job is None or record.spec is None:
        return Ending("incomplete", reason + full_disk_note(folder))
    if job.code is None:
        # Another user's script leaves no exit code, but its log may be complete.
        if (
            submitted_logs(folder)
            and find_run_ending(folder, record, 1, False, None).status == "ok"
        ):
            return Ending("ok", None)
        advice = f"Slurm job {job.job} may still be running (`scancel {job.job}` ends it)"
        return Ending("incomplete", f"{reason}; {advice}")
    return find_run_ending(folder, record, job.code, False, None)


def full_disk_note(folder: Path) -> str:
    """Return the line of a rank that found the disk full; the controller could not record it."""
    words = os.strerror(errno.ENOSPC)
    line = next((line.strip() for line in log_tail(folder) if words in line), None)
    return f"; a rank's log ends with: {line}" if line else ""


def _checked_status(
    status: Status, reason: str | None, window: Window | None
) -> tuple[Status, str | None]:
    if status == "ok" and (window is None or window.record.n < MIN_STEADY):
        num_steady = window.record.n if window else 0
        steady = pluralize(num_steady, "steady step")
        return "incomplete", f"{steady}; at least {MIN_STEADY} are needed"
    return status, reason


def _result(
    folder: Path,
    record: RunRecord,
    ranks: Mapping[int, RankLog],
    series: Mapping[int, Steps],
    *,
    merged: Steps,
    window: Window | None,
    status: Status,
    reason: str | None,
) -> Result:
    facts, names = record.settings, record.spec.references if record.spec else ()
    hosts = {rank: log.start.host for rank, log in ranks.items() if log.start}
    stages = {rank: log.start.stage for rank, log in ranks.items() if log.start}
    places = [rank_place(rank, log.start) for rank, log in sorted(ranks.items()) if log.start]
    numbers = merged.index[window.rows] if window else np.array([], dtype=np.int64)
    is_judgeable = window is not None and window.record.supports_verdict
    metrics = measure(_timed_run(record, ranks, merged, window)) if window and is_judgeable else {}
    telemetry = _telemetry(folder, ranks)
    device_messages = device_warnings(telemetry)
    if metrics:
        metrics |= energy_metrics(telemetry, merged, facts.device)
    comparisons = compare_with_references(facts, names, metrics)
    return Result(
        run=folder.name,
        recipe=facts.recipe or "unknown",
        status=status,
        reason=reason,
        log_tail=record.log_tail if status not in ("ok", "queued", "running") else (),
        created=record.created,
        metrics=metrics,
        headline=facts.headline,
        window=window.record if window else None,
        conventions=_conventions(facts),
        verdict=with_throttling(
            single_run_verdict(
                status, reason, window.record if window and is_judgeable else None, comparisons
            ),
            device_messages,
        ),
        references=comparisons,
        ranks=rank_summaries(series, hosts, numbers, stages, places),
        memory=_memory(record, ranks, metrics),
        straggler=find_straggler(series, hosts, numbers, stages),
        versions=_versions(record, ranks),
        num_parameters=next(
            (log.start.num_parameters for log in ranks.values() if log.start), None
        ),
        resumed_after=max((log.start.first_step for log in ranks.values() if log.start), default=1)
        - 1,
        steps_done=len(merged),
        steps_requested=(record.spec and record.spec.steps_requested) or 0,
        warnings=(
            *_unread_warnings(ranks),
            *binding_warnings(places),
            *device_messages,
            *(_window_warnings(merged, window) if window and is_judgeable else ()),
            *_warnings(record, window.record if window else None, metrics),
        ),
    )


def _telemetry(folder: Path, ranks: Mapping[int, RankLog]) -> RunTelemetry | None:
    """Return the device telemetry from the start of the first rank to the end of the last."""
    ends = [log.end.time_unix for log in ranks.values() if log.end]
    begin = min((log.start.time_unix for log in ranks.values() if log.start), default=None)
    return run_telemetry(folder, begin, max(ends) if len(ends) == len(ranks) and ends else None)


def _startup_s(record: RunRecord, starts: Sequence[StartEvent]) -> float | None:
    """Return seconds from the launch until the last rank was ready; None if unknown.

    The monotonic clock is used if all ranks share the controller's host: wall clocks can be set.
    """
    host = record.controller.host if record.controller else None
    ready = [start.monotonic_s for start in starts if start.host == host]
    shared = [seconds for seconds in ready if seconds is not None]
    if record.launched_monotonic_s is not None and shared and len(shared) == len(starts):
        seconds = max(shared) - record.launched_monotonic_s
    elif record.launched_unix is not None and starts:
        seconds = max(start.time_unix for start in starts) - record.launched_unix
    else:
        return None
    return seconds if seconds >= 0 else None


def _timed_run(
    record: RunRecord, ranks: Mapping[int, RankLog], merged: Steps, window: Window
) -> TimedRun:
    facts = record.settings
    device = find_device(facts.device) if facts.device else None
    no_peak = tensor_float_note(facts)
    peak = device.peaks.get(facts.dtype) if device and facts.dtype and not no_peak else None
    return timed_run(
        facts,
        merged,
        merged.select(window.rows),
        peak_flops_per_s=peak.flops_per_s if peak else None,
        peak_source=peak.source if peak else None,
        achievable_flops_per_s=record.achievable_flops_per_s,
        achievable_source=record.achievable_source,
        startup_s=_startup_s(record, [log.start for log in ranks.values() if log.start]),
        uneven=window.record.state == "uneven",
        no_peak=no_peak,
    )


def _memory(
    record: RunRecord, ranks: Mapping[int, RankLog], metrics: Mapping[str, Metric]
) -> MemoryByPart | None:
    """Return the memory by part of all ranks that recorded it."""
    rank_memories = [
        RankMemory(
            rank=rank,
            step=log.memory.step,
            kind=log.memory.kind,
            why=log.memory.why,
            parts_bytes=log.memory.parts_bytes,
            at_peak_bytes=log.memory.at_peak_bytes,
            peak_bytes=log.memory.peak_bytes,
            watcher_bytes=log.memory.watcher_bytes,
            watched_step_s=log.tracked_step.step_time_s if log.tracked_step else None,
        )
        for rank, log in ranks.items()
        if log.memory
    ]
    facts, step = record.settings, metrics.get("step_time_s")
    device = find_device(facts.device) if facts.device else None
    return memory_by_part(
        rank_memories,
        record.spec,
        facts,
        device.memory_bytes if device else None,
        (device and device.context_bytes) or 0.0,
        step.value if step else None,
    )


def tensor_float_note(facts: RunSettings) -> str | None:
    """Return why fp32 on an accelerator has no MFU unless GEMMs run in full fp32."""
    full = facts.dtype != "fp32" or facts.matmul_precision in (None, "highest")
    if full or facts.device == "cpu":
        return None
    return (
        f"matmul_precision {facts.matmul_precision} lets fp32 GEMMs run in reduced precision, "
        "whose peak is not the fp32 peak; matmul_precision=highest has an MFU"
    )


def _conventions(facts: RunSettings) -> dict[str, str]:
    images = facts.model is not None and facts.model.kind == "mmdit"
    return {
        "flops": facts.flops_convention or "unknown",
        "peak": "dense data-sheet peak of one device",
        "step_time": "median of the steady window; step_time_mean_s includes spikes",
        "samples": "samples_per_s at the median step; published averages are compared with "
        "samples_per_s_mean, the samples of the steady steps divided by their time",
        "memory": "largest rank's peak; the kind is in the metric's name",
        "tokens": "text and image tokens of a sample together"
        if images
        else "real tokens; padded_tokens_per_s counts every position",
    }


def _versions(record: RunRecord, ranks: Mapping[int, RankLog]) -> dict[str, str]:
    versions = {"paceline": record.paceline_version}
    start = next((log.start for log in ranks.values() if log.start), None)
    if start:
        programs = {"torch": start.torch, "python": start.python, "cuda": start.cuda}
        versions |= {name: version for name, version in programs.items() if version}
    return versions


def _unread_warnings(ranks: Mapping[int, RankLog]) -> list[str]:
    """Return a warning for missing rank files, and for each rank with unreadable event lines."""
    sentences = {rank: log.skipped_lines.warning for rank, log in ranks.items()}
    missing = missing_ranks_warning(ranks)
    return [
        *([missing] if missing else []),
        *(f"rank {rank}: {sentence}" for rank, sentence in sorted(sentences.items()) if sentence),
    ]


def rank_place(rank: int, start: StartEvent) -> Place:
    """Return where the rank ran, by its start event."""
    binding = start.bound
    return Place(
        rank=rank,
        host=start.host,
        cores=start.cores,
        threads=start.threads,
        bound_by=binding.by if binding else None,
        requested=binding is not None,
        why=binding.why if binding else None,
        host_cores=binding.host_cores if binding else None,
        numa_nodes=start.numa_nodes,
    )


def _window_warnings(merged: Steps, window: Window) -> list[str]:
    steps = merged.select(window.rows)
    uneven = window.record.state == "uneven"
    return [
        *([uneven_warning(steps["step_time_s"])] if uneven else []),
        *_checkpoint_warnings(steps),
    ]


def _checkpoint_warnings(window: Steps) -> list[str]:
    """Return a warning if steady steps waited for checkpoints."""
    checkpoint_s = window["checkpoint_s"]
    checkpoint_s = checkpoint_s[np.isfinite(checkpoint_s)]
    if not len(checkpoint_s):
        return []
    share = checkpoint_s.sum() / window["step_time_s"].sum()
    rare = len(checkpoint_s) < len(window) / 4
    return [
        f"{len(checkpoint_s)} of {len(window)} steady steps waited for a checkpoint, {share:.1%} "
        "of their time; the mean step time includes it"
        + (", the median hardly" if rare else " and so does the median: increase checkpoint.every")
    ]


def _warnings(
    record: RunRecord, window: WindowRecord | None, metrics: Mapping[str, Metric]
) -> tuple[str, ...]:
    warnings = list(record.warnings)
    uneven = window is not None and window.state == "uneven"
    warnings += window.remarks if window else ()
    padded = record.spec is not None and record.spec.data.packing == "padded"
    if padded and window and window.n < MIN_TIMED_STEPS:
        warnings.append(
            f"{pluralize(window.n, 'timed step')}: published fine-tuning rates use at least "
            f"{MIN_TIMED_STEPS}; increase training.steps (the data is repeated)"
        )
    jitter, step = metrics.get("jitter_overhead"), metrics.get("step_time_s")
    if not uneven and jitter and jitter.value is not None and jitter.value > JITTER_WARNING:
        warnings.append(f"spikes: the mean step is {jitter.value:.0%} above the median")
    if not uneven and step and step.spread is not None and step.spread > SPREAD_WARNING:
        warnings.append(
            f"step times vary by {step.spread:.0%}: other programs or clock changes disturb "
            "this machine, and the results are uncertain"
        )
    share = metrics.get("achievable_fraction")
    if share and share.value is not None and share.value > 1:
        warnings.append(
            "the run was faster than the measured GEMM throughput: the probe was disturbed; "
            "repeat it with `paceline probe gemm --no-cache`"
        )
    return tuple(warnings)
