"""Schedulers and run folders that name no job: scancel receives only digits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError
from paceline.machines import slurm
from paceline.machines.slurm import client
from paceline.machines.slurm.record import read_slurm_record
from tests.machines.test_local import make_job

WORDS = ("--state=RUNNING", "1,2,3", "42 43", "-u me", "٤٢", "4242_[1-5]", "_1", "x", "42;43;44x")


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that scancel's arguments are written to."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    program(tmp_path, "scancel", f'echo "$@" >> {tmp_path / "cancelled"}')
    program(tmp_path, "squeue", "true")
    program(tmp_path, "sacct", "true")
    return tmp_path / "cancelled"


@pytest.mark.parametrize("word", [word for word in WORDS if ";" not in word])
def test_what_sbatch_prints_is_a_number_or_an_error(
    cancelled: Path, tmp_path: Path, word: str
) -> None:
    program(tmp_path, "sbatch", f"echo '{word}'")
    with pytest.raises(SystemFaultError, match="instead of a job number"):
        client.sbatch(make_job("pass"), tmp_path, "job.sh")
    with pytest.raises(ValueError, match="is not a job number"):
        client.scancel(word)
    assert not cancelled.exists()


@pytest.mark.parametrize("number", ["4242", "4242;cluster"])
def test_a_number_is_cancelled(cancelled: Path, tmp_path: Path, number: str) -> None:
    program(tmp_path, "sbatch", f"echo '{number}'")
    assert client.scancel(client.sbatch(make_job("pass"), tmp_path, "job.sh"))
    assert cancelled.read_text() == "4242\n"


@pytest.mark.parametrize("word", WORDS)
def test_a_run_folder_of_somebody_else_cancels_nothing(
    cancelled: Path, tmp_path: Path, word: str
) -> None:
    (tmp_path / "slurm.json").write_text(json.dumps({"attempts": [{"job": word}]}))
    assert read_slurm_record(tmp_path) is None and slurm.cancel_orphan(tmp_path) is None
    (tmp_path / f"slurm-{word}.out").touch()
    assert slurm.attach(make_job("pass"), tmp_path) is None
    assert not cancelled.exists()
