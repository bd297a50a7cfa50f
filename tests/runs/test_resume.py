"""Runs whose controller has died: evaluated if they had ended, started again if not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError
from paceline.files.documents import write_value
from paceline.files.run_folder import RUN_FILE, read_record, this_controller
from paceline.machines import Handle, slurm
from paceline.machines.slurm.record import SlurmAttempt, SlurmRecord
from paceline.runs import flow
from tests.example import make_spec
from tests.machines.slurm.fake_slurm import put
from tests.machines.slurm.test_script import make_job
from tests.runs.series_example import make_finished


def leave(root: Path, status: str, launcher: str = "local", *, ended: bool = True) -> Path:
    """Leave a run with this status, whose trainer had ended or not, without its controller."""
    spec = make_spec(ranks=1)
    cluster = spec.cluster.model_copy(update={"launcher": launcher})
    folder = make_finished(root, 1, 0.2, spec=spec.model_copy(update={"cluster": cluster}))
    dead = this_controller().model_copy(update={"boot_id": "another"})
    record = read_record(folder).model_copy(update={"status": status, "controller": dead})
    write_value(folder / RUN_FILE, record)
    if not ended:
        steps = folder / "steps" / "rank-00000.jsonl"
        steps.write_text("".join(steps.read_text().splitlines(keepends=True)[:-1]))
    (folder / "result.json").unlink(missing_ok=True)
    return folder


@pytest.mark.parametrize("status", ["ok", "running"])
def test_a_run_that_had_ended_is_evaluated(tmp_path: Path, status: str) -> None:
    folder = leave(tmp_path, status)

    report = flow.resume(folder, tmp_path, make_job(), lambda _: None)

    assert report is not None and report.result.status == "ok"
    assert read_record(folder).status == "ok"
    assert json.loads((folder / "result.json").read_text())["steps_done"] == 13


def test_a_run_that_ended_with_its_controller_has_no_result(tmp_path: Path) -> None:
    folder = leave(tmp_path, "running", ended=False)

    assert flow.resume(folder, tmp_path, make_job(), lambda _: None) is None
    assert read_record(folder).status == "running"


def test_a_job_whose_end_slurm_had_reported_is_evaluated(tmp_path: Path) -> None:
    folder = leave(tmp_path, "running", "slurm", ended=False)
    attempt = SlurmAttempt(job="5", nodes="a", state="FAILED", exit_code=7)
    write_value(folder / "slurm.json", SlurmRecord(attempts=(attempt,)))

    report = flow.resume(folder, tmp_path, make_job(), lambda _: None)

    assert report is not None and report.result.status not in ("ok", "running")
    assert read_record(folder).status != "running"


@pytest.mark.parametrize("same_boot", [True, False])
def test_the_monotonic_clock_of_another_boot_is_not_used(tmp_path: Path, same_boot: bool) -> None:
    folder = leave(tmp_path, "running")
    boot = this_controller().boot_id if same_boot else "another"
    controller = this_controller().model_copy(update={"boot_id": boot})
    times = {"launched_monotonic_s": 5.0, "controller": controller}
    write_value(folder / RUN_FILE, read_record(folder).model_copy(update=times))

    flow.resume(folder, tmp_path, make_job(), lambda _: None)

    assert read_record(folder).launched_monotonic_s == (5.0 if same_boot else None)


class Stopped(Handle):
    """A job during whose run the user presses Ctrl-C."""

    phase, timed_out, is_stopped = "", False, False

    def poll(self) -> int | None:
        raise KeyboardInterrupt

    def stop(self) -> int:
        self.is_stopped = True
        return 143


def test_ctrl_c_ends_the_job_of_the_dead_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, job = leave(tmp_path, "running", "slurm", ended=False), Stopped()
    monkeypatch.setattr(slurm, "attach", lambda *_: job)

    with pytest.raises(flow.CancelledRunError):
        flow.resume(folder, tmp_path, make_job(), lambda _: None)

    assert job.is_stopped and read_record(folder).status == "cancelled"


def test_nothing_is_decided_while_slurm_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = leave(tmp_path / "runs", "running", "slurm", ended=False)
    put(tmp_path, monkeypatch, squeue="echo 'slurm_load_jobs error: timed out' >&2; exit 1")

    with pytest.raises(SystemFaultError, match="timed out"):
        flow.resume(folder, tmp_path / "runs", make_job(), lambda _: None)
