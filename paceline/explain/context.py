"""The input of every cause detector, and the findings they return."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.explain.baseline import Baseline
from paceline.explain.explanation import Cause, CauseEvidence, CauseName
from paceline.explain.observed_run import ObservedRun, ProfiledStep
from paceline.explain.step_breakdown import StepParts


@dataclass(frozen=True)
class DiagnosisContext:
    """A run, its baseline and its profile."""

    run: ObservedRun
    base: Baseline
    profile: ProfiledStep | None

    @property
    def parts(self) -> StepParts:
        return self.run.account.parts

    @property
    def host_gap_s(self) -> float | None:
        """Seconds per step in which the device was idle, minus those of the baseline.

        None if a profile that would show it is missing.
        """
        gap_s = self.profile.host_gap * self.parts.total if self.profile else None
        if gap_s is None or self.base.kind == "itself":
            return gap_s
        if self.base.profile is None or self.base.parts is None:
            return None
        return gap_s - self.base.profile.host_gap * self.base.parts.total

    def excess(self, name: str) -> float:
        """Return the seconds by which a part is longer than the baseline's."""
        past = getattr(self.base.parts, name) if self.base.parts else 0.0
        return getattr(self.parts, name) - past

    @property
    def imbalance_s(self) -> float:
        """Seconds per step that unequal loads of expert ranks cost beyond the baseline's."""
        experts = self.run.account.experts
        return max(0.0, experts.imbalance_s - self.base.imbalance_s) if experts else 0.0

    @property
    def dispatch_s(self) -> float:
        """Seconds per step by which exchanges are longer than the baseline's, at equal loads.

        0 if either is unknown.
        """
        experts, base_s = self.run.account.experts, self.base.dispatch_s
        return 0.0 if experts is None or base_s is None else experts.balanced_dispatch_s - base_s

    def figures(self, what: str, name: str) -> list[CauseEvidence]:
        """Return a part of the run's step as evidence, with the baseline's if it is known."""
        account, base = self.run.account, self.base
        ours = CauseEvidence(
            what=what,
            value=getattr(self.parts, name),
            unit="s/step",
            n=account.n,
            source=self.run.source,
        )
        if base.parts is None:
            return [ours]
        n = base.run.account.n if base.run else None
        value = getattr(base.parts, name)
        return [ours, CauseEvidence(what=what, value=value, unit="s/step", n=n, source=base.title)]


@dataclass(frozen=True)
class Finding:
    """A cause before its share of the lost time is known."""

    cause: CauseName
    seconds: float
    evidence: tuple[CauseEvidence, ...]
    remedy: str

    def of(self, lost_s: float) -> Cause:
        """Return the cause with its share of `lost_s`."""
        seconds = min(self.seconds, lost_s)
        return Cause(
            cause=self.cause,
            share=seconds / lost_s,
            seconds=seconds,
            evidence=self.evidence,
            remedy=self.remedy,
        )


def setting(what: str, value: float, run: ObservedRun) -> tuple[CauseEvidence, ...]:
    source = f"settings of run {run.result.run}"
    return (CauseEvidence(what=what, value=value, unit="", n=None, source=source),)
