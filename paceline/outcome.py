"""From a run folder to its result: what happened, how fast, how sure.

It reads only files, so it works while a run goes on, after it was killed, and years later.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

import numpy as np

from paceline.comparison import compare_with_references
from paceline.core.compare.verdict import single_run_verdict
from paceline.core.facts import Facts
from paceline.core.metrics import Measured, measure, measured
from paceline.core.ranks import find_straggler, merge_ranks, rank_summaries
from paceline.core.result import Metric, Result, Status, WindowRecord
from paceline.core.steps import Steps
from paceline.core.window import MIN_STEADY, Window, steady_window
from paceline.engines import engine
from paceline.events import RankLog
from paceline.imported import evaluate_log
from paceline.plan import find_device
from paceline.report.page import RunReport
from paceline.rundir import (
    INVENTORY_FILE,
    LAUNCHER_LOG,
    LOGS_FOLDER,
    SCRIPT_FILE,
    STEPS_FOLDER,
    RunRecord,
    current_status,
    read_json,
    read_record,
    run_files,
)

TAIL_LINES = 15
LOST_PEER = "another rank ended first"
"""How the trainer's reason begins when a rank only noticed that another was gone."""

_STACK_LINE = re.compile(
    r"\s*(\[rank\d+\]:\s*)?(Traceback \(most recent|  File \"|    |\s*\^+\s*$)|\s*$"
)
"""Stack frames and empty lines, which a reason is told without; the whole log keeps them."""
JITTER_WARNING = 0.1
SPREAD_WARNING = 0.1


@dataclass(frozen=True)
class Ending:
    """How a run ended, and the sentence that says why if it did not end well."""

    status: Status
    reason: str | None
    warnings: tuple[str, ...] = ()


def read_ranks(folder: Path, engine_name: str) -> dict[int, RankLog]:
    """Every rank's event lines in a run folder as its engine reads them, by rank."""
    reader = engine(engine_name)
    logs: dict[int, RankLog] = {}
    for path in sorted((folder / STEPS_FOLDER).glob("rank-*.jsonl")):
        number = path.stem.removeprefix("rank-")
        if number.isdigit():
            with path.open(encoding="utf-8", errors="replace") as lines:
                logs[int(number)] = reader.read_rank(lines)
    return logs


def judge(
    ranks: Mapping[int, RankLog],
    world_size: int,
    exit_code: int,
    oom_killed: bool,
    tail: list[str],
    killed: str | None = None,
) -> Ending:
    """How a run ended, from the ranks' last lines first and the exit code second.

    A rank that only lost its peer says nothing of the cause, so it is heard last.
    """
    ends = [log.end for log in ranks.values() if log.end is not None]
    causes = [end for end in ends if not (end.reason or "").startswith(LOST_PEER)]
    for status in ("oom", "nan"):
        for end in causes:
            if end.status == status:
                return Ending(status, end.reason)
    if oom_killed and len(ends) < world_size:
        return Ending("oom", "the kernel killed a rank because the machine ran out of memory")
    for end in causes:
        if end.status == "failed":
            return Ending("failed", end.reason)
    if len(causes) == world_size:
        late = f"all ranks finished, yet the launcher ended with code {exit_code}"
        return Ending("ok", None, (late,) if exit_code else ())
    lost = next((end.reason for end in ends if end not in causes), None)
    reason = killed or _last_error(tail) or lost
    return Ending("failed", reason or f"the launcher ended with code {exit_code}")


def log_tail(folder: Path) -> list[str]:
    """The last lines of the logs, without stack frames.

    Of the first rank that tells an error, else of the launcher.
    """
    logs = sorted((folder / LOGS_FOLDER).glob("rank-*.log"))
    tails = [tail for tail in map(_tail, [*logs, folder / LOGS_FOLDER / LAUNCHER_LOG]) if tail]
    with_error = [tail for tail in tails if _last_error(tail)]
    return (with_error or tails[-1:] or [[]])[0]


def killed_rank(folder: Path) -> str | None:
    """`rank 1 was killed by SIGKILL` if torch's launcher reports that as the root cause."""
    text = _text(folder / LOGS_FOLDER / LAUNCHER_LOG, last_bytes=16_384)
    cause = text.rpartition("Root Cause")[2]
    found = re.search(r"rank\s*:\s*(\d+).*?\n\s*exitcode\s*:\s*-(\d+)", cause)
    if found is None:
        return None
    number = int(found[2])
    names = {signal.value: signal.name for signal in Signals}
    return f"rank {found[1]} was killed by {names.get(number, f'signal {number}')}"


def evaluate(folder: Path) -> RunReport:
    """The report of a run folder, computed from its raw files.

    Raises UserError when run.json is missing or not readable.
    """
    record = read_record(folder)
    if record.spec is None:
        return evaluate_log(folder, record)
    facts = record.known
    ranks = read_ranks(folder, record.spec.engine)
    series = {rank: Steps.of(log.steps) for rank, log in ranks.items()}
    merged = merge_ranks(series)
    status = current_status(record)
    window = steady_window(merged) if len(merged) else None
    status, reason = _final(record, status, window)
    result = _result(folder, record, ranks, series, merged, window, status, reason)
    return RunReport(
        result=result,
        steps=merged,
        spec=record.spec,
        facts=facts,
        command=shlex.join(record.command),
        job_script=_text(folder / SCRIPT_FILE),
        inventory=read_json(folder / INVENTORY_FILE),
        folder=str(folder),
        files=run_files(folder),
    )


def _final(record: RunRecord, status: Status, window: Window | None) -> tuple[Status, str | None]:
    if status == "incomplete":
        return status, record.reason or "the controller ended before the run did"
    if status == "ok" and (window is None or window.record.n < MIN_STEADY):
        found = window.record.n if window else 0
        return "incomplete", f"{found} steady steps; a figure needs at least {MIN_STEADY}"
    return status, record.reason


