"""A sweep on parts of made-up hosts: at the same time, without lost hosts, resumed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

import pytest

from paceline.core.hosts import Host, expand
from paceline.files.run_folder import read_record, run_folders
from paceline.layouts.sweep.plan import Sweep, SweepOptions, dimensions, new_sweep
from paceline.layouts.sweep.result import SweepResult, SweepRow
from paceline.layouts.sweep.trials import (
    SweepRunner,
    SweepTask,
    missing_runs,
    run_sweep,
    sweep_trials,
)
from paceline.machines.placement import HostPlacement, Request
from paceline.machines.probe import inventory
from paceline.runs import flow
from paceline.runs.plan import Plan
from paceline.runs.tasks.slot import JobSlot
from tests.scaling.fleet import Fleet


@pytest.fixture(autouse=True)
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    monkeypatch.setattr(inventory, "BUSY_SAMPLE_S", 0.001)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    made = Fleet()
    monkeypatch.setitem(sys.modules, "paceline.machines.ssh", made)
    return made


class Silent:
    """An observer that records its calls."""

    def __init__(self) -> None:
        self.lost_slots: dict[str, str] = {}

    @contextmanager
    def running(self, task: SweepTask, plan: Plan) -> Iterator[flow.Watcher]:
        yield lambda progress: None

    def task_ended(self, task: SweepTask, kept: SweepRow) -> None: ...

    def slot_lost(self, slot: JobSlot, why: str, for_good: bool) -> None:
        self.lost_slots[slot.name] = why


def a_sweep(
    hosts: str = "n[1-4]",
    mbs: str = "1,2,4,8",
    allocation: str | None = None,
    nodes_per_trial: int | None = 1,
) -> Sweep:
    varied, fixed = dimensions({"mbs": mbs}, ["steps=20", "global_batch=8 per node"])
    named = tuple(Host(name=name) for name in expand(hosts))
    where = HostPlacement(
        hosts=named, allocation=allocation, launcher="slurm" if allocation else None
    )
    request = Request("tiny-gpt", overrides=fixed, device="cpu", where=where)
    return new_sweep(SweepOptions(request, varied, nodes_per_trial=nodes_per_trial), None)


def run(sweep: Sweep, root: Path) -> tuple[SweepResult, Silent]:
    observer = Silent()
    command = ["paceline", "sweep", "tiny-gpt"]
    return run_sweep(sweep, sweep_trials(sweep, root), root, command, observer), observer


def statuses(result: SweepResult) -> list[str]:
    return [row.status for row in result.rows]


def test_runs_share_the_hosts_at_the_same_time(tmp_path: Path, fleet: Fleet):
    fleet.run_s = 0.8
    result, _ = run(a_sweep("n[1-2]", "1,2"), tmp_path)
    assert statuses(result) == ["ok", "ok"] and sorted(fleet.runs) == [("n1",), ("n2",)]
    first, second = (read_record(folder) for folder in run_folders(tmp_path))
    assert max(first.launched_unix or 0, second.launched_unix or 0) < min(
        first.ended_unix or 0, second.ended_unix or 0
    )
    assert {first.key, second.key} == {row.key for row in result.rows}


def test_what_a_lost_host_broke_off_runs_elsewhere(tmp_path: Path, fleet: Fleet):
    fleet.down = {"n2"}
    fleet.dying = {"n3"}
    result, observer = run(a_sweep(), tmp_path)
    assert statuses(result) == ["ok"] * 4 and result.halt_reason is None
    assert observer.lost_slots.keys() <= {"n2", "n3"}
    good = [
        record for folder in run_folders(tmp_path) if (record := read_record(folder)).status == "ok"
    ]
    assert {record.spec.cluster.hosts for record in good if record.spec} <= {("n1",), ("n4",)}


def test_without_a_whole_part_it_ends_and_the_same_command_goes_on(tmp_path: Path, fleet: Fleet):
    fleet.down = {"n1", "n2"}
    result, observer = run(a_sweep("n[1-2]"), tmp_path)
    assert result.halt_reason and result.halt_reason.startswith("every slot has lost a host: n")
    assert (
        set(observer.lost_slots) == {"n1", "n2"}
        and result.resume_command == "paceline sweep tiny-gpt"
    )
    assert "ok" not in statuses(result)
    fleet.down = set()
    again, _ = run(a_sweep("n[1-2]"), tmp_path)
    assert statuses(again) == ["ok"] * 4 and again.halt_reason is None


def test_without_parts_a_lost_host_ends_it_after_a_second_try(tmp_path: Path, fleet: Fleet):
    fleet.dying = {"n2"}
    result, observer = run(a_sweep("n[1-2]", nodes_per_trial=None), tmp_path)
    assert [read_record(folder).status for folder in run_folders(tmp_path)] == ["failed"] * 2
    assert len(fleet.runs) == 2 and result.halt_reason and list(observer.lost_slots) == ["n[1-2]"]
    assert statuses(result) == ["failed", "waiting", "waiting", "waiting"] and result.resume_command
    fleet.dying = set()
    again, _ = run(a_sweep("n[1-2]", nodes_per_trial=None), tmp_path)
    assert statuses(again) == ["ok"] * 4 and again.halt_reason is None


def test_a_host_that_is_back_at_once_costs_one_try(tmp_path: Path, fleet: Fleet):
    fleet.dying, fleet.dies_once = {"n2"}, True
    result, _ = run(a_sweep("n[1-2]", nodes_per_trial=None), tmp_path)
    assert statuses(result) == ["ok"] * 4 and len(fleet.runs) == 5


def test_the_end_of_the_allocation_keeps_what_is_finished(
    tmp_path: Path, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "paceline.machines.slurm", fleet)
    fleet.broken = "the allocation ended"
    monkeypatch.setattr("paceline.runs.tasks.runner.allocation_fault", lambda _: "job 7 has ended")
    result, _ = run(a_sweep(allocation="7"), tmp_path)
    assert result.halt_reason == "job 7 has ended" and "ok" not in statuses(result)
    assert len(fleet.runs) <= 4 and result.resume_command
    fleet.broken = None
    again, _ = run(a_sweep(allocation="8"), tmp_path)
    assert again.name == result.name and statuses(again) == ["ok"] * 4


def test_a_stop_ends_what_runs_on_every_part(tmp_path: Path, fleet: Fleet):
    fleet.run_s = 60
    sweep = a_sweep("n[1-2]")
    runner = SweepRunner(Silent(), tmp_path, ["paceline"], slots=sweep.slots, sweep=sweep)
    Timer(1.5, runner.stop.set).start()
    runner.run_tasks(missing_runs(sweep, sweep_trials(sweep, tmp_path)))
    assert len(fleet.handles) == 2 and all(handle.stopped for handle in fleet.handles)
    assert {read_record(folder).status for folder in run_folders(tmp_path)} == {"cancelled"}
