"""The status of a Slurm job without its controller is read from the job's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.files.run_folder import this_controller
from paceline.machines.slurm.record import SlurmJournal
from paceline.runs import outcome
from tests.engines.samples import log_text, times_of
from tests.example import make_spec
from tests.runs.example import write_run


def orphan_status(root: Path, *marks: str, ended: bool = False) -> tuple[str, str]:
    """Status and reason of a run whose controller is gone, by what its job.sh has written."""
    gone = this_controller().model_copy(update={"started_ticks": 1, "started_unix": 1.0})
    record: dict[str, Any] = {"status": "running", "controller": gone}
    folder = write_run(root, "2026-01-01-left", ended=ended, **record)
    SlurmJournal(folder).begin("12")
    (folder / "slurm.status").write_text("".join(f"{mark}\n" for mark in marks))
    result = outcome.evaluate(folder).result
    return result.status, result.reason or ""


def test_a_job_that_may_still_run_is_named(tmp_path: Path) -> None:
    status, reason = orphan_status(tmp_path, "start 12 0 node-001")
    assert status == "incomplete" and "`scancel 12` ends it" in reason


def test_a_job_that_ended_well_is_a_result(tmp_path: Path) -> None:
    standing = orphan_status(tmp_path, "start 12 0 node-001", "end 12 0 0", ended=True)
    assert standing == ("ok", "")


def test_a_foreign_job_that_ended_before_its_steps_were_done_says_so(tmp_path: Path) -> None:
    gone = this_controller().model_copy(update={"started_ticks": 1, "started_unix": 1.0})
    spec = make_spec(engine="torchtitan", steps=20)
    folder = write_run(tmp_path, "left", status="running", controller=gone, spec=spec)
    for file in (folder / "steps").iterdir():
        file.unlink()
    SlurmJournal(folder).begin("12")
    (folder / "slurm.status").write_text("start 12 0 node-001\nend 12 0 0\n")
    (folder / "logs").mkdir()
    log = log_text("torchtitan", times_of(12)) + b"[titan] Training completed\n"
    (folder / "logs" / "rank-00000.log").write_bytes(log)
    result = outcome.evaluate(folder).result
    assert result.status == "ok", result.reason
    assert "the program finished after 12 of 20 steps" in result.warnings


def test_a_job_that_ended_badly_is_a_failure(tmp_path: Path) -> None:
    status, reason = orphan_status(tmp_path, "start 12 0 node-001", "end 12 0 143")
    assert (status, reason) == ("failed", "the launcher ended with code 143")
