"""The page of a ledger: every second drawn once, foreign text escaped."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.report.html import render_document
from paceline.report.theme import EXPORT
from paceline.runs.goodput.attempt import attempts_of_run
from paceline.runs.goodput.charts import goodput_charts
from paceline.runs.goodput.ledger import GoodputLedger, ledger_of
from paceline.runs.goodput.report import goodput_document
from tests.command import paceline
from tests.runs.goodput.test_goodput import write_attempt


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that was killed at step 37 and went on from 30."""
    folder = tmp_path_factory.mktemp("runs")
    ended = write_attempt(folder, "a", 0, 1, 37, killed=True)
    write_attempt(folder, "b", ended + 60, 31, 60)
    return folder


@pytest.fixture(scope="module")
def ledger(root: Path) -> GoodputLedger:
    return ledger_of([each for name in "ab" for each in attempts_of_run(root / name)])


def test_bars_end_at_the_time_that_they_stand_for(ledger: GoodputLedger):
    spec = goodput_charts(ledger, EXPORT)["accounts"].to_dict()
    ends: dict[str, float] = {}
    for row in spec["data"]["values"]:
        assert row["start"] == pytest.approx(ends.get(row["of"], 0.0))
        ends[row["of"]] = row["end"]
    assert spec["layer"][0]["encoding"]["x"]["title"] == "wall time (minutes)"
    assert ends["all"] == pytest.approx(ledger.wall_s / 60)
    assert ends["2. b"] == pytest.approx(sum(ledger.attempts[1].seconds.values()) / 60)


def test_the_page_has_every_account_and_attempt(ledger: GoodputLedger):
    page = render_document(goodput_document(ledger)).replace("\N{NO-BREAK SPACE}", " ")
    for account, spent in ledger.seconds.items():
        assert (f">{account.replace('_', ' ')}</th>" in page) is (spent > 0)
    assert "60 are kept, 7 were repeated" in page
    assert "1-37" in page and "31-60" in page and "days if nothing were lost" in page


def test_days_to_the_end_are_told_as_of_an_estimate(ledger: GoodputLedger):
    left = ledger.model_copy(update={"days_left": 12.341, "days_left_at_best": 0.04321})
    page = render_document(goodput_document(left)).replace("\N{NO-BREAK SPACE}", " ")
    assert ">12.3<" in page and "0.043 days if nothing were lost" in page


def test_of_logs_the_page_says_that_it_is_a_bound(ledger: GoodputLedger):
    bound = ledger.model_copy(update={"whole": False, "days_left": None, "notes": ("a note",)})
    page = render_document(goodput_document(bound))
    assert "an upper bound" in page and "a note" in page and "--steps N" in page


def test_the_verb_writes_page_and_chart(root: Path, tmp_path: Path):
    page, folder = tmp_path / "goodput.html", tmp_path / "charts"
    told = paceline(
        "runs", "goodput", "a", "b", "--runs-dir", root, "--html", page, "--charts", folder
    )
    assert "goodput " in told.stdout and f"page: {page}" in told.stderr
    assert page.read_text("utf-8").startswith("<!doctype html>")
    assert "lost steps" in (folder / "accounts.svg").read_text("utf-8")
