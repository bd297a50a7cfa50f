"""When an allocation is over, and what becomes of jobs that a dead controller left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.hardware import Cluster, SlurmSettings
from paceline.machines import slurm
from paceline.machines.slurm.record import SlurmJournal, read_slurm_record
from paceline.runs.tasks import slot
from paceline.runs.tasks.slot import allocation_fault
from tests.machines.slurm.fake_slurm import put


def in_allocation(job: str | None) -> Cluster:
    return Cluster(
        name="c",
        device="cpu",
        devices_per_node=1,
        launcher="slurm",
        slurm=SlurmSettings(allocation=job),
    )


@pytest.mark.parametrize(
    ("squeue", "fault"),
    [
        ("echo 'n[1-2]'", None),
        ("true", "job 7: is not running"),
        (
            "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
            "is unknown to Slurm",
        ),
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", None),
    ],
)
def test_only_a_clear_word_of_slurm_ends_an_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squeue: str, fault: str | None
):
    monkeypatch.setattr(slot, "RETRY_PAUSE_S", 0.01)
    put(tmp_path, monkeypatch, squeue=squeue)
    answer = allocation_fault(in_allocation("7"))
    assert answer is None if fault is None else fault in (answer or "")
    assert allocation_fault(in_allocation(None)) is None


def test_one_question_that_gets_no_answer_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(slot, "RETRY_PAUSE_S", 0.01)
    once = tmp_path / "asked"
    calls = put(tmp_path, monkeypatch, squeue=f"[ -e {once} ] && exit 0; touch {once}; exit 1")
    assert "is not running" in (allocation_fault(in_allocation("7")) or "")
    assert len(calls.read_text().splitlines()) == 2


def test_jobs_that_were_left_in_the_queue_are_cancelled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = put(tmp_path, monkeypatch, scancel="true")
    folders = [tmp_path / "left", tmp_path / "none"]
    for folder in folders:
        folder.mkdir()
    SlurmJournal(folders[0]).begin("12_3")
    assert [slurm.cancel_orphan(folder) for folder in folders] == ["12_3", None]
    assert [slurm.cancel_orphan(folder) for folder in folders] == [None, None]
    assert calls.read_text() == "scancel 12_3\n"
    kept = read_slurm_record(folders[0])
    assert kept and kept.attempts[-1].reason == "its controller had died"
