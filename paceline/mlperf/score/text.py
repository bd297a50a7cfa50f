"""Format scores of MLPerf runs as text lines and table rows."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from paceline.core.text import one_line
from paceline.core.units import pluralize, significant
from paceline.mlperf.rules import NOT_A_METRIC, RULESET_ORIGINS
from paceline.mlperf.score.convergence import Convergence
from paceline.mlperf.score.score import Score, ScoredRun
from paceline.report.figures import format_value

JOULES_PER_WH = 3600.0


def score_row(score: Score, run: ScoredRun) -> dict[str, Any]:
    """Return one run as a table row, with the score of its set."""
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
    """Yield the score, what it is based on and the warnings, as terminal lines."""
    system = score.system or "unknown system"
    yield one_line(f"{score.benchmark} · {system} · {score.folder}")
    yield f"  ruleset      {score.ruleset} ({RULESET_ORIGINS[score.ruleset_from]})"
    if score.score_minutes is not None:
        yield f"  score        {score.score_minutes:.4f} minutes, {score.label}"
    else:
        yield one_line(f"  score        none, {score.status}: {score.reason} ({score.label})")
    yield from (f"  {line}" for line in _parts(score))
    yield from (one_line(f"  warning      {warning}") for warning in score.warnings)


def _parts(score: Score) -> Iterator[str]:
    chosen_window = next((window for window in score.windows if window.chosen), None)
    if score.olympic_mean_minutes is not None and chosen_window:
        n = len(chosen_window.files)
        yield (
            f"run time     {score.olympic_mean_minutes:.4f} minutes, mean of {n - 2} of {n} runs"
            f"{_spread(score)}"
        )
    if len(score.windows) > 1:
        yield (
            f"window       median of {len(score.windows)} windows of {score.runs_required} "
            "consecutive runs"
        )
    if score.rcp:
        yield f"convergence  {_convergence(score.rcp)}"
    if score.mean_samples_to_target is not None:
        yield (
            f"samples      {score.mean_samples_to_target:,.1f} to the target, mean of the "
            "converged runs"
        )
    if score.median_samples_per_s is not None:
        yield (
            f"throughput   {significant(score.median_samples_per_s, 5)} samples/s, median of the "
            "runs' medians"
        )
    if score.overall_samples_per_s is not None:
        overall = significant(score.overall_samples_per_s, 5)
        yield f"overall      {overall} samples/s including evaluations"
    if score.model_flops_per_s_per_device is not None:
        rate = format_value(score.model_flops_per_s_per_device, "FLOP/s", 4)
        yield (
            f"model        {rate} per device on {score.num_devices}, {score.convention}, "
            f"including evaluations; {NOT_A_METRIC}"
        )
    elif score.overall_samples_per_s is not None:
        yield f"model        unknown: {score.model_flops_reason}"
    if energy := _energy(score):
        yield f"energy       {energy}"
    if score.mean_initialization_minutes is not None:
        yield (
            f"init         {score.mean_initialization_minutes:.3f} minutes of initialization on "
            "average, not timed"
        )


def _energy(score: Score) -> str | None:
    """Return the energy to the target, or why it is unknown; None without telemetry."""
    if not any(run.energy for run in score.runs):
        return None
    energies = [run.energy for run in score.runs if run.part == "counted" and run.energy]
    if score.mean_energy_j is None or not energies:
        reasons = (energy.reason for energy in energies if energy.reason)
        return f"unknown: {next(reasons, 'not every pluralize run has it')}"
    sources = dict.fromkeys(source for energy in energies for source in energy.sources)
    parts = " and ".join(sorted(energies[0].parts_j))
    power = fmean(energy.power_w for energy in energies if energy.power_w is not None)
    return (
        f"{significant(score.mean_energy_j / JOULES_PER_WH, 4)} Wh to the target, mean of "
        f"{pluralize(len(energies), 'run')}, run_start to run_stop, "
        f"at {significant(power, 4)} W; of {parts} "
        f"({', '.join(sources)})"
    )


def _spread(score: Score) -> str:
    times = [run.minutes for run in score.runs if run.part == "counted" and run.minutes]
    return f" ({min(times):.4f} to {max(times):.4f})" if times else ""


def _convergence(rcp: Convergence) -> str:
    if rcp.samples is None or rcp.reference_samples is None or rcp.min_samples is None:
        return f"{rcp.status}: {rcp.reason}"
    batches = " and ".join(f"{batch:,}" for batch in rcp.reference_batches)
    factor = f", scaling factor {rcp.scaling_factor:.6f}" if rcp.scaling_factor else ""
    return (
        f"{rcp.status} ({rcp.kind}, references at batch {batches}): {rcp.samples:,.1f} samples, "
        f"reference {rcp.reference_samples:,.1f}, at least {rcp.min_samples:,.1f}{factor}"
    )
