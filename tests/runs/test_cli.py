"""The verbs say of a run what its folder says, whatever became of the index."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import UserError
from paceline.files import run_folder
from paceline.files.documents import read_json
from paceline.files.index import RUNS
from paceline.files.run_folder import RUN_FILE, Controller, find_run, run_folders
from tests.cli.test_errors import paceline
from tests.files.test_run_folder import make_run
from tests.runs.test_outcome import make_folder


def listed(root: Path) -> Any:
    done = paceline("runs", "list", "--json", runs=root)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def killed() -> Controller:
    return Controller(pid=2**22 - 1, boot_id="before", started_unix=1.0, host=os.uname().nodename)


def test_a_killed_run_is_listed_with_the_figures_that_show_has(tmp_path: Path):
    make_folder(tmp_path, 30, "running", controller=killed())
    shown = json.loads(paceline("runs", "show", "last", "--json", runs=tmp_path).stdout)
    (row,) = listed(tmp_path)
    assert (row["status"], row["steps"]) == ("incomplete", 30)
    assert row["tokens_per_s"] == shown["metrics"]["tokens_per_s"]["value"] > 0


def test_a_torn_run_is_named_by_list_as_by_rebuild(tmp_path: Path):
    make_run(tmp_path, "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / RUN_FILE).write_text("{")
    for verb in (["runs", "list"], ["runs", "index"]):
        done = paceline(*verb, runs=tmp_path)
        assert done.returncode == 0 and "left out: " in done.stderr and "b/run.json" in done.stderr


@pytest.mark.parametrize("verb", [["runs", "list"], ["runs", "index"]])
def test_a_damaged_index_is_made_anew(tmp_path: Path, verb: list[str]):
    make_run(tmp_path, "a")
    before = listed(tmp_path)
    (index,) = (tmp_path / "cache").rglob("*.sqlite")
    index.write_bytes(b"no database " * 1000)
    done = paceline(*verb, runs=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    with closing(sqlite3.connect(index)) as database:
        assert database.execute(f"select run from {RUNS.name}").fetchall() == [("a",)]
    assert listed(tmp_path) == before


def test_without_a_cache_the_list_comes_from_the_folders_and_says_so(tmp_path: Path):
    make_run(tmp_path, "a")
    (tmp_path / "cache").write_text("")
    assert [row["run"] for row in listed(tmp_path)] == ["a"]
    assert "XDG_CACHE_HOME" in paceline("runs", "list", runs=tmp_path).stderr
    done = paceline("runs", "index", runs=tmp_path)
    assert done.returncode == 2 and "XDG_CACHE_HOME" in done.stderr


def test_the_run_of_the_folder_one_stands_in_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(make_run(tmp_path, "a"))
    assert json.loads(paceline("runs", "show", ".", "--json").stdout)["run"] == "a"


def test_the_last_run_is_the_one_created_last_whatever_the_names_say(tmp_path: Path):
    make_run(tmp_path, "2026-01-01-z", created="2026-01-01T10:00:00+00:00")
    make_run(tmp_path, "2026-01-02-b", created="2026-01-02T10:00:00+00:00")
    newest = make_run(tmp_path, "2026-01-02-a", created="2026-01-02T11:00:00+00:00")
    assert find_run(tmp_path, "last") == newest
    renamed = make_run(tmp_path, "mine", created="2026-01-03T00:00:00+00:00")
    assert find_run(tmp_path, "last") == renamed


def test_the_last_run_is_found_without_reading_those_of_other_days(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_run(tmp_path, "2026-01-01-a")
    last_day = [make_run(tmp_path, f"2026-01-02-{name}") for name in "ab"]
    opened: list[Path] = []

    def noted(path: Path) -> dict[str, Any]:
        opened.append(path.parent)
        return read_json(path)

    monkeypatch.setattr(run_folder, "read_json", noted)
    assert find_run(tmp_path, "last") == last_day[1] and opened == last_day


def test_a_place_without_runs_has_none_and_a_file_is_refused(tmp_path: Path):
    assert run_folders(tmp_path / "none") == run_folders(tmp_path) == []
    with pytest.raises(UserError, match="--runs-dir"):
        run_folders(Path(__file__))


def test_report_tells_the_written_files_as_json(tmp_path: Path):
    folder = make_folder(tmp_path, 30)
    done = paceline(
        "runs", "report", "last", "--format", "md", "--charts", "svg", "--json", runs=tmp_path
    )
    written = json.loads(done.stdout)
    assert written["report"] == str(folder / "report.md")
    assert written["charts"] and all(Path(chart).is_file() for chart in written["charts"])


def test_a_printed_report_stands_alone_on_standard_output(tmp_path: Path):
    make_folder(tmp_path, 30)
    done = paceline(
        "runs", "report", "--format", "json", "--output", "-", "--charts", "svg", runs=tmp_path
    )
    assert json.loads(done.stdout)["run"] == "run" and ".svg" in done.stderr


def test_a_dtype_that_cannot_be_measured_is_left_out_also_when_the_rest_is_known(tmp_path: Path):
    first = paceline("probe", "gemm", "--device", "cpu", "--dtype", "fp32", runs=tmp_path)
    assert first.returncode == 0, first.stderr
    done = paceline(
        "probe", "gemm", "--device", "cpu", "--dtype", "fp32,fp16", "--json", runs=tmp_path
    )
    assert done.returncode == 0 and "fp16 was skipped" in done.stderr, done.stderr
    document = json.loads(done.stdout)
    assert set(document["best"]) == {"fp32"} and set(document["skipped"]) == {"fp16"}
