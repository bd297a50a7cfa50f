"""All causes of what a run takes longer, the largest first."""

from __future__ import annotations

from paceline.explain.inquiry import Finding, Inquiry
from paceline.explain.waits import WAITS
from paceline.explain.work import of_work

NAMED_SHARE = 0.05
"""Of the step: what takes less is not worth a name."""
NAMED_ALONE = 0.1
"""The same where no baseline tells how much is usual."""


def findings(question: Inquiry) -> list[Finding]:
    """Everything that takes enough of the step to be named, the largest first."""
    alone = question.base.step_s is None
    least = (NAMED_ALONE if alone else NAMED_SHARE) * question.parts.total
    named = [f for look in WAITS for f in look(question) if f.seconds >= least]
    named += [f for f in of_work(question) if f.seconds >= least]
    return sorted(named, key=lambda finding: -finding.seconds)
