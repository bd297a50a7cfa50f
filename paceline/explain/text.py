"""The answer of `paceline explain` as lines for people."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.core.units import percent, significant
from paceline.explain.explanation import Cause, CauseEvidence, Explanation


def explanation_lines(answer: Explanation) -> Iterator[str]:
    """Verdict first, then each cause with its evidence and what to try, then the rest."""
    yield headline(answer)
    for number, cause in enumerate(answer.causes, 1):
        yield ""
        yield from _cause_lines(number, cause)
    yield ""
    if answer.lost_s > 0:
        share = answer.unexplained_s / answer.lost_s
        yield f"unexplained: {significant(answer.unexplained_s)} s ({percent(share, 0)})"
    taken = {name: value for name, value in answer.parts_s.items() if value > 0}
    yield "mean step: " + ", ".join(
        f"{name.replace('_', ' ')} {significant(value)} s" for name, value in taken.items()
    )
    for difference in answer.differences:
        yield f"differs: {difference}"
    for note in answer.notes:
        yield f"note: {note}"


def headline(answer: Explanation) -> str:
    """What takes most of the lost time, in one sentence."""
    step = f"{significant(answer.step_s)} s a step (n = {answer.n})"
    if answer.baseline_s is None:
        lost = f"{percent(answer.lost_s / answer.step_s, 0)} of it without work"
    elif not answer.lost_s:
        lost = f"as long as {answer.baseline}"
    else:
        lost = (
            f"{significant(abs(answer.lost_s))} s {'more' if answer.lost_s > 0 else 'less'} than "
            f"{answer.baseline}"
        )
    first = answer.first
    why = (
        f"first cause: {first.cause}, {percent(first.share, 0)} of what is lost"
        if first
        else "no cause is named"
    )
    return f"{answer.run}: {step}, {lost}; {why}"


def _cause_lines(number: int, cause: Cause) -> Iterator[str]:
    lost = f"{significant(cause.seconds)} s, {percent(cause.share, 0)} of what is lost"
    yield f"{number}. {cause.cause}: {lost}"
    for evidence in cause.evidence:
        yield f"   {evidence_text(evidence)}"
    yield f"   try: {cause.remedy}"


def evidence_text(evidence: CauseEvidence) -> str:
    """One figure with unit, n and source."""
    n = "" if evidence.n is None else f", n = {evidence.n}"
    unit = f" {evidence.unit}" if evidence.unit else ""
    return f"{evidence.what}: {significant(evidence.value)}{unit}{n} [{evidence.source}]"
