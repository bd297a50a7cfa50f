"""The baseline of a diagnosis: another run, a published row, an estimate, or the run itself."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.compare.comparability import compare_settings
from paceline.compare.over_time.environment import environment_changes
from paceline.core.errors import UserError
from paceline.core.metrics import metric_class
from paceline.core.units import step_seconds
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.fit.origin import SOFTWARE
from paceline.estimate.measured_step import estimate_measured_run, measured_run, request_for_run
from paceline.estimate.request import EstimateRequest
from paceline.estimate.run_case import software_name
from paceline.estimate.single_estimate import Estimate, estimate
from paceline.explain.explanation import BaselineKind
from paceline.explain.observed_run import (
    ObservedRun,
    ProfiledStep,
    find_source,
    observed_run,
    own_profiled_step,
)
from paceline.explain.step_breakdown import StepParts
from paceline.files.recipe import load_recipe
from paceline.logs.facts import UserSettings
from paceline.runs.comparison_inputs import NO_SETTINGS

BASELINE_KEYWORDS = ("reference", "estimate")
SAME_WORK = ("model", "lora", "seq_len")
"""Settings that must be equal for two runs to do the same work per sequence."""
SHOWN_BY_A_LOG = "the extra time of its slow steps, which is all that a log alone shows"
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
    dispatch_s: float | None = None
    """Seconds per step of its exchanges of tokens at equal loads, None if unknown."""
    imbalance_s: float = 0.0
    """Seconds per step that equal loads of expert ranks would save."""
    differences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def baseline_of(
    run: ObservedRun, against: str | None, root: Path, settings: UserSettings = NO_SETTINGS
) -> Baseline:
    """Return the baseline for a run or log, `reference` or `estimate`; None means the run itself.

    Raises UserError if there is none or if its steps do different work.
    """
    if against is None:
        evidence = "the time in which its ranks could not work" if run.places else SHOWN_BY_A_LOG
        return Baseline("itself", f"itself: {evidence}")
    if against == "reference":
        return _published(run)
    if against == "estimate":
        return _estimate(run, settings)
    source = find_source(root, against)
    return _other_run(run, observed_run(source, settings), own_profiled_step(source))


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
    factor, notes = _scale(run, other)
    if keys := alike.unstated_by_one_side:
        notes += (f"assumed equal, because only one side states it: {', '.join(keys)}",)
    settings = tuple(f"{d.key}: {d.baseline} -> {d.candidate}" for d in alike.differences)
    changes = environment_changes([other.environment], [run.environment])
    surroundings = tuple(f"{c.item}: {c.before} -> {c.after}" for c in changes)
    parts, experts = other.account.parts.scaled(factor), other.account.experts
    return Baseline(
        kind="run",
        title=f"run {other.result.run}",
        step_s=parts.total,
        parts=parts,
        error_s=other.account.error_s * factor,
        run=other,
        profile=profile,
        dispatch_s=experts.balanced_dispatch_s * factor if experts else None,
        imbalance_s=experts.imbalance_s * factor if experts else 0.0,
        differences=(*settings, *surroundings),
        notes=notes,
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


def can_estimate(run: ObservedRun, settings: UserSettings) -> bool:
    """Return True if an estimate of a logged run needs no further settings."""
    return not _missing_settings(run, settings)


def _missing_settings(run: ObservedRun, settings: UserSettings) -> list[str]:
    options = {
        "--model": _recipe_name(run, settings),
        "--gpu": run.facts.device or settings.device,
        "--gpus": run.facts.num_devices or settings.num_devices,
    }
    return [option for option, value in options.items() if value is None]


def _recipe_name(run: ObservedRun, settings: UserSettings) -> str | None:
    """Return the recipe or model that the user names, or the recipe stored with an import."""
    name = settings.model or settings.recipe
    recipe = run.facts.recipe
    if name or not recipe:
        return name
    with suppress(UserError):
        return recipe if load_recipe(recipe).model == run.facts.model else None
    return None


def _request_for_log(run: ObservedRun, settings: UserSettings) -> EstimateRequest:
    """Return the estimate request for the settings that a log states and the user adds."""
    if missing := _missing_settings(run, settings):
        raise UserError(
            "--against estimate",
            f"needs what the log does not state: {', '.join(missing)}",
            remedy=f"add {' '.join(f'{option} ...' for option in missing)}",
        )
    from_log = run.facts
    layout = from_log.layout.model_dump(exclude_defaults=True) if from_log.layout else {}
    training = {
        "global_batch": from_log.global_batch,
        "seq_len": from_log.seq_len,
        "dtype": from_log.dtype,
    }
    engine = (from_log.engine or "").lower()
    software = engine if engine in SOFTWARE else software_name(engine)
    return EstimateRequest(
        recipe=_recipe_name(run, settings) or "",
        device=from_log.device or settings.device or "",
        devices=from_log.num_devices or settings.num_devices or 0,
        overrides=(
            *(f"layout.{name}={value}" for name, value in layout.items()),
            *(f"training.{name}={value}" for name, value in training.items() if value),
        ),
        software=software,
    )


def _estimate(run: ObservedRun, settings: UserSettings) -> Baseline:
    if run.spec is None:
        answer = estimate(_request_for_log(run, settings), shipped_evidence())
    else:
        measured = measured_run(run.report)
        answer = estimate_measured_run(measured, request_for_run(measured))
    interval = f"80% interval {step_seconds(answer.low_s)}-{step_seconds(answer.high_s)} s"
    # 80% of a normal distribution is within 1.28 standard errors of the mean.
    error_s = (answer.high_s - answer.low_s) / (2 * 1.28)
    title = f"the estimate, {interval}, based on {answer.provenance.title}"
    dispatch_s = answer.parts["ep"] if run.layout.ep > 1 else None
    parts = _parts(answer)
    return Baseline("estimate", title, answer.step_time_s, parts, error_s, dispatch_s=dispatch_s)


def _parts(answer: Estimate) -> StepParts:
    communication = sum(answer.parts[name] for name in COMMUNICATION)
    bubble = answer.parts["bubble"]
    return StepParts(
        compute=answer.step_time_s - communication - bubble,
        bubble=bubble,
        communication=communication,
    )