def _result(
    folder: Path,
    record: RunRecord,
    ranks: Mapping[int, RankLog],
    series: Mapping[int, Steps],
    merged: Steps,
    window: Window | None,
    status: Status,
    reason: str | None,
) -> Result:
    facts, names = record.known, record.spec.references if record.spec else ()
    hosts = {rank: log.start.host for rank, log in ranks.items() if log.start}
    numbers = merged.index[window.rows] if window else np.array([], dtype=np.int64)
    trusted = window is not None and window.record.state in ("steady", "drifting")
    metrics = measure(_measured(record, ranks, merged, window)) if window and trusted else {}
    comparisons = compare_with_references(facts, names, metrics)
    return Result(
        run=folder.name,
        recipe=facts.recipe or "unknown",
        status=status,
        reason=reason,
        log_tail=record.log_tail if status not in ("ok", "queued", "running") else (),
        created=record.created,
        metrics=metrics,
        window=window.record if window else None,
        conventions=_conventions(facts),
        verdict=single_run_verdict(
            status, reason, window.record if window and trusted else None, comparisons
        ),
        references=comparisons,
        ranks=rank_summaries(series, hosts, numbers),
        straggler=find_straggler(series, hosts, numbers),
        versions=_versions(record, ranks),
        num_parameters=next(
            (log.start.num_parameters for log in ranks.values() if log.start), None
        ),
        steps_done=len(merged),
        steps_asked=record.spec.training.steps if record.spec else 0,
        warnings=(
            *_unread(ranks),
            *_warnings(record, window.record if window else None, metrics),
        ),
    )


def _measured(
    record: RunRecord, ranks: Mapping[int, RankLog], merged: Steps, window: Window
) -> Measured:
    facts = record.known
    device = find_device(facts.device) if facts.device else None
    no_peak = tensor_float_note(facts)
    peak = device.peaks.get(facts.dtype) if device and facts.dtype and not no_peak else None
    ready = [log.start.time_unix for log in ranks.values() if log.start]
    started = record.launched_unix
    return measured(
        facts,
        merged,
        merged.select(window.rows),
        peak_flops_per_s=peak.flops_per_s if peak else None,
        peak_source=peak.source if peak else None,
        achievable_flops_per_s=record.achievable_flops_per_s,
        achievable_source=record.achievable_source,
        startup_s=max(ready) - started if ready and started else None,
        no_peak=no_peak,
    )


def tensor_float_note(facts: Facts) -> str | None:
    """Why fp32 on an accelerator has no MFU unless its products are kept in full fp32."""
    full = facts.dtype != "fp32" or facts.matmul_precision in (None, "highest")
    if full or facts.device == "cpu":
        return None
    return (
        f"matmul_precision {facts.matmul_precision} lets fp32 products run in reduced precision, "
        "whose peak is not the fp32 one; matmul_precision=highest has an MFU"
    )


def _conventions(facts: Facts) -> dict[str, str]:
    return {
        "flops": facts.flops_convention or "unknown",
        "peak": "dense data-sheet peak of one device",
        "step_time": "median of the steady window; step_time_mean_s includes spikes",
        "memory": "largest rank's peak; the kind is in the metric's name",
        "tokens": "real tokens; padded_tokens_per_s counts every position",
    }


def _versions(record: RunRecord, ranks: Mapping[int, RankLog]) -> dict[str, str]:
    versions = {"paceline": record.paceline_version}
    start = next((log.start for log in ranks.values() if log.start), None)
    if start:
        versions |= {"torch": start.torch, "python": start.python}
        versions |= {"cuda": start.cuda} if start.cuda else {}
    return versions


def _unread(ranks: Mapping[int, RankLog]) -> list[str]:
    """What was passed over in the ranks' event lines, one sentence a rank."""
    told = {rank: log.unread.sentence for rank, log in ranks.items()}
    return [f"rank {rank}: {sentence}" for rank, sentence in sorted(told.items()) if sentence]


def _warnings(
    record: RunRecord, window: WindowRecord | None, metrics: Mapping[str, Metric]
) -> tuple[str, ...]:
    found = list(record.warnings)
    if window and window.state == "drifting" and window.drift is not None:
        found.append(f"the step time drifts by {window.drift:+.1%} over the window")
    jitter, step = metrics.get("jitter_tax"), metrics.get("step_time_s")
    if jitter and jitter.value is not None and jitter.value > JITTER_WARNING:
        found.append(f"spikes: the mean step is {jitter.value:.0%} above the median")
    if step and step.spread is not None and step.spread > SPREAD_WARNING:
        found.append(
            f"the steps scatter by {step.spread:.0%}: other programs or changing clocks disturb "
            "this machine, and the figures are uncertain"
        )
    share = metrics.get("of_achievable")
    if share and share.value is not None and share.value > 1:
        found.append(
            "the run was faster than the reachable rate that was probed; something disturbed the "
            "probe: `paceline probe gemm --fresh` repeats it"
        )
    return tuple(found)


def _last_error(tail: list[str]) -> str | None:
    errors = [line.strip() for line in tail if "Error" in line or "error:" in line.lower()]
    return errors[-1][:300] if errors else None


def _tail(path: Path) -> list[str]:
    lines = _text(path, last_bytes=16_384).splitlines()
    told = [line[:500] for line in lines if not _STACK_LINE.match(line)]
    return told[-TAIL_LINES:]


def _text(path: Path, last_bytes: int | None = None) -> str:
    try:
        with path.open("rb") as file:
            if last_bytes:
                file.seek(max(0, path.stat().st_size - last_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
