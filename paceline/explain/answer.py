"""The answer to why a run is slow: its lost time by cause, and the rest that no cause explains."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from paceline.explain.account import StepParts
from paceline.explain.baseline import Baseline, baseline_of
from paceline.explain.causes import NAMED_SHARE, findings
from paceline.explain.explanation import Explanation
from paceline.explain.inquiry import Inquiry
from paceline.explain.observed import ObservedRun, observed
from paceline.explain.profiled import ProfiledStep, profile_of_run, profiled_step
from paceline.explain.work import avoidable_recompute


def explain(
    folder: Path,
    against: str | None,
    root: Path,
    profile: str | None = None,
) -> Explanation:
    """Why the run in `folder` is as slow as it is, against what `baseline_of` makes of `against`.

    `profile` names a profile of the same training; without it the run's own counts, if it has one.

    Raises UserError for a run without steps of its own, and for a baseline that cannot be had.
    """
    run = observed(folder)
    step = profiled_step(root, profile) if profile else profile_of_run(folder)
    return explained(run, baseline_of(run, against, root), step)


def explained(run: ObservedRun, base: Baseline, profile: ProfiledStep | None) -> Explanation:
    """The causes of what the run takes longer than the baseline.

    A run that is less than 5 % slower is as fast as that, and no cause is named.
    """
    parts, question = run.account.parts, Inquiry(run, base, profile)
    named = findings(question)
    lost_s = _lost(question)
    if base.step_s is not None and lost_s < NAMED_SHARE * parts.total:
        named = []
    causes = tuple(finding.of(lost_s) for finding in named) if lost_s > 0 else ()
    return Explanation(
        run=run.result.run,
        against=base.kind,
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
        notes=(*base.notes, *_of_work(question, len(causes)), *_unmarked(run)),
    )


def _lost(question: Inquiry) -> float:
    """Seconds beyond the baseline's step; against itself those without the ranks' first work.

    What is recomputed because memory asks for it is no loss.
    """
    parts, base_s = question.parts, question.base.step_s
    if base_s is not None:
        return parts.total - base_s
    idle_s = (question.host_gap_s or 0.0) if question.run.facts.device != "cpu" else 0.0
    again_s = sum(finding.seconds for finding in avoidable_recompute(question))
    return parts.total - parts.compute + min(parts.compute, idle_s + again_s)


def _of_work(question: Inquiry, num_causes: int) -> tuple[str, ...]:
    """That much of what is unexplained lies in the ranks' own work."""
    excess = question.excess("compute") if question.base.parts else 0.0
    parts: StepParts = question.parts
    if num_causes or excess < NAMED_SHARE * parts.total:
        return ()
    return (f"the ranks' own work takes {excess:.4g} s longer, and nothing recorded says why",)


def _unmarked(run: ObservedRun) -> tuple[str, ...]:
    """That waits for other ranks are in the ranks' own work."""
    if run.account.marks_waits or (run.facts.num_devices or 1) == 1:
        return ()
    return ("its program marks no waits for collectives: they count as the ranks' own work",)
