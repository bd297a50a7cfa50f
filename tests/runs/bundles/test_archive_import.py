"""Archives of runs and of logs become runs that every verb knows."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.files.documents import write_value
from paceline.files.run_folder import run_folders
from paceline.runs.bundles import archive_import
from paceline.runs.bundles.writing import write_bundle
from paceline.runs.outcome import evaluate
from tests.command import paceline
from tests.logs.example import megatron_log
from tests.runs.example import write_run


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "theirs", "2026-01-01-run")
    write_value(folder / "result.json", evaluate(folder).result)
    return write_bundle(folder, tmp_path / "a.bundle.tar.gz")[0]


def archive(path: Path, files: dict[str, bytes]) -> Path:
    """An archive of experiments, with a link as launchers leave them."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
        link = tarfile.TarInfo("workloads/latest")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        tar.addfile(link)
    return path


def test_a_bundle_becomes_the_run_that_it_is_of(bundle: Path, tmp_path: Path):
    mine = tmp_path / "mine"

    taken = paceline("runs", "import", bundle, "--json", runs=mine)

    assert taken.returncode == 0, taken.stderr
    theirs = json.loads((tmp_path / "theirs/2026-01-01-run/result.json").read_text())
    assert json.loads(taken.stdout)["metrics"] == theirs["metrics"]
    assert "2026-01-01-run" in paceline("runs", "list", "--format", "csv", runs=mine).stdout
    again = paceline("runs", "import", bundle, runs=mine)
    assert again.returncode == 1 and "was imported as 2026-01-01-run" in again.stderr
    assert paceline("runs", "import", bundle, "--reimport", runs=mine).returncode == 0
    assert (mine / "2026-01-01-run-2/bundle.json").is_file()


def test_a_damaged_bundle_becomes_nothing(bundle: Path, tmp_path: Path):
    other = tmp_path / "other.tar.gz"
    with tarfile.open(bundle) as old, tarfile.open(other, "w:gz") as new:
        for member in list(old)[:-1]:
            new.addfile(member, old.extractfile(member))

    done = paceline("runs", "import", other, runs=tmp_path / "mine")

    assert done.returncode == 1 and "is damaged" in done.stderr
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("at", ["copytree", "evaluate"])
@pytest.mark.parametrize("why", [KeyboardInterrupt(), UserError("run.json", "is odd")])
def test_an_import_that_is_broken_off_leaves_nothing(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, why: BaseException
):
    mine = tmp_path / "mine"
    seen: list[Path] = []

    def breaks(*folders: Path, **_: bool) -> None:
        if folders[1:]:
            folders[1].mkdir(exist_ok=True)
            shutil.copy(folders[0] / "run.json", folders[1])
        seen.extend(run_folders(mine))
        raise why

    place = archive_import.shutil if at == "copytree" else archive_import
    monkeypatch.setattr(place, at, breaks)
    with pytest.raises(type(why)):
        archive_import.import_bundle(bundle, mine, reimport=False)

    assert not list(mine.iterdir())
    assert len(seen) == (at == "evaluate")


@pytest.mark.parametrize("run", ["../outside", "another", "."])
def test_a_bundle_of_another_run_than_it_holds_is_refused(bundle: Path, tmp_path: Path, run: str):
    def renamed(content: bytes) -> bytes:
        return json.dumps({**json.loads(content), "run": run}).encode()

    hostile = edited(bundle, "bundle.json", renamed)

    with pytest.raises(UserError, match="describes the run"):
        archive_import.import_bundle(hostile, tmp_path / "a/mine", reimport=False)

    assert not (tmp_path / "a").exists()


def edited(bundle: Path, name: str, edit: Callable[[bytes], bytes]) -> Path:
    """A copy of a bundle in which the content of one file is another."""
    path = bundle.with_name("edited.tar.gz")
    with tarfile.open(bundle) as old, tarfile.open(path, "w:gz") as new:
        for member in old:
            content = old.extractfile(member)
            assert content is not None
            data = content.read()
            if member.name.endswith(name):
                data = edit(data)
                member.size = len(data)
            new.addfile(member, io.BytesIO(data))
    return path


def test_every_log_of_an_archive_becomes_a_run(tmp_path: Path):
    """As `llmb-run archive` lays them out: experiments by workload, scripts next to the logs."""
    path = archive(
        tmp_path / "llmb-archive_26.05.tar.gz",
        {
            "workloads/llama/experiments/a/log-a_123.out": megatron_log([5.7] * 20).encode(),
            "workloads/llama/experiments/a/sbatch.sh": b"#!/bin/bash\nsrun x\n",
            "workloads/llama/experiments/b/log-b_124.out": megatron_log([6.1] * 20).encode(),
        },
    )

    done = paceline("runs", "import", path, "--tag", "llmb", "--json", runs=tmp_path / "mine")

    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    times = [run["metrics"]["step_time_s"]["value"] for run in document["runs"]]
    assert times == pytest.approx([5.7, 6.1]) and document["passed_over"] == 1
    assert document["left_out"] == ["workloads/latest: is a link"]
    again = paceline("runs", "import", path, runs=tmp_path / "mine")
    assert again.returncode == 0 and again.stderr.count("was imported as") == 2


def test_an_archive_without_a_log_is_bad_input(tmp_path: Path):
    path = archive(tmp_path / "a.tar.gz", {"readme.txt": b"hello\n"})

    done = paceline("runs", "import", path, runs=tmp_path / "mine")

    assert done.returncode == 1 and "contains no training log (1 file)\n" in done.stderr
