"""Pages of a comparison and of a history: the answer first, what is not known with its reason."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.compare.judgement import Comparison
from paceline.compare.over_time.step_changes import History
from paceline.report.html import render_document
from paceline.report.theme import EXPORT
from paceline.runs.comparison_charts import comparison_charts
from paceline.runs.comparison_report import comparison_document
from paceline.runs.history_charts import history_charts
from paceline.runs.history_report import history_document
from tests.browser import pages


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return pages.comparison()


@pytest.fixture(scope="module")
def history() -> History:
    return pages.history()


def drawn(spec: dict[str, Any], layer: str) -> list[dict[str, Any]]:
    mark = next(part for part in spec["layer"] if part.get("name") == layer)
    return (mark.get("data") or spec["data"])["values"]


def test_a_comparison_begins_with_the_change_and_both_sides(comparison: Comparison):
    change, baseline, candidate, confidence = comparison_document(comparison).figures
    assert change.value.startswith("+5.06") and "(95%)" in change.interval
    assert baseline.value.endswith(" s") and candidate.value.endswith(" s")
    # Three of one, then three of the other: what changed in between counts as well.
    assert confidence.value == "low" and confidence.details[0] == "3 and 3 runs"


def test_every_run_of_both_sides_is_a_dot(comparison: Comparison):
    charts = {name: each.to_dict() for name, each in comparison_charts(comparison, EXPORT).items()}
    assert len(drawn(charts["sides"], "runs")) == 6
    assert "2026-10-09-example-8 and 2 more against" in charts["sides"]["title"]["text"]


def test_what_could_not_be_compared_is_not_known_and_says_why(comparison: Comparison):
    refused = comparison.model_copy(
        update={"verdict": "not comparable", "metric": None, "ratio": None, "metrics": ()}
    )
    assert {figure.value for figure in comparison_document(refused).figures[:3]} == {"not known"}
    assert comparison_charts(refused, EXPORT) == {} and "not comparable" in render_document(
        comparison_document(refused)
    )


def test_every_value_is_drawn_and_the_step_is_named(history: History):
    spec = history_charts(history, EXPORT)["series-1"].to_dict()
    assert len(drawn(spec, "values")) == 14 and len(drawn(spec, "steps")) == 1


def test_without_a_figure_a_history_says_so(history: History):
    empty = history.model_copy(update={"series": (), "left_out": {"failed": ("a",)}})
    page = render_document(history_document(empty))
    assert "no run has a value" in page and "1\N{NO-BREAK SPACE}run failed" in page
