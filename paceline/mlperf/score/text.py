"""Scores and checks of MLPerf runs as text lines and table rows."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from paceline.core.units import significant
from paceline.mlperf.check.findings import Check, CheckedFile, Finding
from paceline.mlperf.rules import NOT_A_METRIC
from paceline.mlperf.score.convergence import Convergence
from paceline.mlperf.score.score import Score, ScoredRun
from paceline.report.figures import one_line, written

JOULES_A_WH = 3600.0
ORIGINS = {"option": "as asked for", "path": "the round in the path", "default": "the default"}


def score_row(score: Score, run: ScoredRun) -> dict[str, Any]:
    """One run as a row of a table, with the score of its set."""
    return {
        **run.model_dump(mode="json", exclude={"seeds", "started_ms", "energy"}),
        "seeds": " ".join(map(str, run.seeds)) or None,
        "energy_j": run.energy.energy_j if run.energy else None,
        "benchmark": score.benchmark,
        "ruleset": score.ruleset,
        "set_status": score.status,
        "score_minutes": score.score_minutes,
        "official": score.official,
        "label": score.label,
    }


def score_lines(score: Score) -> Iterator[str]:
    """The score, what it rests on and the warnings, for a terminal."""
    system = score.system or "system not stated"
    yield one_line(f"{score.benchmark} · {system} · {score.folder}")
    yield f"  ruleset      {score.ruleset} ({ORIGINS[score.ruleset_from]})"
    if score.score_minutes is not None:
        yield f"  score        {score.score_minutes:.4f} minutes, {score.label}"
    else:
        yield one_line(f"  score        none, {score.status}: {score.reason} ({score.label})")
    yield from (f"  {line}" for line in _parts(score))
    yield from (one_line(f"  warning      {warning}") for warning in score.warnings)


def check_rows(check: Check) -> list[dict[str, Any]]:
    """Each finding and warning as a row; a log without any is one row."""
    rows: list[dict[str, Any]] = []
    for file in check.files:
        head = {"file": file.file, "status": file.status}
        found = [("finding", one) for one in file.findings]
        found += [("warning", one) for one in file.warnings]
        rows += [{**head, "level": level, **_finding_row(one)} for level, one in found]
        if not found:
            rows.append({**head, "message": file.reason})
    return rows


def check_lines(check: Check) -> Iterator[str]:
    """The verdict on every log with its findings, for a terminal."""
    passed = sum(file.status == "passed" for file in check.files)
    nouns = {"logs": "logs", "description": "descriptions", "submission": "files and folders"}
    verdict = f"submission {check.status}: " if check.kind == "submission" else ""
    yield one_line(
        f"{verdict}{passed} of {len(check.files)} {nouns[check.kind]} pass {check.ruleset} ({ORIGINS[check.ruleset_from]}), "
        f"{check.checker} · {check.place}"
    )
    for file in check.files:
        yield from (one_line(line) for line in _file_lines(file))
    yield check.label


def _file_lines(file: CheckedFile) -> Iterator[str]:
    yield f"  {file.file}: {file.status}{f': {file.reason}' if file.reason else ''}"
    yield from (f"    {_place(one)}{one.message}" for one in file.findings)
    yield from (f"    {_place(one)}warning: {one.message}" for one in file.warnings)


def _place(found: Finding) -> str:
    return f"line {found.line:,}: " if found.line else ""


def _finding_row(found: Finding) -> dict[str, Any]:
    return found.model_dump(mode="json", exclude={"official"})


def _parts(score: Score) -> Iterator[str]:
    chosen = next((window for window in score.windows if window.chosen), None)
    if score.olympic_mean_minutes is not None and chosen:
        n = len(chosen.files)
        yield f"run time     {score.olympic_mean_minutes:.4f} minutes, mean of {n - 2} of {n} runs{_spread(score)}"
    if len(score.windows) > 1:
        yield (
            f"window       the median of {len(score.windows)} windows of {score.runs_required} "
            f"consecutive runs"
        )
    if score.rcp:
        yield f"convergence  {_convergence(score.rcp)}"
    if score.mean_samples_to_target is not None:
        yield f"samples      {score.mean_samples_to_target:,.1f} to the target, mean of the converged runs"
    if score.median_samples_per_s is not None:
        yield f"throughput   {significant(score.median_samples_per_s, 5)} samples/s, median of the runs' medians"
    if score.overall_samples_per_s is not None:
        yield f"overall      {significant(score.overall_samples_per_s, 5)} samples/s with evaluations"
    if score.model_flops_per_s_per_device is not None:
        yield (
            f"model        {written(score.model_flops_per_s_per_device, 'FLOP/s', 4)} a device on "
            f"{score.num_devices}, {score.convention}, with evaluations; {NOT_A_METRIC}"
        )
    if energy := _energy(score):
        yield f"energy       {energy}"
    if score.mean_initialisation_minutes is not None:
        yield f"start        {score.mean_initialisation_minutes:.3f} minutes of initialisation, mean, not timed"


def _energy(score: Score) -> str | None:
    """Energy to the target, or why it is not known; None where no telemetry lies beside the logs."""
    if not any(run.energy for run in score.runs):
        return None
    counted = [run for run in score.runs if run.part == "counted"]
    told = [run.energy for run in counted if run.energy]
    if score.mean_energy_j is None or not told:
        why = next((one.reason for one in told if one.reason), "not every counted run has it")
        return f"unknown: {why}"
    sources = dict.fromkeys(source for one in told for source in one.sources)
    parts = " and ".join(sorted(told[0].parts_j))
    power = fmean(one.power_w for one in told if one.power_w is not None)
    return (
        f"{significant(score.mean_energy_j / JOULES_A_WH, 4)} Wh to the target, mean of {len(told)} runs, run_start "
        f"to run_stop, at {significant(power, 4)} W; of {parts} ({', '.join(sources)})"
    )


def _spread(score: Score) -> str:
    times = [run.minutes for run in score.runs if run.part == "counted" and run.minutes]
    return f" ({min(times):.4f} to {max(times):.4f})" if times else ""


def _convergence(rcp: Convergence) -> str:
    if rcp.samples is None or rcp.reference_samples is None or rcp.least_samples is None:
        return f"{rcp.status}: {rcp.reason}"
    batches = " and ".join(f"{batch:,}" for batch in rcp.reference_batches)
    factor = f", scaling factor {rcp.scaling_factor:.6f}" if rcp.scaling_factor else ""
    return (
        f"{rcp.status} ({rcp.kind}, references at batch {batches}): {rcp.samples:,.1f} samples, reference "
        f"{rcp.reference_samples:,.1f}, at least {rcp.least_samples:,.1f}{factor}"
    )
