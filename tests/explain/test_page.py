"""The page of an explanation shows ranked causes with evidence and escapes foreign text."""

from __future__ import annotations

from html import unescape
from pathlib import Path
from typing import Any

import pytest

from paceline.core.layout import Layout
from paceline.core.units import percent
from paceline.explain.diagnosis import explain
from paceline.explain.explanation import Explanation
from paceline.explain.report import explanation_charts, explanation_document
from paceline.report.html import render_document
from paceline.report.theme import EXPORT
from tests.command import paceline
from tests.explain.example import write_parts

HOSTILE = "<script>alert(1)</script>\x1b[31m"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run, and one of the same training that saves often and recomputes."""
    root = tmp_path_factory.mktemp("runs")
    write_parts(root, "before")
    again = Layout(micro_batch=4, recompute="full")
    saving = {"checkpoint": 0.1, "work": 1.3}
    write_parts(root, "after", (saving, saving), layout=again)
    return root


@pytest.fixture(scope="module")
def answer(runs: Path) -> Explanation:
    return explain(runs / "after", "before", runs)


def chart_rows(answer: Explanation, chart: str) -> list[dict[str, Any]]:
    """Return the data rows of a chart."""
    return explanation_charts(answer, EXPORT)[chart].to_dict()["data"]["values"]


def test_bars_show_the_causes_in_order_and_the_unexplained_time(answer: Explanation):
    rows = chart_rows(answer, "causes")
    assert [row["cause"] for row in rows] == ["checkpoint stalls", "recompute", "unexplained"]
    assert [row["seconds"] for row in rows[:-1]] == [each.seconds for each in answer.causes]
    assert rows[-1]["seconds"] == answer.unexplained_s


def test_parts_of_both_runs_add_up_to_their_mean_steps(answer: Explanation):
    ends = {row["side"]: row["end"] for row in chart_rows(answer, "parts")}
    assert ends["this run"] == pytest.approx(answer.step_s)
    assert ends["baseline"] == pytest.approx(answer.baseline_s)


def test_the_page_shows_every_cause_with_share_evidence_and_remedy(answer: Explanation):
    page = unescape(render_document(explanation_document(answer))).replace(
        "\N{NO-BREAK SPACE}", " "
    )
    for cause in answer.causes:
        assert cause.cause in page and percent(cause.share) in page
        assert cause.remedy in page and all(each.what in page for each in cause.evidence)
    assert "different setting: recompute: none -> full" in page


def test_no_cause_is_drawn_if_no_time_is_lost(runs: Path):
    answer = explain(runs / "before", "after", runs)
    assert [*explanation_charts(answer, EXPORT)] == ["parts"]
    page = render_document(explanation_document(answer))
    assert "no cause found" in page and "no time is lost" in page


def test_foreign_text_is_escaped(answer: Explanation):
    cause = answer.causes[0]
    evidence = tuple(
        each.model_copy(update={"what": HOSTILE, "source": HOSTILE}) for each in cause.evidence
    )
    hostile = answer.model_copy(
        update={
            "run": HOSTILE,
            "baseline": HOSTILE,
            "differences": (HOSTILE,),
            "notes": (HOSTILE,),
            "causes": (cause.model_copy(update={"evidence": evidence, "remedy": HOSTILE}),),
        }
    )
    page = render_document(explanation_document(hostile))
    assert "<script>alert" not in page and "\x1b" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_the_verb_writes_page_and_charts(runs: Path, tmp_path: Path):
    page, folder = tmp_path / "why.html", tmp_path / "charts"
    output = paceline(
        "explain", "after", "--against", "before", "--runs-dir", runs, "--json",
        "--html", page, "--charts", folder,
    )  # fmt: skip
    assert Explanation.model_validate_json(output.stdout).run == "after"
    assert page.read_text("utf-8").startswith("<!doctype html>")
    assert sorted(path.name for path in folder.iterdir()) == ["causes.svg", "parts.svg"]
    svg = (folder / "causes.svg").read_text("utf-8")
    assert "checkpoint stalls" in svg and "seconds of a step" in svg
