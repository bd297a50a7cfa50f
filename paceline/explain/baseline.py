"""The baseline of a diagnosis: another run, a published row, an estimate, or the run itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.compare.comparability import compare_settings
from paceline.compare.over_time.environment import environment_changes
from paceline.core.errors import UserError
from paceline.core.metrics import metric_class
from paceline.core.units import step_seconds
from paceline.estimate.measured_step import estimate_measured_run, measured_run, request_for_run
from paceline.estimate.single_estimate import Estimate
from paceline.explain.explanation import BaselineKind
from paceline.explain.observed_run import ObservedRun, observed_run
from paceline.explain.profiled_step import ProfiledStep, own_profiled_step
from paceline.explain.step_breakdown import StepParts
from paceline.files.run_folder import find_run

BASELINE_KEYWORDS = ("reference", "estimate")
SAME_WORK = ("model", "lora", "seq_len")
"""Settings that must be equal for two runs to do the same work per sequence."""
COMMUNICATION = ("tp", "cp", "ep", "zero", "stages", "dp", "jitter")
"""Parts of an estimate that count as waits for collectives."""


@dataclass(frozen=True)
class Baseline:
    """The step time with which a run is compared, and its parts if they are known."""

    kind: BaselineKind
    title: str
    step_s: float | None = None
    parts: StepParts | None = None
    """None if the baseline has no breakdown by part."""
    error_s: float = 0.0
    """Standard error of its compute part."""
    run: ObservedRun | None = None
    profile: ProfiledStep | None = None
    """Its own profile, if it has one."""
    differences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def baseline_of(run: ObservedRun, against: str | None, root: Path) -> Baseline:
    """Return the baseline for a run name, `reference` or `estimate`; None means the run itself.

    Raises UserError if there is none or if its steps do different work.
    """
    if against is None:
        return Baseline("itself", "itself: the time in which its ranks could not work")
    if against == "reference":
        return _published(run)
    if against == "estimate":
        return _estimate(run)
    folder = find_run(root, against)
    return _other_run(run, observed_run(folder), own_profiled_step(folder))


def _other_run(run: ObservedRun, other: ObservedRun, profile: ProfiledStep | None) -> Baseline:
    alike = compare_settings([other.facts], [run.facts])
    work = [d for d in alike.differences if d.key in SAME_WORK]
    if work:
        different = "; ".join(f"{d.key} {d.candidate}, not {d.baseline}" for d in work)
        raise UserError(
            f"--against {other.result.run}",
            f"trains something else, so its steps are not comparable: {different}",
            remedy="name a run of the same model and sequence length, or `estimate`",
        )
    factor, note = _scale(run, other)
    settings = tuple(f"{d.key}: {d.baseline} -> {d.candidate}" for d in alike.differences)
    changes = environment_changes([other.environment], [run.environment])
    surroundings = tuple(f"{c.item}: {c.before} -> {c.after}" for c in changes)
    parts = other.account.parts.scaled(factor)
    return Baseline(
        "run",
        f"run {other.result.run}",
        parts.total,
        parts,
        other.account.error_s * factor,
        other,
        profile,
        (*settings, *surroundings),
        note,
    )


def _scale(run: ObservedRun, other: ObservedRun) -> tuple[float, tuple[str, ...]]:
    """Return the factor that scales the other run's step to this run's work, with a note."""
    ours, theirs = (
        side.account.samples / side.facts.num_devices
        if side.account.samples and side.facts.num_devices
        else None
        for side in (run, other)
    )
    if ours is None or theirs is None or ours == theirs:
        return 1.0, ()
    note = (
        f"the baseline's step of {theirs:g} sequences per device is scaled by {ours / theirs:.3g}"
    )
    return ours / theirs, (note,)


def _published(run: ObservedRun) -> Baseline:
    rows = [row for row in run.result.references if row.ratio]
    if not rows:
        raise UserError(
            "--against reference",
            "no published row is comparable with this run",
            remedy=f"`paceline compare {run.result.run} --against reference` says why not",
        )
    row = rows[0]
    assert row.ratio is not None
    faster = row.ratio if metric_class(row.metric).better == "higher" else 1 / row.ratio
    title = f"{row.reference} ({row.source}), {row.reference_value:g} {row.unit}"
    return Baseline("reference", title, run.account.parts.total * faster)


def _estimate(run: ObservedRun) -> Baseline:
    measured = measured_run(run.report)
    answer = estimate_measured_run(measured, request_for_run(measured))
    interval = f"80% interval {step_seconds(answer.low_s)}-{step_seconds(answer.high_s)} s"
    # 80% of a normal distribution is within 1.28 standard errors of the mean.
    error_s = (answer.high_s - answer.low_s) / (2 * 1.28)
    title = f"the estimate, {interval}, based on {answer.provenance.title}"
    return Baseline("estimate", title, answer.step_time_s, _parts(answer), error_s)


def _parts(answer: Estimate) -> StepParts:
    communication = sum(answer.parts[name] for name in COMMUNICATION)
    bubble = answer.parts["bubble"]
    return StepParts(
        compute=answer.step_time_s - communication - bubble,
        bubble=bubble,
        communication=communication,
    )
