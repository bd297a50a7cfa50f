"""`paceline runs rm` deletes what it was asked to delete, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.files.run_folder import this_controller
from tests.cli.test_errors import paceline
from tests.files.test_run_folder import make_run
from tests.runs.test_outcome import make_folder


def names(root: Path) -> list[str]:
    return [row["run"] for row in json.loads(paceline("runs", "list", "--json", runs=root).stdout)]


def test_runs_and_their_entries_are_deleted(tmp_path: Path):
    for name in ("a", "b", "c"):
        make_run(tmp_path, name)
    assert names(tmp_path) == ["a", "b", "c"]
    done = paceline("runs", "rm", "a", "c", "--yes", runs=tmp_path)
    assert done.returncode == 0 and "deleted 2 runs, freed " in done.stdout
    assert not (tmp_path / "a").exists() and names(tmp_path) == ["b"]


def test_nothing_is_deleted_without_a_terminal_to_ask_on(tmp_path: Path):
    make_run(tmp_path, "a")
    done = paceline("runs", "rm", "a", runs=tmp_path)
    assert done.returncode == 1 and "error: --yes: is missing" in done.stderr
    assert names(tmp_path) == ["a"]


def test_a_running_run_and_those_named_with_it_stay(tmp_path: Path):
    make_run(tmp_path, "a")
    folder = make_folder(tmp_path, 5, "running", controller=this_controller())
    done = paceline("runs", "rm", "a", folder.name, "--yes", runs=tmp_path)
    assert done.returncode == 1 and "is running; stop it first" in done.stderr
    assert folder.exists() and (tmp_path / "a").exists()


def test_a_folder_outside_the_runs_folder_stays(tmp_path: Path):
    other = make_run(tmp_path / "other", "a")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(other)
    for path in (other, tmp_path / "runs" / "link", "link"):
        done = paceline("runs", "rm", path, "--yes", runs=tmp_path / "runs")
        assert done.returncode == 1 and "is not a folder in" in done.stderr
    assert other.exists()
