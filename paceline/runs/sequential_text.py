"""A comparison of pairs as terminal text."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.compare.phrases import signed
from paceline.compare.sequential.judgement import SequentialComparison, SequentialLook
from paceline.core.text import printable
from paceline.core.units import counted, percent
from paceline.runs.comparison_text import MARKS

WHY_ENDED = {
    "interrupted": "interrupted: what had ended is kept",
    "failed": "no further pair could be made: runs of one side only fail, or hosts are lost",
}


def sequential_lines(answer: SequentialComparison) -> Iterator[str]:
    """The verdict, every look, what to know beside them, and how to go on."""
    yield _line(f"{MARKS[answer.verdict]} {answer.verdict.upper()}  {answer.sentence}")
    yield (
        f"  {counted(answer.pairs, 'pair')} of at most {answer.most_pairs}, margin "
        f"{percent(answer.margin, 2)}; over all looks false alarms in at most "
        f"{percent(answer.error, 0)}"
    )
    yield from (f"  {look_text(look)}" for look in answer.looks)
    if answer.why_low:
        yield _line(f"  low confidence: {'; '.join(answer.why_low)}")
    for difference in answer.differences:
        sides = f"{difference.baseline} against {difference.candidate}"
        yield _line(f"  {difference.key}: {sides}")
    if answer.unpaired:
        yield _line(f"  without a partner: {', '.join(answer.unpaired)}")
    yield from (_line(f"  warning: {warning}") for warning in answer.warnings)
    yield from (_line(f"  possible cause: {cause}") for cause in answer.causes)
    if answer.ended in WHY_ENDED:
        yield f"  {WHY_ENDED[answer.ended]}"
    if answer.go_on:
        yield _line(f"  to go on: {answer.go_on}")


def look_text(look: SequentialLook) -> str:
    """`after 5 pairs +2.01 % (+0.90 % to +3.13 %): slower`."""
    return (
        f"after {counted(look.pairs, 'pair')} {signed(look.ratio)} ({signed(look.low)} to "
        f"{signed(look.high)}): {look.verdict}"
    )


def _line(text: str) -> str:
    return " ".join(printable(text).split("\n"))
