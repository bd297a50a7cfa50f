"""What a run is held against: another run, a published row, an estimate, or itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.compare.comparability import likeness
from paceline.compare.over_time.environment import environment_changes
from paceline.core.errors import UserError
from paceline.core.metrics import metric_class
from paceline.core.units import step_seconds
from paceline.estimate.answer import Estimate
from paceline.estimate.explanation import explain as estimated
from paceline.estimate.explanation import measured_run, question_of
from paceline.explain.account import StepParts
from paceline.explain.explanation import Against
from paceline.explain.observed import ObservedRun, observed
from paceline.explain.profiled import ProfiledStep, profile_of_run
from paceline.files.run_folder import find_run

WORDS = ("reference", "estimate")
SAME_WORK = ("model", "lora", "seq_len")
"""What must be equal for steps of two runs to be the same work a sequence."""
COMMUNICATION = ("tp", "cp", "ep", "zero", "stages", "dp", "jitter")
"""Parts of an estimate that are waits for collectives."""


@dataclass(frozen=True)
class Baseline:
    """The step that a run is held against, as far as it is known."""

    kind: Against
    title: str
    step_s: float | None = None
    parts: StepParts | None = None
    """None where nobody knows where its seconds went."""
    error_s: float = 0.0
    """Standard error of its compute part."""
    run: ObservedRun | None = None
    profile: ProfiledStep | None = None
    """Its own profile, if it has one."""
    differences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def baseline_of(run: ObservedRun, against: str | None, root: Path) -> Baseline:
    """The baseline of a name: of a run, `reference` or `estimate`; None is the run itself.

    Raises UserError where there is none, or where its steps are other work.
    """
    if against is None:
        return Baseline("itself", "itself: the seconds in which its ranks could not work")
    if against == "reference":
        return _published(run)
    if against == "estimate":
        return _estimate(run)
    folder = find_run(root, against)
    return _other_run(run, observed(folder), profile_of_run(folder))


def _other_run(run: ObservedRun, other: ObservedRun, profile: ProfiledStep | None) -> Baseline:
    alike = likeness([other.facts], [run.facts])
    work = [d for d in alike.differences if d.key in SAME_WORK]
    if work:
        different = "; ".join(f"{d.key} {d.candidate}, not {d.baseline}" for d in work)
        raise UserError(
            f"--against {other.result.run}",
            f"trains something else, so its steps say nothing of these: {different}",
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
    """By what the other's step is to be multiplied to do this one's work, and a note of it."""
    ours, theirs = (
        side.account.samples / side.facts.num_devices
        if side.account.samples and side.facts.num_devices
        else None
        for side in (run, other)
    )
    if ours is None or theirs is None or ours == theirs:
        return 1.0, ()
    note = f"its step of {theirs:g} sequences a device counts {ours / theirs:.3g} times"
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
    answer = estimated(measured, question_of(measured))
    interval = f"80 % interval {step_seconds(answer.low_s)}-{step_seconds(answer.high_s)} s"
    # 80 % of a normal distribution lie within 1.28 standard errors on both sides.
    error_s = (answer.high_s - answer.low_s) / (2 * 1.28)
    title = f"the estimate, {interval}; it rests on: {answer.evidence.title}"
    return Baseline("estimate", title, answer.step_time_s, _parts(answer), error_s)


def _parts(answer: Estimate) -> StepParts:
    communication = sum(answer.parts[name] for name in COMMUNICATION)
    bubble = answer.parts["bubble"]
    return StepParts(
        compute=answer.step_time_s - communication - bubble,
        bubble=bubble,
        communication=communication,
    )
