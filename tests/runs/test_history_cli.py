"""`paceline runs history` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_errors import paceline
from tests.runs.series_example import around, make_finished, make_many

OLD, NEW = around(0.2, 8, seed=1), around(0.206, 7, seed=2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight runs and, after a new kernel, seven slower ones."""
    root = tmp_path_factory.mktemp("runs")
    make_many(root, OLD)
    for number, time in enumerate(NEW, start=8):
        make_finished(root, number, time, machine={"kernel": "6.9"}, tag="after")
    return root


def test_the_question_is_answered_with_0_and_gates_on_request(runs: Path, tmp_path: Path):
    page = tmp_path / "history.html"
    done = paceline("runs", "history", "example", "--html", str(page), runs=runs)
    assert done.returncode == 0 and "% slower" in done.stdout and "kernel" in done.stdout
    assert done.stderr == f"page: {page}\n" and "Last change" in page.read_text()
    assert paceline("runs", "history", "example", "--fail-on-findings", runs=runs).returncode == 3


def test_a_selection_looks_at_some_runs_only(runs: Path):
    later = paceline(
        "runs", "history", "example", "--since", "2026-10-09", "--fail-on-findings", runs=runs
    )
    assert later.returncode == 0 and "7 runs" in later.stdout
    chosen = paceline("runs", "history", "example", "--where", "tag=after", "--json", runs=runs)
    assert json.loads(chosen.stdout)["series"][0]["n_runs"] == 7


def test_without_any_figure_the_answer_is_incomplete(runs: Path):
    done = paceline("runs", "history", "example", "--metric", "mfu", runs=runs)
    assert done.returncode == 4 and "no run has a value" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["exmaple"], "did you mean 'example'"),
        (["example", "--metric", "step_time"], "did you mean 'step_time_s'"),
        (["example", "--metric", "speed"], "allowed: step_time_s, step_time_mean_s, "),
        (["example", "--since", "yesterday"], "is not a date"),
        (["example", "--since", "2030-01-01"], "none of its 15 runs is selected"),
        (["example", "--where", "stauts=ok"], "is not a column"),
        (["example", "--margin", "x"], "is not a margin"),
        ([], "is missing"),
    ],
)
def test_bad_input_is_one_clear_error(runs: Path, arguments: list[str], words: str):
    done = paceline("runs", "history", *arguments, runs=runs)
    assert done.returncode == 1 and words in done.stderr and done.stdout == ""
    assert "Traceback" not in done.stderr


def test_a_place_without_runs_says_how_to_start(tmp_path: Path):
    done = paceline("runs", "history", "tiny-llama", runs=tmp_path)
    assert done.returncode == 1 and "`paceline run tiny-llama` makes one" in done.stderr


def test_the_repeats_of_a_group_can_be_listed(tmp_path: Path):
    make_finished(tmp_path, 1, 0.2, group="night")
    make_finished(tmp_path, 2, 0.2)
    rows = json.loads(
        paceline("runs", "list", "--where", "group=night", "--json", runs=tmp_path).stdout
    )
    assert [row["group"] for row in rows] == ["night"]
    assert "group" in paceline("runs", "list", runs=tmp_path).stdout.splitlines()[0]
    assert "night" in paceline("runs", "list", "--format", "csv", runs=tmp_path).stdout
