"""Tasks run side by side, move away from lost hosts, and end together."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.hardware import Cluster
from paceline.core.result import Result
from paceline.machines.placement import Request
from paceline.machines.probe import inventory
from paceline.runs import flow
from paceline.runs.flow import CancelledRunError, UnwrittenReportError, Watcher
from paceline.runs.outcome import evaluate
from paceline.runs.plan import Plan, make_plan
from paceline.runs.tasks.runner import TaskQueue, TaskRun, TaskRunner, side_by_side
from paceline.runs.tasks.slot import JobSlot, TaskOutcome, plan_on
from tests.runs.series_example import make_finished

SLOTS = (JobSlot(1, ("a",)), JobSlot(2, ("b",)))


def test_slots_work_at_the_same_time():
    together = threading.Barrier(2, timeout=20)
    assert side_by_side(SLOTS, Event(), lambda slot: print(together.wait())) is False


def test_the_first_fault_stops_the_others_and_is_raised():
    stop = Event()

    def work(slot: JobSlot) -> None:
        if slot.number == 1:
            raise UserError("a", "is wrong")
        assert stop.wait(20)

    with pytest.raises(UserError, match="a: is wrong"):
        side_by_side(SLOTS, stop, work)


def test_ctrl_c_stops_all_and_waits_until_they_have_ended_however_often_it_is_pressed():
    stop, ended = Event(), list[int]()

    def work(slot: JobSlot) -> None:
        if slot.number == 1:  # from here, so that no press comes when all have ended
            threading.Event().wait(0.2)
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(20)
        if slot.number == 1:
            os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(0.5)
        ended.append(slot.number)

    assert side_by_side(SLOTS, stop, work) is True
    assert sorted(ended) == [1, 2]


@dataclass
class Letters(TaskRunner[str, str]):
    """Tasks that are letters, each a run on the hosts of its slot; notes how they end."""

    plan: Plan = field(kw_only=True)
    kept: list[tuple[str, bool]] = field(default_factory=list[tuple[str, bool]])
    stopped: list[str] = field(default_factory=list[str])

    def run_of(self, task: str, slot: JobSlot) -> TaskRun:
        return TaskRun(plan_on(self.plan, slot), group=task)

    def keep(self, task: str, outcome: TaskOutcome, moved: bool) -> str:
        self.kept.append((task, moved))
        return task

    def task_cancelled(self, task: str, result: Result | None) -> None:
        self.stopped.append(task)

    def cluster(self, task: str) -> Cluster:
        return self.plan.spec.cluster


class Losing:
    """An observer that keeps which slots are lost for good."""

    def __init__(self) -> None:
        self.lost_slots: dict[str, bool] = {}

    @contextmanager
    def running(self, task: str, plan: Plan) -> Iterator[Watcher]:
        yield lambda progress: None

    def task_ended(self, task: str, kept: str) -> None: ...

    def slot_lost(self, slot: JobSlot, why: str, for_good: bool) -> None:
        self.lost_slots[slot.name] = for_good


@dataclass
class Runs:
    """Stands where `flow.run` stands, which has its tests: hosts are dead, runs are ended."""

    root: Path
    dead: set[str] = field(default_factory=set[str])
    status: str = "ok"
    full: bool = False
    """Whether no report can be written."""
    on: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Tasks with the host on which they ran to their end."""

    def __call__(self, plan: Plan, *_: Any, group: str, **fields: Any) -> Any:
        (host,) = plan.spec.cluster.hosts or ("",)
        if host in self.dead:
            raise SystemFaultError(host, "does not answer", hosts=(host,))
        self.on.append((group, host))
        number = len(self.on)
        report = evaluate(make_finished(self.root, number, 0.2, spec=plan.spec, status=self.status))
        if self.full:
            raise UnwrittenReportError(SystemFaultError("report", "no room"), report)
        if self.status == "cancelled":
            raise CancelledRunError(report)
        return report


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(inventory, "BUSY_SAMPLE_S", 0.001)
    return make_plan(Request("tiny-gpt", overrides=("steps=20",), devices=1, device="cpu"))


def on_ssh(plan: Plan) -> Plan:
    cluster = plan.spec.cluster.model_copy(update={"launcher": "ssh", "hosts": ("a",)})
    return Plan(plan.spec.model_copy(update={"cluster": cluster}), plan.job, plan.inventory)


def letters(plan: Plan, root: Path, *slots: JobSlot) -> Letters:
    return Letters(Losing(), root, ["paceline"], slots=slots, plan=plan)


def test_tasks_go_on_on_the_slots_that_are_whole_until_none_is_left(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    runs, runner = Runs(tmp_path, dead={"a"}), letters(on_ssh(plan), tmp_path, *SLOTS)
    monkeypatch.setattr(flow, "run", runs)
    assert runner.run_tasks(TaskQueue("xyz")) is False and runner.stop_reason is None
    assert sorted(runs.on) == [("x", "b"), ("y", "b"), ("z", "b")]
    assert runner.lost_slots.usable == [SLOTS[1]] and sum(moved for _, moved in runner.kept) == 1
    assert isinstance(runner.observer, Losing) and runner.observer.lost_slots == {"a": True}


def test_without_a_whole_slot_it_ends_with_the_reason(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    runner = letters(on_ssh(plan), tmp_path, SLOTS[0])
    monkeypatch.setattr(flow, "run", Runs(tmp_path, dead={"a"}))
    assert runner.run_tasks(TaskQueue("xyz")) is False
    assert runner.stop_reason == "every slot has lost a host: a: does not answer"
    assert runner.kept == [("x", True), ("x", False)] and runner.lost_slots.usable == []


def test_nothing_begins_after_a_stop(plan: Plan, tmp_path: Path):
    runner = letters(plan, tmp_path, JobSlot(1))
    runner.stop.set()
    assert runner.run_tasks(TaskQueue("x")) is False and runner.kept == runner.stopped == []


def test_tasks_that_have_become_needless_are_skipped(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    runs, runner = Runs(tmp_path), letters(plan, tmp_path, JobSlot(1))
    monkeypatch.setattr(flow, "run", runs)
    tasks = TaskQueue("xyz", missing=lambda task: task == "z" or not runner.kept)
    assert runner.run_tasks(tasks) is False
    assert [task for task, _ in runs.on] == ["x", "z"]


@pytest.mark.parametrize("full", [False, True])
def test_a_run_that_the_user_ended_ends_all_even_on_a_full_disk(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
):
    runner = letters(plan, tmp_path, JobSlot(1))
    monkeypatch.setattr(flow, "run", Runs(tmp_path, status="cancelled", full=full))
    assert runner.run_tasks(TaskQueue("xy")) is True and runner.stop.is_set()
    assert runner.stopped == ["x"] and runner.kept == []


def test_ctrl_c_while_slurm_is_asked_keeps_what_has_ended(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def asked(_: Cluster) -> str | None:
        raise KeyboardInterrupt

    runner = letters(plan, tmp_path, JobSlot(1))
    monkeypatch.setattr(flow, "run", Runs(tmp_path, status="failed"))
    monkeypatch.setattr("paceline.runs.tasks.runner.allocation_fault", asked)
    assert runner.run_tasks(TaskQueue("xy")) is True
    assert runner.kept == [("x", False)]
