"""The diagnosis of a slow run: its lost time by cause, largest first, and the unexplained rest."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from paceline.explain.baseline import Baseline, baseline_of, can_estimate
from paceline.explain.context import DiagnosisContext, Finding
from paceline.explain.explanation import Explanation
from paceline.explain.observed_run import (
    ObservedRun,
    ProfiledStep,
    load_profiled_step,
    observed_run,
    own_profiled_step,
)
from paceline.explain.step_breakdown import StepParts
from paceline.explain.wait_causes import WAIT_CAUSES
from paceline.explain.work_causes import avoidable_recompute_findings, work_causes
from paceline.logs.facts import UserSettings
from paceline.runs.comparison_inputs import NO_SETTINGS

MIN_CAUSE_SHARE = 0.05
"""Minimum share of the step that a cause must take to be reported."""
MIN_CAUSE_SHARE_ALONE = 0.1
"""The same without a baseline that shows how much is normal."""


def findings(context: DiagnosisContext) -> list[Finding]:
    """Return the causes that take enough of the step to be reported, largest first."""
    alone = context.base.step_s is None
    min_s = (MIN_CAUSE_SHARE_ALONE if alone else MIN_CAUSE_SHARE) * context.parts.total
    large = [f for find in WAIT_CAUSES for f in find(context) if f.seconds >= min_s]
    large += [f for f in work_causes(context) if f.seconds >= min_s]
    return sorted(large, key=lambda finding: -finding.seconds)


def explain(
    source: Path,
    against: str | None,
    root: Path,
    profile: str | None = None,
    settings: UserSettings = NO_SETTINGS,
) -> Explanation:
    """Explain why a run is slow compared with the baseline `against` (baseline_of).

    `source` is a run folder or a training log; `settings` add to what a log states.

    `profile` is a profile of the same training; the default is the run's own profile, if any.

    Raises UserError if the run has no recorded steps or the baseline is unavailable.
    """
    run = observed_run(source, settings)
    if against is None and run.spec is None and can_estimate(run, settings):
        against = "estimate"  # a log alone shows only what its slow steps cost
    step = load_profiled_step(root, profile) if profile else own_profiled_step(source)
    return explain_run(run, baseline_of(run, against, root, settings), step)


def explain_run(run: ObservedRun, base: Baseline, profile: ProfiledStep | None) -> Explanation:
    """Return the causes of the time that the run loses compared with the baseline.

    A run that loses less than 5% of its step counts as equally fast and gets no cause.
    """
    parts, context = run.account.parts, DiagnosisContext(run, base, profile)
    large_findings = findings(context)
    lost_s = _lost_seconds(context)
    if base.step_s is not None and lost_s < MIN_CAUSE_SHARE * parts.total:
        large_findings = []
    causes = tuple(finding.of(lost_s) for finding in large_findings) if lost_s > 0 else ()
    return Explanation(
        run=run.result.run,
        baseline_kind=base.kind,
        baseline=base.title,
        step_s=parts.total,
        baseline_s=base.step_s,
        n=run.account.n,
        lost_s=lost_s,
        causes=causes,
        unexplained_s=max(0.0, lost_s - sum(cause.seconds for cause in causes)),
        parts_s=asdict(parts),
        baseline_parts_s=asdict(base.parts) if base.parts else None,
        differences=base.differences,
        notes=(
            *base.notes,
            *_unexplained_work_note(context, len(causes)),
            *_unmarked_waits_note(run),
        ),
    )


def _lost_seconds(context: DiagnosisContext) -> float:
    """Return the seconds lost per step compared with the baseline.

    Without a baseline, all time in which the ranks do not work is lost, and so is recomputation
    that is not needed to fit into memory.
    """
    parts, base_s = context.parts, context.base.step_s
    if base_s is not None:
        return parts.total - base_s
    host_gap_s = (context.host_gap_s or 0.0) if context.run.facts.device != "cpu" else 0.0
    recompute_s = sum(finding.seconds for finding in avoidable_recompute_findings(context))
    return parts.total - parts.compute + min(parts.compute, host_gap_s + recompute_s)


def _unexplained_work_note(context: DiagnosisContext, num_causes: int) -> tuple[str, ...]:
    """Return a note if the ranks' own work is slower for no recorded reason."""
    excess = context.excess("compute") if context.base.parts else 0.0
    parts: StepParts = context.parts
    if num_causes or excess < MIN_CAUSE_SHARE * parts.total:
        return ()
    return (f"the ranks' own work takes {excess:.4g} s longer for no recorded reason",)


def _unmarked_waits_note(run: ObservedRun) -> tuple[str, ...]:
    """Return a note if waits for collectives are not recorded."""
    if run.account.marks_waits or run.facts.num_devices == 1:
        return ()
    if not run.places:
        return (
            "a log tells what a step took, not what ranks wait for: waits for collectives, data "
            "and other ranks count as own work; `--against` another log shows what got slower",
        )
    return ("the program records no waits for collectives; they count as the ranks' own work",)
