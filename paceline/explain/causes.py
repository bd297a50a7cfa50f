"""All causes of lost time, largest first."""

from __future__ import annotations

from paceline.explain.context import DiagnosisContext, Finding
from paceline.explain.wait_causes import WAIT_CAUSES
from paceline.explain.work_causes import work_causes

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
