"""The answer of `paceline explain` as a document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from paceline.core.units import percent, significant
from paceline.explain.explanation import CauseEvidence, Explanation
from paceline.report.document import Column, Document, Figure, Table, Verdict, unknown_figure

if TYPE_CHECKING:
    from altair import LayerChart

    from paceline.report.theme import Look

CAUSES = (
    Column("cause", "cause"),
    Column("share", "of what is lost", percent, "right"),
    Column("seconds", "of a step", lambda value: f"{significant(value)} s", "right"),
    Column("remedy", "what to try", wraps=True),
)
EVIDENCE = (
    Column("cause", "cause"),
    Column("what", "what"),
    Column("figure", "figure", justify="right"),
    Column("n", "n", lambda value: f"{value:,}", "right"),
    Column("source", "source", wraps=True),
)
CSV_KEYS = ("cause", "share", "seconds", "evidence", "remedy")


def explanation_document(answer: Explanation) -> Document:
    """Return the causes by their share of the lost time, with their evidence and remedies."""
    first = answer.first
    return Document(
        kind="why a run is slow",
        title=answer.run,
        verdict=Verdict(first.cause, "alert") if first else Verdict("no cause is named"),
        setup=(f"against {answer.baseline}",),
        answer=(headline(answer),),
        figures=tuple(_figures(answer)),
        sections=(
            Table(
                title="Causes, and what to try",
                columns=CAUSES,
                rows=[cause.model_dump() for cause in answer.causes],
                note="Causes that overlap in time can add up to more than the loss.",
            ),
            Table(
                title="Evidence",
                columns=EVIDENCE,
                rows=[
                    {**each.model_dump(), "cause": cause.cause, "figure": _figure(each)}
                    for cause in answer.causes
                    for each in cause.evidence
                ],
            ),
            Table(
                title="Where the mean step's seconds went",
                columns=[
                    Column("part", "part"),
                    Column("time", "this run", justify="right"),
                    Column("share", "share", percent, "right"),
                    *([Column("baseline", "baseline")] if answer.baseline_parts_s else []),
                ],
                rows=list(_parts(answer)),
                note="The parts of each mean step add up to it.",
            ),
        ),
        notes=(*(f"differs: {each}" for each in answer.differences), *answer.notes),
        charts=lambda theme: _charts(answer, theme),
        data=answer,
        csv=Table(
            columns=[Column(key, key) for key in CSV_KEYS],
            rows=[
                {**cause.model_dump(), "evidence": "; ".join(map(evidence_text, cause.evidence))}
                for cause in answer.causes
            ],
        ),
    )


def headline(answer: Explanation) -> str:
    """Return what takes most of the lost time, in one sentence."""
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


def evidence_text(evidence: CauseEvidence) -> str:
    """Return one figure with unit, n and source."""
    n = "" if evidence.n is None else f", n = {evidence.n}"
    return f"{evidence.what}: {_figure(evidence)}{n} [{evidence.source}]"


def _charts(answer: Explanation, theme: Look) -> Mapping[str, LayerChart]:
    from paceline.explain.charts import explanation_charts  # Altair takes long to import.

    return explanation_charts(answer, theme)


def _figures(answer: Explanation) -> Iterator[Figure]:
    base = answer.baseline_s
    beside = () if base is None else (f"{significant(base)} s in the baseline",)
    yield Figure("Mean step", f"{significant(answer.step_s)} s", f"n = {answer.n}", beside)
    if answer.lost_s <= 0:
        yield unknown_figure("Lost", "the step is no longer than it should be")
        yield unknown_figure("First cause", "nothing is lost")
        yield unknown_figure("Unexplained", "nothing is lost")
        return
    lost = f"{significant(answer.lost_s)} s of it"
    yield Figure("Lost", percent(answer.lost_s / answer.step_s), "of the mean step", (lost,))
    if first := answer.first:
        share = f"{percent(first.share)} of what is lost"
        step = f"{significant(first.seconds)} s of a step"
        yield Figure("First cause", first.cause, share, (step,))
    else:
        yield unknown_figure("First cause", "no cause is large enough, and sure enough")
    rest_s = answer.unexplained_s
    step = f"{significant(rest_s)} s of a step"
    yield Figure("Unexplained", percent(rest_s / answer.lost_s), "of what is lost", (step,))


def _figure(evidence: CauseEvidence) -> str:
    return f"{significant(evidence.value)} {evidence.unit}".strip()


def _parts(answer: Explanation) -> Iterator[dict[str, Any]]:
    baseline = answer.baseline_parts_s or {}
    for part, seconds in answer.parts_s.items():
        other = baseline.get(part, 0.0)
        if seconds > 0 or other > 0:
            yield {
                "part": part.replace("_", " "),
                "time": f"{significant(seconds)} s",
                "share": seconds / answer.step_s,
                "baseline": f"{significant(other)} s",
            }
