"""The table of a sweep: flat rows, the columns of published studies, and notes in words."""

from __future__ import annotations

import pytest

from paceline.layouts.sweep.report import memory_note, notes, shown_columns, sweep_document
from paceline.layouts.sweep.result import SweepRow
from tests.layouts.sweep.test_charts import EXPECTED, result, row


def test_a_row_is_flat_with_layout_prediction_and_error():
    found = result(row(4, speed=100.0, prediction=EXPECTED, runs=("a", "b")))
    table = sweep_document(found).csv_table()
    assert table is not None
    (flat,) = table.rows
    assert (flat["tp"], flat["micro_batch"], flat["tokens_per_s"]) == (2, 4, 100.0)
    assert (flat["predicted_s"], flat["prediction_error"]) == (2.0, pytest.approx(1.0))
    assert flat["runs"] == "a b" and flat["notes"] == "best, on the Pareto front, memory borderline"
    assert not any(isinstance(value, dict) for value in flat.values())


@pytest.mark.parametrize(
    ("noted", "words"),
    [
        (row(1, "oom", reason="no room"), "OOM: no room"),
        (row(1, "nan"), "NaN"),
        (row(1, "oom", reason="x" * 99), "OOM: " + "x" * 80 + "..."),
        (row(1, "refused", reason="x" * 99), "refused: " + "x" * 99),
        (row(1, "refused", reason="tp 3 divides nothing"), "refused: tp 3 divides nothing"),
        (row(1, "waiting"), "waiting"),
        (row(1, "waiting", prediction=EXPECTED), "waiting, memory borderline"),
        (row(1, "ok", 5.0), ""),
        (row(1, "ok", 5.0, tied_with_best=True), "tied with the best"),
        (row(1, "ok", 5.0, best=True, pareto=True), "best, on the Pareto front"),
    ],
)
def test_notes_say_why_there_is_no_figure_or_what_sets_a_row_apart(noted: SweepRow, words: str):
    assert notes(noted) == words


def test_the_columns_are_those_of_published_studies():
    predicted = result(row(1, speed=100.0, prediction=EXPECTED))
    titles = [column.title for column in shown_columns(predicted)]
    assert titles[:6] == ["nodes", "TP", "PP", "DP", "MBS", "recompute"]
    assert titles[-5:] == ["predicted s", "error", "predicted GiB", "P(OOM)", "notes"]
    columns = shown_columns(result(row(1, speed=1.0)))
    assert "predicted s" not in [column.title for column in columns]


def test_memory_names_its_kind():
    assert (
        memory_note(result(row(1, speed=5.0)))
        == "Memory: peak resident set of the process, largest rank."
    )
    assert memory_note(result(row(1, "oom"))) == ""
