"""The page of a sweep: the published table, two charts, and nothing that a user wrote as HTML."""

from __future__ import annotations

from typing import Any

from paceline.layouts.sweep.charts import agreement_chart, sweep_charts
from paceline.layouts.sweep.report import sweep_document
from paceline.layouts.sweep.result import SweepResult
from paceline.report.document import Verdict
from paceline.report.html import render_document
from paceline.report.theme import EXPORT
from tests.layouts.sweep.test_charts import EXPECTED, result, row

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e"


def page_of(found: SweepResult) -> str:
    return render_document(sweep_document(found))


def three(**fields: Any) -> SweepResult:
    return result(
        row(1, speed=100.0, prediction=EXPECTED),
        row(2, speed=150.0, prediction=EXPECTED),
        row(4, "oom", reason="no room"),
    ).model_copy(update=fields)


def test_the_page_has_the_table_both_charts_and_the_answer():
    page = page_of(three(sentences=("best: mbs 2",), halt_reason="job 7 has ended"))
    for text in (
        "best: mbs 2",
        "OOM: no room",
        "Throughput and memory",
        "Predicted vs measured step time",
        "Incomplete:",
        'id="chart-front"',
        'id="chart-agreement"',
    ):
        assert text in page
    table = page.partition('id="layouts"')[2].partition("</table>")[0]
    assert table.count("<tr>") == 1 + 3


def test_nothing_that_a_user_wrote_becomes_html():
    named = three(name=HOSTILE, recipe=HOSTILE, halt_reason=HOSTILE, sentences=(HOSTILE,))
    cells = tuple(
        row.model_copy(update={"reason": HOSTILE, "settings": {HOSTILE: HOSTILE}})
        for row in named.rows
    )
    page = page_of(named.model_copy(update={"rows": cells, "dimensions": {HOSTILE: (HOSTILE,)}}))
    assert "<script>alert" not in page and "\x1b" not in page and "\u202e" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_predictions_stand_over_measurements_with_their_intervals():
    chart = agreement_chart(three(), EXPORT)
    assert chart is not None
    points = next(layer for layer in chart.to_dict()["layer"] if layer["name"] == "layouts")
    (first, _) = points["data"]["values"]
    assert (first["measured"], first["predicted"], first["low"], first["high"]) == (
        1.0,
        2.0,
        1.5,
        2.5,
    )


def test_without_figures_there_are_no_charts_and_still_a_page():
    empty = result(row(1, "refused", reason="no"))
    assert sweep_charts(empty, "", EXPORT) == {} and agreement_chart(empty, EXPORT) is None
    assert "no layout has a speed" in page_of(empty)


def test_before_anything_has_run_nothing_is_said_to_have_no_speed():
    planned = sweep_document(result(row(1, "waiting"), row(2, "refused", reason="no")))
    assert planned.verdict == Verdict("nothing has run yet", "plain")
    assert [figure.label for figure in planned.figures] == ["Layouts measured"]
    failed = sweep_document(result(row(1, "waiting"), row(2, "failed", reason="no")))
    assert failed.verdict == Verdict("no layout has a speed", "alert")
