"""Report of a sequential comparison."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.compare.judgement import percent_change, verdict_label, verdict_tone
from paceline.compare.sequential.judgement import InterimAnalysis, SequentialComparison
from paceline.core.units import percent, pluralize
from paceline.report.document import Column, Document, Notes, Table, Verdict

WHY_ENDED = {
    "interrupted": "interrupted: finished runs are kept",
    "failed": "no further pair could be run: one side keeps failing, or hosts are lost",
}


def sequential_document(comparison: SequentialComparison) -> Document:
    """Return the verdict, all interim analyses, their warnings, and how to resume."""
    return Document(
        kind="sequential comparison",
        title=f"{comparison.candidate.short_name} against {comparison.baseline.short_name}",
        setup=(
            f"{pluralize(comparison.pairs, 'pair')} of up to {comparison.max_pairs}",
            f"margin {percent(comparison.margin, 2)}",
            f"false-alarm rate over all analyses up to {percent(comparison.error, 0)}",
        ),
        verdict=Verdict(
            verdict_label(comparison.verdict, low_confidence=comparison.confidence == "low"),
            verdict_tone(comparison.verdict),
        ),
        answer=(comparison.sentence,),
        sections=(
            Notes(title="Warnings", lines=comparison.warnings, tone="alert"),
            Table(
                title="Interim analyses",
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
                    for look in comparison.analyses
                ],
            ),
            Notes(title="Possible causes", lines=comparison.causes),
        ),
        notes=tuple(_notes(comparison)),
        data=comparison,
    )


def look_text(look: InterimAnalysis) -> str:
    """Return `after 5 pairs +2.01% (+0.90% to +3.13%): slower`."""
    return (
        f"after {pluralize(look.pairs, 'pair')} {percent_change(look.ratio)} "
        f"({percent_change(look.low)} to {percent_change(look.high)}): {look.verdict}"
    )


def _notes(comparison: SequentialComparison) -> Iterator[str]:
    if comparison.why_low:
        yield f"low confidence: {'; '.join(comparison.why_low)}"
    for difference in comparison.differences:
        yield f"{difference.key}: {difference.baseline} against {difference.candidate}"
    if comparison.unpaired_runs:
        yield f"not paired: {', '.join(comparison.unpaired_runs)}"
    if comparison.end_reason in WHY_ENDED:
        yield WHY_ENDED[comparison.end_reason]
    if comparison.next_action:
        yield f"to continue: {comparison.next_action}"
