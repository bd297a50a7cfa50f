"""What causes are looked for in, and what each of them finds."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.explain.account import StepParts
from paceline.explain.baseline import Baseline
from paceline.explain.explanation import Cause, CauseEvidence, CauseName
from paceline.explain.observed import ObservedRun
from paceline.explain.profiled import ProfiledStep


@dataclass(frozen=True)
class Inquiry:
    """A run, what it is held against, and what a profile tells of it."""

    run: ObservedRun
    base: Baseline
    profile: ProfiledStep | None

    @property
    def parts(self) -> StepParts:
        return self.run.account.parts

    @property
    def host_gap_s(self) -> float | None:
        """Seconds of a step in which the device had nothing to do, beyond the baseline's.

        Against the run itself all of them; None where a profile is missing that would say so.
        """
        gap_s = self.profile.host_gap * self.parts.total if self.profile else None
        if gap_s is None or self.base.kind == "itself":
            return gap_s
        if self.base.profile is None or self.base.parts is None:
            return None
        return gap_s - self.base.profile.host_gap * self.base.parts.total

    def excess(self, name: str) -> float:
        """Seconds that a part is longer than the baseline's."""
        past = getattr(self.base.parts, name) if self.base.parts else 0.0
        return getattr(self.parts, name) - past

    def figures(self, what: str, name: str) -> list[CauseEvidence]:
        """A part of the run's step, and the same of the baseline where that is known."""
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
    """A cause before its share is known."""

    cause: CauseName
    seconds: float
    evidence: tuple[CauseEvidence, ...]
    remedy: str

    def of(self, lost_s: float) -> Cause:
        """The cause, of so much lost time."""
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
