"""Run folders of others with links, pipes and devices: nothing outside is read or written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline.files.documents import read_text
from tests.attacks.reproductions import stored_run
from tests.command import paceline

SECRET = "content of a file outside the folder"


def outside(path: Path) -> Path:
    path.write_text(SECRET)
    return path


@pytest.mark.parametrize("form", ["html", "md"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe"])
def test_a_report_replaces_what_is_in_its_place(tmp_path: Path, form: str, kind: str) -> None:
    run, target = stored_run(tmp_path / "runs"), outside(tmp_path / "target")
    path = run / f"report.{form}"
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(target if kind == "link" else tmp_path / "made")

    done = paceline("runs", "report", "last", "--format", form, runs=tmp_path / "runs")

    assert done.returncode == 0, done.stderr
    assert path.is_file() and not path.is_symlink()
    assert target.read_text() == SECRET and not (tmp_path / "made").exists()


@pytest.mark.parametrize("whole", [True, False])
def test_charts_are_written_into_the_folder_only(tmp_path: Path, whole: bool) -> None:
    run, target = stored_run(tmp_path / "runs"), tmp_path / "target"
    target.mkdir()
    if whole:
        (run / "charts").symlink_to(target)
    else:
        (run / "charts").mkdir()
        (run / "charts" / "step-times.svg").symlink_to(outside(target / "file"))

    done = paceline("runs", "report", "last", "--charts", "svg", runs=tmp_path / "runs")

    assert done.returncode == (1 if whole else 0), done.stderr
    assert not whole or "charts: is a link" in done.stderr
    assert [path.read_text() for path in target.iterdir()] == ([] if whole else [SECRET])


def test_a_script_that_is_a_link_is_not_shown(tmp_path: Path) -> None:
    run = stored_run(tmp_path / "runs")
    for path in (run / "job.sh", run / "logs" / "launcher.log", run / "logs" / "rank-00000.log"):
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(outside(tmp_path / "target"))

    done = paceline("runs", "report", "last", "--output", "-", runs=tmp_path / "runs")

    assert done.returncode == 0 and SECRET not in done.stdout, done.stderr


@pytest.mark.parametrize("log", ["../target", "logs/link"])
def test_an_imported_log_outside_the_folder_is_not_read(tmp_path: Path, log: str) -> None:
    run, target = (
        stored_run(tmp_path / "runs", spec=None, log=log),
        outside(tmp_path / "runs/target"),
    )
    (run / "logs").mkdir(exist_ok=True)
    (run / "logs" / "link").symlink_to(target)
    (run / "result.json").unlink()
    record = json.loads((run / "run.json").read_text())
    assert record["log"] == log

    done = paceline("runs", "show", run, runs=tmp_path / "runs")

    assert done.returncode == 1 and "is not in the run folder" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("run.json", 2, "is a link out of its folder"),
        ("steps/rank-00001.jsonl", 0, "step files of 1 rank of 2"),
        ("telemetry/vm.jsonl", 2, "is a link out of its folder"),
        ("steps", 0, '"steps_done": 0'),
        ("inventory.json", 0, '"steps_done": 24'),
    ],
)
def test_what_a_link_leads_to_outside_of_a_run_folder_is_not_read(
    tmp_path: Path, name: str, code: int, words: str
) -> None:
    """The link leads to what was there, so that a reader that followed it would find all well."""
    run = stored_run(tmp_path / "runs")
    (run / "result.json").unlink()
    target = (run / name).rename(tmp_path / "target")
    (run / name).symlink_to(target)
    for path in (run / name).glob("*") if name == "steps" else [run / name]:
        with pytest.raises(OSError, match="is a link out of its folder"):
            read_text(path)

    done = paceline("runs", "show", run, "--json", runs=tmp_path / "runs")

    assert (done.returncode, words in done.stdout + done.stderr) == (code, True), done.stderr


def test_links_inside_a_run_folder_and_to_it_are_followed(tmp_path: Path) -> None:
    run = stored_run(tmp_path / "runs")
    (run / "steps").rename(run / "other")
    (run / "steps").symlink_to("other")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "linked").symlink_to(run)

    done = paceline("runs", "show", "linked", runs=tmp_path / "elsewhere")

    assert done.returncode == 0, done.stderr
