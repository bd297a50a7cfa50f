"""A slot that lost a host gets no more tasks; the last one has a second chance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import SystemFaultError
from paceline.core.hardware import Cluster, SlurmSettings
from paceline.runs.outcome import evaluate
from paceline.runs.tasks.slot import NO_USABLE_SLOT, JobSlot, LostSlots, is_lost, why_ended
from tests.runs.series_example import make_finished

A, B = JobSlot(1, ("a",)), JobSlot(2, ("b",))


def cluster(launcher: str = "ssh", hosts: tuple[str, ...] = (), **site: Any) -> Cluster:
    return Cluster(
        name="c",
        device="cpu",
        devices_per_node=1,
        nodes=max(1, len(hosts)),
        launcher=launcher,
        hosts=hosts,
        slurm=SlurmSettings(**site),
    )


def test_a_host_at_fault_counts_on_its_slot_alone(tmp_path: Path):
    on = cluster(hosts=("a", "b"))
    gone = SystemFaultError("b", "does not answer", hosts=("b",))
    assert is_lost(B, on, gone, tmp_path) and not is_lost(A, on, gone, tmp_path)
    result = evaluate(make_finished(tmp_path, 1, 0.2, status="failed", faulty_hosts=("a",))).result
    assert is_lost(A, on, result, tmp_path) and not is_lost(B, on, result, tmp_path)
    short = evaluate(make_finished(tmp_path, 2, 0.2, status="oom", faulty_hosts=("a",))).result
    assert not is_lost(A, on, short, tmp_path)


@pytest.mark.parametrize(
    ("on", "lost"),
    [
        (cluster(hosts=("a", "b")), True),
        (cluster(hosts=("c",)), False),
        (cluster("slurm", allocation="7"), True),
        (cluster("slurm"), False),  # Slurm gives the next job another node
        (cluster("local"), False),
    ],
)
def test_without_slots_of_their_own_the_hosts_of_all_runs_count(
    on: Cluster, lost: bool, tmp_path: Path
):
    gone = SystemFaultError("b", "does not answer", hosts=("b",))
    assert is_lost(JobSlot(1), on, gone, tmp_path) is lost
    assert not is_lost(JobSlot(1), on, SystemFaultError("disk", "is full"), tmp_path)


def test_what_one_slot_broke_off_is_tried_once_more_and_then_no_more():
    losses = LostSlots((A, B))
    assert losses.note(A, "x", "a is dead") is True and losses.usable == [B]
    assert losses.note(B, "x", "b is dead") is False and losses.usable == []
    assert losses.stop_reason == f"{NO_USABLE_SLOT}: b is dead"


def test_the_last_slot_has_a_second_chance_with_each_task():
    losses = LostSlots((A,))
    assert losses.note(A, "x", "no answer") and losses.usable == [A] and losses.stop_reason is None
    assert losses.note(A, "y", "no answer") and losses.usable == [A]
    assert (
        not losses.note(A, "x", "still none")
        and losses.stop_reason == f"{NO_USABLE_SLOT}: still none"
    )


def test_how_a_run_ended_is_a_sentence(tmp_path: Path):
    assert why_ended(SystemFaultError("b", "does not answer")) == "b: does not answer"
    ended = evaluate(make_finished(tmp_path, 1, 0.2, status="failed", reason="b was lost")).result
    assert why_ended(ended) == "b was lost"
