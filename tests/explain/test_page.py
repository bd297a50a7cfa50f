"""The page of an explanation: causes ranked with what speaks for them, foreign text escaped."""

from __future__ import annotations

from html import unescape
from pathlib import Path
from typing import Any

import pytest

from paceline.core.layout import Layout
from paceline.explain.answer import explain
from paceline.explain.charts import explanation_charts
from paceline.explain.explanation import Explanation
from paceline.explain.report import explanation_document
from paceline.report.html import render_document
from paceline.report.theme import EXPORT
from tests.command import paceline
from tests.explain.example import write_parts

HOSTILE = "<script>alert(1)</script>\x1b[31m"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and one of the same training that saves often and recomputes."""
    root = tmp_path_factory.mktemp("runs")
    write_parts(root, "before")
    again = Layout(micro_batch=4, recompute="full")
    saving = {"checkpoint": 0.1, "work": 1.3}
    write_parts(root, "after", (saving, saving), layout=again)
    return root


@pytest.fixture(scope="module")
def answer(runs: Path) -> Explanation:
    return explain(runs / "after", "before", runs)


def drawn(answer: Explanation, chart: str) -> list[dict[str, Any]]:
    """The rows that a chart draws."""
    return explanation_charts(answer, EXPORT)[chart].to_dict()["data"]["values"]


def test_bars_are_the_causes_in_their_order_and_the_rest(answer: Explanation):
    rows = drawn(answer, "causes")
    assert [row["cause"] for row in rows] == ["checkpoint stalls", "recompute", "unexplained"]
    assert [row["seconds"] for row in rows[:-1]] == [each.seconds for each in answer.causes]
    assert rows[-1]["seconds"] == answer.unexplained_s


def test_parts_of_both_runs_add_up_to_their_mean_steps(answer: Explanation):
    ends = {row["side"]: row["end"] for row in drawn(answer, "parts")}
    assert ends["this run"] == pytest.approx(answer.step_s)
    assert ends["baseline"] == pytest.approx(answer.baseline_s)


def test_the_page_has_every_cause_with_share_figures_and_what_to_try(answer: Explanation):
    page = unescape(render_document(explanation_document(answer))).replace(
        "\N{NO-BREAK SPACE}", " "
    )
    for cause in answer.causes:
        assert cause.cause in page and f"{100 * cause.share:.1f} %" in page
        assert cause.remedy in page and all(each.what in page for each in cause.evidence)
    assert "differs: recompute: none -> full" in page


def test_where_nothing_is_lost_no_cause_is_drawn(runs: Path):
    answer = explain(runs / "before", "after", runs)
    assert [*explanation_charts(answer, EXPORT)] == ["parts"]
    page = render_document(explanation_document(answer))
    assert "no cause is named" in page and "nothing is lost" in page


def test_what_others_wrote_is_escaped(answer: Explanation):
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
    told = paceline(
        "explain", "after", "--against", "before", "--runs-dir", runs, "--json",
        "--html", page, "--charts", folder,
    )  # fmt: skip
    assert Explanation.model_validate_json(told.stdout).run == "after"
    assert page.read_text("utf-8").startswith("<!doctype html>")
    assert sorted(path.name for path in folder.iterdir()) == ["causes.svg", "parts.svg"]
    svg = (folder / "causes.svg").read_text("utf-8")
    assert "checkpoint stalls" in svg and "seconds of a step" in svg
