"""Verdict on a single run compared with published rows."""

from __future__ import annotations

from paceline.compare.significance import MIN_REPEATS
from paceline.compare.verdict_warnings import TOO_GOOD
from paceline.core.result import ReferenceComparison, RunVerdict, Status, WindowRecord
from paceline.core.units import percent


def single_run_verdict(
    status: Status,
    reason: str | None,
    window: WindowRecord | None,
    comparisons: tuple[ReferenceComparison, ...],
) -> RunVerdict:
    """Return the verdict on one run: "invalid" without a valid figure, "none" without a reference.

    Otherwise a single run is "undecided", as in `compare --against`. The sentence reports its ratio
    to the reference, and the number of runs needed.
    """
    if status != "ok" or window is None:
        return RunVerdict(kind="invalid", sentence=f"Not judged: {reason or status}.")
    comparable = [c for c in comparisons if c.comparable and c.ratio is not None]
    if not comparable:
        why = next((c.why_not for c in comparisons if c.why_not), None)
        return RunVerdict(
            kind="none",
            sentence=f"No comparable published figure: {why or 'the recipe names none'}.",
        )
    if window.state == "uneven" or window.shift:
        reference = comparable[0].reference
        sentence = f"Undecided against {reference}: step time is not stationary."
        return RunVerdict(kind="undecided", sentence=sentence)
    return _against(comparable[0])


def _against(best: ReferenceComparison) -> RunVerdict:
    """Return the verdict on one run and a published row: their ratio, and the runs needed."""
    ratio = best.ratio or 0.0
    printed = f", printed to within {percent(best.resolution, 2)}" if best.resolution > 5e-4 else ""
    place = f"{percent(abs(ratio - 1))} {'slower' if ratio < 1 else 'faster'}"
    suspicious = ratio - 1 > TOO_GOOD + best.resolution
    doubt = "; suspiciously fast" if suspicious else ""
    sentence = (
        f"Undecided against {best.reference}: {place}{printed}, but one run does not show the "
        f"run-to-run variation{doubt}. {MIN_REPEATS} runs decide: "
        f"`--repeat {MIN_REPEATS}`, then `paceline compare GROUP --against reference`."
    )
    return RunVerdict(kind="undecided", sentence=sentence)
