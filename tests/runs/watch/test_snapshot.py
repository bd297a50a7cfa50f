"""The page of one moment: what `watch` tells, with ranks drawn and foreign text escaped."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.report.html import render_document
from paceline.report.theme import EXPORT
from paceline.runs.watch.reader import RunReader, WatchState
from paceline.runs.watch.report import MAX_RANKS, snapshot_charts, snapshot_document
from tests.command import paceline
from tests.explain.example import write_parts


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_parts(folder, "it", ({"data": 0.05}, {"work": 1.5, "comm": 0.02}))
    return folder


@pytest.fixture(scope="module")
def state(root: Path) -> WatchState:
    return RunReader(root / "it").state()


def test_a_bar_is_work_and_waits_and_counts_data_once(state: WatchState):
    spec = snapshot_charts(state, EXPORT)["ranks"].to_dict()
    rows = spec["data"]["values"]
    first = {row["what"]: row["seconds"] for row in rows if row["rank"] == "rank 0"}
    assert first["waits for data"] == pytest.approx(0.05)
    assert state.ranks[0].busy_time_s == pytest.approx(first["works"] + 0.05)
    assert first["waits for ranks"] == state.ranks[0].comm_wait_s


def test_the_page_has_every_figure_of_the_moment(state: WatchState):
    page = render_document(snapshot_document(state)).replace("\N{NO-BREAK SPACE}", " ")
    assert all(f">{name}</th>" in page for name in ("rank", "busy s", "memory"))
    assert "the others wait for rank 1" in page and "The run has ended." in page


def test_before_its_first_step_a_run_has_no_chart_and_says_so(state: WatchState):
    waiting = state.model_copy(
        update={"status": "queued", "step": None, "step_time_s": None, "ratio": None, "ranks": ()}
    )
    assert snapshot_charts(waiting, EXPORT) == {}
    page = render_document(snapshot_document(waiting))
    assert "no step has a time yet" in page and "The run goes on" in page


def test_of_many_ranks_the_busiest_are_drawn(state: WatchState):
    ranks = tuple(state.ranks[0].model_copy(update={"rank": number}) for number in range(40))
    page = render_document(snapshot_document(state.model_copy(update={"ranks": ranks})))
    assert f"The {MAX_RANKS} busiest of 40 ranks." in page


def test_the_verb_writes_the_page_of_this_moment_alone(root: Path, tmp_path: Path):
    page = tmp_path / "now.html"
    told = paceline("runs", "watch", "it", "--once", "--html", page, "--runs-dir", root)
    assert told.returncode == 0 and f"page: {page}" in told.stderr
    assert page.read_text("utf-8").startswith("<!doctype html>")
    refused = paceline("runs", "watch", "it", "--html", page, "--runs-dir", root)
    assert refused.returncode == 1 and "add --once" in refused.stderr
