"""A comparison of pairs of runs as a document."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.compare.sequential.judgement import SequentialComparison, SequentialLook
from paceline.compare.verdicts import percent_change, verdict_label, verdict_tone
from paceline.core.units import counted, percent
from paceline.report.document import Column, Document, Notes, Table, Verdict

WHY_ENDED = {
    "interrupted": "interrupted: what had ended is kept",
    "failed": "no further pair could be made: runs of one side only fail, or hosts are lost",
}


def sequential_document(answer: SequentialComparison) -> Document:
    """Return the verdict, every interim look, what to know about them, and how to resume."""
    return Document(
        kind="two sides compared in pairs",
        title=f"{answer.candidate.short_name} against {answer.baseline.short_name}",
        setup=(
            f"{counted(answer.pairs, 'pair')} of at most {answer.most_pairs}",
            f"margin {percent(answer.margin, 2)}",
            f"false alarms over all looks in at most {percent(answer.error, 0)}",
        ),
        verdict=Verdict(
            verdict_label(answer.verdict, low_confidence=answer.confidence == "low"),
            verdict_tone(answer.verdict),
        ),
        answer=(answer.sentence,),
        sections=(
            Notes(title="Warnings", lines=answer.warnings, tone="alert"),
            Table(
                title="Looks",
                columns=(
                    Column("pairs", "pairs", justify="right"),
                    Column("ratio", "change", percent_change, "right"),
                    Column("interval", "interval"),
                    Column("verdict", "verdict"),
                ),
                rows=[
                    {
                        **look.model_dump(),
                        "interval": f"{percent_change(look.low)} to {percent_change(look.high)}",
                    }
                    for look in answer.looks
                ],
            ),
            Notes(title="Possible causes", lines=answer.causes),
        ),
        notes=tuple(_notes(answer)),
        data=answer,
    )


def look_text(look: SequentialLook) -> str:
    """Return `after 5 pairs +2.01 % (+0.90 % to +3.13 %): slower`."""
    return (
        f"after {counted(look.pairs, 'pair')} {percent_change(look.ratio)} "
        f"({percent_change(look.low)} to {percent_change(look.high)}): {look.verdict}"
    )


def _notes(answer: SequentialComparison) -> Iterator[str]:
    if answer.why_low:
        yield f"low confidence: {'; '.join(answer.why_low)}"
    for difference in answer.differences:
        yield f"{difference.key}: {difference.baseline} against {difference.candidate}"
    if answer.unpaired:
        yield f"without a partner: {', '.join(answer.unpaired)}"
    if answer.ended in WHY_ENDED:
        yield WHY_ENDED[answer.ended]
    if answer.go_on:
        yield f"to go on: {answer.go_on}"
