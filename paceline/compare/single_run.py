"""What one run says when held against published rows."""

from __future__ import annotations

from math import log

from paceline.compare.doubts import TOO_GOOD
from paceline.compare.significance import MARGIN, decide_by_margin
from paceline.core.result import ReferenceComparison, Status, Verdict, WindowRecord
from paceline.core.units import percent


def single_run_verdict(
    status: Status,
    reason: str | None,
    window: WindowRecord | None,
    comparisons: tuple[ReferenceComparison, ...],
) -> Verdict:
    """The verdict of one run: invalid without a trustworthy figure, none without a reference.

    The rule is that of `compare --against` for a single run: the margin of 1 %, widened by the
    reference's printed resolution, and never with more than low confidence.
    """
    if status != "ok" or window is None:
        return Verdict(kind="invalid", sentence=f"Not judged: {reason or status}.")
    comparable = [c for c in comparisons if c.comparable and c.ratio is not None]
    if not comparable:
        why = next((c.why_not for c in comparisons if c.why_not), None)
        return Verdict(
            kind="none",
            sentence=f"No comparable published figure: {why or 'the recipe names none'}.",
        )
    if window.state == "uneven":
        reference = comparable[0].reference
        sentence = f"Undecided against {reference}: the run's steps keep to no one level."
        return Verdict(kind="undecided", sentence=sentence)
    return _against(comparable[0])


def _against(best: ReferenceComparison) -> Verdict:
    ratio = best.ratio or 0.0
    change = decide_by_margin(log(ratio), best.known_error, MARGIN, best.resolution)
    printed = f", printed to within {percent(best.resolution, 2)}" if best.resolution > 5e-4 else ""
    doubt = (
        f"one run against a margin of {percent(MARGIN, 0)}{' and that' if printed else ''}; "
        "repeats would make it certain"
    )
    size = percent(abs(ratio - 1))
    if change == "undecided":
        noise = f"the noise within the run is as large as the difference of {size}"
        return Verdict(kind="undecided", sentence=f"Undecided against {best.reference}: {noise}.")
    if change == "same":
        sentence = f"As fast as {best.reference}{printed} ({doubt})."
        return Verdict(kind="pass", sentence=sentence)
    kind = "slower" if change == "lower" else "faster"
    suspicious = kind == "faster" and ratio - 1 > TOO_GOOD + best.resolution
    doubt += "; too good to be believed at once" if suspicious else ""
    sentence = f"{size} {kind} than {best.reference}{printed} ({doubt})."
    return Verdict(kind=kind, sentence=sentence)
