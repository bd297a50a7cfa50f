"""The page of an explanation: causes by their share of the lost time, with what speaks for them."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.core.text import one_line
from paceline.core.units import percent, significant
from paceline.explain.charts import explanation_charts
from paceline.explain.explanation import Explanation
from paceline.explain.text import headline
from paceline.report.head import Card, PageHead, Tone, card, unknown_card
from paceline.report.html import render_page
from paceline.report.theme import ON_PAGE

Table = tuple[str, tuple[str, ...], list[list[str]], str]


def explanation_html(answer: Explanation) -> str:
    """The page of one explanation, which loads nothing; all names in it are escaped."""
    return render_page(
        "tables.html.j2",
        _head(answer),
        explanation_charts(answer, ON_PAGE),
        tables=list(_tables(answer)),
        notes=list(_notes(answer)),
    )


def _head(answer: Explanation) -> PageHead:
    chip, tone = _verdict(answer)
    return PageHead(
        eyebrow="why a run is slow",
        name=one_line(answer.run),
        chip=chip,
        tone=tone,
        setup=(f"against {one_line(answer.baseline)}",),
        sentences=(one_line(headline(answer)),),
        cards=tuple(_cards(answer)),
    )


def _verdict(answer: Explanation) -> tuple[str, Tone]:
    if answer.first:
        return answer.first.cause, "alert"
    return "no cause is named", "plain"


def _cards(answer: Explanation) -> Iterator[Card]:
    base = answer.baseline_s
    beside = None if base is None else f"{significant(base)} s there"
    yield card("Mean step", f"{significant(answer.step_s)} s", f"n = {answer.n}", [beside])
    if answer.lost_s <= 0:
        yield unknown_card("Lost", "the step is no longer than it should be")
        yield unknown_card("First cause", "nothing is lost")
        yield unknown_card("Unexplained", "nothing is lost")
        return
    lost = [f"{significant(answer.lost_s)} s of it"]
    yield card("Lost", percent(answer.lost_s / answer.step_s), "of the mean step", lost)
    if first := answer.first:
        share = f"{percent(first.share)} of what is lost"
        yield card("First cause", first.cause, share, [f"{significant(first.seconds)} s of a step"])
    else:
        yield unknown_card("First cause", "no cause is large enough, and sure enough, to be named")
    rest_s = answer.unexplained_s
    seconds = [f"{significant(rest_s)} s of a step"]
    yield card("Unexplained", percent(rest_s / answer.lost_s), "of what is lost", seconds)


def _tables(answer: Explanation) -> Iterator[Table]:
    if answer.causes:
        rows = [
            [
                cause.cause,
                percent(cause.share),
                f"{significant(cause.seconds)} s",
                one_line(cause.remedy),
            ]
            for cause in answer.causes
        ]
        heads = ("cause", "of what is lost", "of a step", "what to try")
        note = "Causes that overlap in time can add up to more than the loss."
        yield "Causes, and what to try", heads, rows, note
        heads = ("cause", "what", "figure", "n", "source")
        yield "What speaks for them", heads, list(_evidence(answer)), ""
    heads = ("part", "this run", "share") + (("baseline",) if answer.baseline_parts_s else ())
    note = "The parts of each mean step add up to it."
    yield "Where the mean step's seconds went", heads, list(_parts(answer)), note


def _notes(answer: Explanation) -> Iterator[str]:
    yield f"Held against {one_line(answer.baseline)}."
    for difference in answer.differences:
        yield f"Differs: {one_line(difference)}"
    yield from map(one_line, answer.notes)


def _evidence(answer: Explanation) -> Iterator[list[str]]:
    for cause in answer.causes:
        for each in cause.evidence:
            figure = f"{significant(each.value)} {one_line(each.unit)}".strip()
            n = "-" if each.n is None else f"{each.n:,}"
            yield [cause.cause, one_line(each.what), figure, n, one_line(each.source)]


def _parts(answer: Explanation) -> Iterator[list[str]]:
    baseline = answer.baseline_parts_s
    for part, seconds in answer.parts_s.items():
        other = baseline.get(part, 0.0) if baseline else 0.0
        if seconds <= 0 and other <= 0:
            continue
        row = [
            part.replace("_", " "),
            f"{significant(seconds)} s",
            percent(seconds / answer.step_s),
        ]
        yield [*row, f"{significant(other)} s"] if baseline else row
