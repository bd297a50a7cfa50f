"""The report of `paceline explain` as a document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from paceline.core.units import percent, significant
from paceline.explain.explanation import CauseEvidence, Explanation
from paceline.report.document import Column, Document, Figure, Table, Verdict, unknown_figure

if TYPE_CHECKING:
    from altair import LayerChart

    from paceline.report.theme import ChartTheme

CAUSES = (
    Column("cause", "cause"),
    Column("share", "of lost time", percent, "right"),
    Column("seconds", "per step", lambda value: f"{significant(value)} s", "right"),
    Column("remedy", "remedy", wraps=True),
)
EVIDENCE = (
    Column("cause", "cause"),
    Column("what", "evidence"),
    Column("figure", "value", justify="right"),
    Column("n", "n", lambda value: f"{value:,}", "right"),
    Column("source", "source", wraps=True),
)
CSV_KEYS = ("cause", "share", "seconds", "evidence", "remedy")


def explanation_document(answer: Explanation) -> Document:
    """Return the causes by their share of the lost time, with evidence and remedies."""
    first = answer.first
    return Document(
        kind="why a run is slow",
        title=answer.run,
        headline=headline(answer),
        source=answer.run,
        verdict=Verdict(first.cause, "alert") if first else Verdict("no cause found"),
        setup=(f"compared with {answer.baseline}",),
        answer=(headline(answer),),
        figures=tuple(_figures(answer)),
        sections=(
            Table(
                title="Causes and remedies",
                columns=CAUSES,
                rows=[cause.model_dump() for cause in answer.causes],
                note="Causes can overlap in time, so their sum can exceed the lost time.",
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
                title="Mean step by part",
                columns=[
                    Column("part", "part"),
                    Column("time", "this run", justify="right"),
                    Column("share", "share", percent, "right"),
                    *([Column("baseline", "baseline")] if answer.baseline_parts_s else []),
                ],
                rows=list(_parts(answer)),
                note="The parts add up to the mean step.",
            ),
        ),
        notes=(*(f"different setting: {each}" for each in answer.differences), *answer.notes),
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
    """Return the step time, the loss and its largest cause in one sentence."""
    step = f"{significant(answer.step_s)} s per step (n = {answer.n})"
    if answer.baseline_s is None:
        loss = f"{percent(answer.lost_s / answer.step_s, 0)} of it lost"
    elif not answer.lost_s:
        loss = f"the same as {answer.baseline}"
    else:
        loss = (
            f"{significant(abs(answer.lost_s))} s {'more' if answer.lost_s > 0 else 'less'} than "
            f"{answer.baseline}"
        )
    first = answer.first
    why = (
        f"largest cause: {first.cause}, {percent(first.share, 0)} of the lost time"
        if first
        else "no cause found"
    )
    return f"{answer.run}: {step}, {loss}; {why}"


def evidence_text(evidence: CauseEvidence) -> str:
    """Return one piece of evidence with unit, n and source."""
    n = "" if evidence.n is None else f", n = {evidence.n}"
    return f"{evidence.what}: {_figure(evidence)}{n} [{evidence.source}]"


def _charts(answer: Explanation, theme: ChartTheme) -> Mapping[str, LayerChart]:
    from paceline.explain.charts import explanation_charts  # Altair takes long to import.

    return explanation_charts(answer, theme)


def _figures(answer: Explanation) -> Iterator[Figure]:
    base = answer.baseline_s
    baseline_line = () if base is None else (f"baseline {significant(base)} s",)
    yield Figure("Mean step", f"{significant(answer.step_s)} s", f"n = {answer.n}", baseline_line)
    if answer.lost_s <= 0:
        yield unknown_figure("Lost", "the step is not slower than the baseline")
        yield unknown_figure("Largest cause", "no time is lost")
        yield unknown_figure("Unexplained", "no time is lost")
        return
    lost_line = f"{significant(answer.lost_s)} s per step"
    yield Figure("Lost", percent(answer.lost_s / answer.step_s), "of the mean step", (lost_line,))
    if first := answer.first:
        share = f"{percent(first.share)} of the lost time"
        step = f"{significant(first.seconds)} s per step"
        yield Figure("Largest cause", first.cause, share, (step,))
    else:
        yield unknown_figure("Largest cause", "no cause is large and significant enough")
    unexplained_s = answer.unexplained_s
    step = f"{significant(unexplained_s)} s per step"
    yield Figure("Unexplained", percent(unexplained_s / answer.lost_s), "of the lost time", (step,))


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
