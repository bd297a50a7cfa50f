"""What one run says when held against published rows."""

from __future__ import annotations

from paceline.core.result import ReferenceComparison, Status, Verdict, WindowRecord

MARGIN = 0.01
"""A single run is judged only against this margin, and with low confidence."""


def single_run_verdict(
    status: Status,
    reason: str | None,
    window: WindowRecord | None,
    comparisons: tuple[ReferenceComparison, ...],
) -> Verdict:
    """The verdict of one run: invalid without a trustworthy figure, none without a reference."""
    if status != "ok" or window is None:
        return Verdict(kind="invalid", sentence=f"Not judged: {reason or status}.")
    comparable = [c for c in comparisons if c.comparable and c.ratio is not None]
    if not comparable:
        why = next((c.why_not for c in comparisons if c.why_not), None)
        return Verdict(
            kind="none",
            sentence=f"No comparable published figure: {why or 'the recipe names none'}.",
        )
    best = comparable[0]
    ratio = best.ratio or 0.0
    low_confidence = "one run against a margin of 1 %; repeats would make it certain"
    if ratio < 1 - MARGIN:
        kind, word = "slower", f"{100 * (1 - ratio):.1f} % slower than"
    elif ratio > 1 + MARGIN:
        kind, word = "faster", f"{100 * (ratio - 1):.1f} % faster than"
    else:
        kind, word = "pass", "As fast as"
    return Verdict(kind=kind, sentence=f"{word} {best.reference} ({low_confidence}).")
