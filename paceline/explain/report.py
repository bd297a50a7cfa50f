"""The report of `paceline explain` as a document, with charts of lost time and of the mean step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import altair as alt

from paceline.core.text import one_line
from paceline.core.units import percent, pluralize, significant
from paceline.explain.explanation import CauseEvidence, Explanation
from paceline.report.document import Column, Document, Figure, Table, Verdict, unknown_figure
from paceline.report.step_charts import finish_chart
from paceline.report.theme import ChartTheme

BAR_HEIGHT = 30
MIN_SHARE = 0.001
"""Minimum share of a step for which a part is drawn."""
COLOURS = {
    "compute": "steady",
    "data": "ink",
    "checkpoint": "warmup",
    "straggler": "accent",
    "core_wait": "warmup_soft",
    "bubble": "good_soft",
    "communication": "good",
}
"""The palette's colour of each part of `StepParts`, in the order of the bars."""


def explanation_charts(answer: Explanation, look: ChartTheme) -> dict[str, alt.LayerChart]:
    """Return both charts by name; the chart of causes only if time was lost."""
    parts = parts_chart(answer, look)
    if answer.lost_s <= 0:
        return {"parts": parts}
    return {"causes": causes_chart(answer, look), "parts": parts}


def causes_chart(answer: Explanation, look: ChartTheme) -> alt.LayerChart:
    """Return a bar chart of the seconds lost per cause, with the unexplained time last."""
    rows = [_bar(each.cause, each.seconds, each.share, "cause") for each in answer.causes]
    rest_s = answer.unexplained_s
    rows.append(_bar("unexplained", rest_s, rest_s / answer.lost_s, "rest"))
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y(
            "cause:N",
            sort=[row["cause"] for row in rows],
            title=None,
            axis=alt.Axis(labelLimit=180),
        ),
        tooltip=[
            alt.Tooltip("cause:N"),
            alt.Tooltip("seconds:Q", title="seconds of a step", format=".4~f"),
            alt.Tooltip("share:N", title="of the lost time"),
        ],
    )
    # Leave room for the label behind the longest bar.
    longest = 1.4 * max(row["seconds"] for row in rows)
    x = alt.X("seconds:Q", title="seconds of a step", scale=alt.Scale(domain=[0, longest]))
    colours = [look.palette.accent, look.palette.warmup]
    colour = alt.Color(
        "kind:N", legend=None, scale=alt.Scale(domain=["cause", "rest"], range=colours)
    )
    bars = base.mark_bar(height={"band": 0.7}).encode(x=x, color=colour).properties(name="causes")
    words = base.mark_text(align="left", dx=6, color=look.palette.ink).encode(x=x, text="words:N")
    note = (
        f"{significant(answer.lost_s)} s per step are lost {_comparison_phrase(answer)}. Next to "
        "each bar: its share of the lost time and its seconds."
    )
    height = 40 + BAR_HEIGHT * len(rows)
    return finish_chart([bars, words], look, "Lost time by cause", [note], height, answer.run)


def parts_chart(answer: Explanation, look: ChartTheme) -> alt.LayerChart:
    """Return a bar of the mean step by part, and the baseline's below it if known."""
    sides = {"this run": answer.parts_s}
    if answer.baseline_parts_s:
        sides["baseline"] = answer.baseline_parts_s
    rows = [row for side, parts in sides.items() for row in _segments(side, parts)]
    parts_present = [part for part in COLOURS if any(row["part"] == _title(part) for row in rows)]
    bars = (
        alt.Chart(alt.Data(values=rows), name="parts")
        .mark_bar(height=18, stroke=look.palette.card, strokeWidth=1)
        .encode(
            x=alt.X("start:Q", title="seconds of a step", axis=alt.Axis(grid=True, tickCount=6)),
            x2="end:Q",
            y=alt.Y("side:N", sort=[*sides], title=None, axis=alt.Axis(grid=False)),
            color=alt.Color(
                "part:N",
                scale=alt.Scale(
                    domain=[_title(part) for part in parts_present],
                    range=[getattr(look.palette, COLOURS[part]) for part in parts_present],
                ),
                legend=alt.Legend(columns=4),
            ),
            tooltip=[
                alt.Tooltip("side:N", title="of"),
                alt.Tooltip("part:N"),
                alt.Tooltip("seconds:Q", format=".4~f"),
                alt.Tooltip("share:N", title="of the step"),
            ],
        )
    )
    note = f"Mean of {pluralize(answer.n, 'step')}. The parts add up to the step."
    title = "Mean step by part"
    return finish_chart([bars], look, title, [note], 60 + BAR_HEIGHT * len(sides), answer.run)


def _bar(cause: str, seconds: float, share: float, kind: str) -> dict[str, Any]:
    words = f"{percent(share, 0)}, {significant(seconds)} s"
    return {
        "cause": cause,
        "seconds": seconds,
        "share": percent(share),
        "kind": kind,
        "words": words,
    }


def _comparison_phrase(answer: Explanation) -> str:
    if answer.baseline_s is None:
        return "in which the ranks could not work"
    return f"compared with {one_line(answer.baseline)}"


def _segments(side: str, parts: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    start, whole = 0.0, sum(parts.values())
    for part in COLOURS:
        seconds = parts.get(part, 0.0)
        start += seconds
        if seconds > MIN_SHARE * whole:
            yield {
                "side": side,
                "part": _title(part),
                "start": start - seconds,
                "end": start,
                "seconds": seconds,
                "share": percent(seconds / whole),
            }


def _title(part: str) -> str:
    return part.replace("_", " ")


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
    return Document(
        kind="why a run is slow",
        title=answer.run,
        headline=headline(answer),
        source=answer.run,
        verdict=_verdict(answer),
        setup=(f"compared with {answer.baseline}",),
        answer=(headline(answer), *_next_step(answer)),
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


MIN_SLOWER = 0.05
"""Minimum share of the step that is lost to call a run without a cause slower than its baseline."""


def _is_slower(answer: Explanation) -> bool:
    """Return whether a run is slower than its baseline by no recorded cause."""
    is_known = answer.first is None and answer.baseline_s is not None
    return is_known and answer.lost_s > MIN_SLOWER * answer.step_s


def _verdict(answer: Explanation) -> Verdict:
    if answer.first:
        return Verdict(answer.first.cause, "alert")
    if _is_slower(answer) and answer.baseline_s:
        slower = percent(answer.step_s / answer.baseline_s - 1, 0)
        return Verdict(f"{slower} slower than the baseline by no recorded cause", "alert")
    return Verdict("no cause found")


def _next_step(answer: Explanation) -> Iterator[str]:
    """Yield what would find the cause that nothing recorded shows."""
    if _is_slower(answer):
        yield (
            "Software, data loading or the cluster take the rest. `paceline probe profile` and "
            "`paceline.steplog` record where the time goes; `--against` a faster run or log shows "
            "what differs."
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
        else "no recorded cause explains it"
        if _is_slower(answer)
        else "no cause found"
    )
    return f"{answer.run}: {step}, {loss}; {why}"


def evidence_text(evidence: CauseEvidence) -> str:
    """Return one piece of evidence with unit, n and source."""
    n = "" if evidence.n is None else f", n = {evidence.n}"
    return f"{evidence.what}: {_figure(evidence)}{n} [{evidence.source}]"


def _charts(answer: Explanation, theme: ChartTheme) -> Mapping[str, LayerChart]:
    from paceline.explain.report import explanation_charts  # Altair takes long to import.

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
