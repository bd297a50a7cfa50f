"""Scheduler programs that print anything."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError
from paceline.files import programs
from paceline.files.programs import run_program
from paceline.machines.slurm.states import parse_sacct, parse_squeue
from tests.attacks.reproductions import bounded

RUN = ["run", "tiny-llama", "--device", "cpu", "--launcher", "slurm", "--nodes", 1]
RUN += ["--devices", 1, "--no-probe", "--set", "steps=5"]
ANSWERS = {
    "sbatch": "echo 4242",
    "squeue": "echo '4242|FAILED|n1|None'",
    "sacct": "echo '4242|FAILED|1:0|n1|None'",
    "scancel": "true",
    "sinfo": "echo 'n1|idle|none'",
    "srun": "true",
    "scontrol": 'case "$*" in *ping*) echo "Slurmctld(primary) at x is UP";; '
    '*) echo "AccountingStorageType = accounting_storage/slurmdbd";; esac',
}


def scheduler(folder: Path, **answers: str) -> dict[str, str]:
    """Write the scheduler's programs; return the variable that finds them."""
    folder.mkdir()
    for name, script in {**ANSWERS, **answers}.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    "row",
    [
        "4242|FAILED|²:0|n1|None",
        "4242|CANCELLED by ²|0:0|n1|None",
        f"4242|FAILED|{'9' * 5000}:0|n|",
    ],
)
def test_a_digit_is_one_of_ten(tmp_path: Path, row: str):
    env = scheduler(tmp_path / "bin", sacct=f"echo '{row}'")
    done = bounded(*RUN, runs=tmp_path / "runs", env=env)
    assert "Traceback" not in done.stderr and done.returncode in (2, 4), done.stderr
    state = parse_sacct(row)["4242"]
    assert state.exit_code in (None, 0) and state.cancelled_by is None


@pytest.mark.parametrize("name", ["sbatch", "sacct", "scontrol"])
def test_output_without_end_takes_little_memory(tmp_path: Path, name: str):
    env = scheduler(
        tmp_path / "bin", **{name: "exec yes aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}
    )
    done = bounded(*RUN, runs=tmp_path / "runs", env=env)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode or name == "scontrol"


def test_the_output_of_any_program_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(programs, "MAX_OUTPUT_BYTES", 1000)
    with pytest.raises(SystemFaultError, match=re.escape("prints more than 1,000 bytes")):
        run_program(("yes",))
    done = run_program(("bash", "-c", "yes | head -c 100000 >&2; echo done"))
    assert (done.stdout, len(done.stderr)) == ("done\n", 1001)


def test_a_program_gets_its_text_and_keeps_its_lines():
    text = "first\nsecond\n" * 50_000
    assert run_program(("cat",), text=text).stdout == text
    assert run_program(("true",), text=text).returncode == 0
    assert (
        run_program(
            ("printf", "a\\r\\nb\\rc"),
        ).stdout
        == "a\nb\nc"
    )


def test_every_row_of_a_queue_is_read_alone():
    assert list(parse_squeue("1|RUNNING|n1|None\nnonsense\n2|PENDING||Resources")) == ["1", "2"]
