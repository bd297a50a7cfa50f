"""Work on parts goes on at the same time, ends together, and knows when an allocation is over."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from threading import Event

import pytest

from paceline.core.errors import UserError
from paceline.core.hardware import Cluster, SlurmSettings
from paceline.machines.slurm.record import Diary, read_slurm_record
from paceline.runs.places import work as working
from paceline.runs.places.part import Part
from paceline.runs.places.work import abandon_left, allocation_fault, side_by_side
from tests.machines.slurm.slurm_stand_ins import put

PARTS = (Part(1, ("a",)), Part(2, ("b",)))


def test_parts_work_at_the_same_time():
    together = threading.Barrier(2, timeout=20)
    assert side_by_side(PARTS, Event(), lambda part: print(together.wait())) is False


def test_the_first_fault_stops_the_others_and_is_raised():
    stop = Event()

    def work(part: Part) -> None:
        if part.number == 1:
            raise UserError("a", "is wrong")
        assert stop.wait(20)

    with pytest.raises(UserError, match="a: is wrong"):
        side_by_side(PARTS, stop, work)


def test_ctrl_c_stops_all_and_waits_until_they_have_ended():
    stop, ended = Event(), list[int]()

    def work(part: Part) -> None:
        assert stop.wait(20)
        ended.append(part.number)

    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert side_by_side(PARTS, stop, work) is True
    assert sorted(ended) == [1, 2]


def in_allocation(job: str | None) -> Cluster:
    return Cluster(name="c", device="cpu", devices_per_node=1, launcher="slurm",
                   slurm=SlurmSettings(allocation=job))  # fmt: skip


@pytest.mark.parametrize(
    ("squeue", "fault"),
    [
        ("echo 'n[1-2]'", None),
        ("true", "job 7: has no hosts"),
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
    monkeypatch.setattr(working, "ASK_AGAIN_S", 0.01)
    put(tmp_path, monkeypatch, squeue=squeue)
    told = allocation_fault(in_allocation("7"))
    assert told is None if fault is None else fault in (told or "")
    assert allocation_fault(in_allocation(None)) is None


def test_one_question_that_gets_no_answer_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(working, "ASK_AGAIN_S", 0.01)
    once = tmp_path / "asked"
    calls = put(tmp_path, monkeypatch, squeue=f"[ -e {once} ] && exit 0; touch {once}; exit 1")
    assert "has no hosts" in (allocation_fault(in_allocation("7")) or "")
    assert len(calls.read_text().splitlines()) == 2


def test_jobs_that_were_left_in_the_queue_are_cancelled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = put(tmp_path, monkeypatch, scancel="true")
    folders = [tmp_path / "left", tmp_path / "none"]
    for folder in folders:
        folder.mkdir()
    Diary(folders[0]).begin("12_3")
    assert abandon_left(folders) == ["12_3"] and abandon_left(folders) == []
    assert calls.read_text() == "scancel 12_3\n"
    kept = read_slurm_record(folders[0])
    assert kept and kept.attempts[-1].reason == "its controller had died"
