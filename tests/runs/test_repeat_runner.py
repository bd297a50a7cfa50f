"""Series of repeats as they run: failures, lost hosts, Ctrl-C, and the commands that follow."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.compare.over_time.repeats import SeriesResult
from paceline.core.errors import SystemFaultError, UserError
from paceline.core.hosts import Host
from paceline.core.result import Result
from paceline.files.run_folder import RunRecord, read_record, run_folders
from paceline.machines.placement import HostPlacement, Request
from paceline.machines.probe import inventory
from paceline.runs import flow
from paceline.runs.flow import CancelledRunError, UnwrittenReportError
from paceline.runs.outcome import evaluate
from paceline.runs.plan import Plan
from paceline.runs.repeat_plan import ScheduledRepeat, new_series, resumed_series, side_request
from paceline.runs.repeat_runner import run_series
from paceline.runs.tasks.slot import JobSlot, TaskOutcome
from tests.runs.series_example import make_finished
from tests.runs.test_repeat_plan import BASE, repeat_fields
from tests.scaling.fleet import Fleet


@pytest.fixture(autouse=True)
def a_short_look_at_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "BUSY_SAMPLE_S", 0.001)


class Silent:
    """An observer that records its calls."""

    def __init__(self) -> None:
        self.ended_turns: list[tuple[str, int, str]] = []
        self.lost_slots: list[tuple[str, bool]] = []

    @contextmanager
    def running(self, task: ScheduledRepeat, plan: Plan) -> Iterator[flow.Watcher]:
        yield lambda progress: None

    def task_ended(self, task: ScheduledRepeat, kept: TaskOutcome) -> None:
        status = kept.status if isinstance(kept, Result) else "fault"
        self.ended_turns.append((task.letter, task.number, status))

    def slot_lost(self, slot: JobSlot, why: str, for_good: bool) -> None:
        self.lost_slots.append((slot.name, for_good))


class FakeMachine:
    """Fake `flow.run`, which has its own tests: each run ends as configured."""

    def __init__(self, *endings: str) -> None:
        self.endings = list(endings)
        self.records: list[RunRecord] = []

    def __call__(
        self, plan: Plan, root: Path, command: list[str], watch: flow.Watcher, **fields: Any
    ) -> Any:
        ending = self.endings.pop(0)
        if ending == "fault":
            raise SystemFaultError("launcher", "is gone")
        if ending == "user":
            raise UserError("recipe", "is wrong")
        del fields["probe"], fields["is_cancelled"], fields["submit"]
        full = ending == "disk full"
        number = len(list(root.iterdir())) if root.exists() else 0
        folder = make_finished(
            root,
            number,
            0.2 + 0.001 * number,
            spec=plan.spec,
            status="ok" if full else ending,
            **fields,
        )
        self.records.append(read_record(folder))
        if full:
            raise UnwrittenReportError(SystemFaultError("report", "no room"), evaluate(folder))
        if ending == "cancelled":
            raise CancelledRunError(evaluate(folder))
        return evaluate(folder)


def run_with(
    monkeypatch: pytest.MonkeyPatch, root: Path, num_repeats: int, *endings: str, name: str = "g"
) -> tuple[SeriesResult, FakeMachine, Silent]:
    """A series of one group whose runs end like this, its machine and its observer."""
    machine, observer = FakeMachine(*endings), Silent()
    monkeypatch.setattr(flow, "run", machine)
    series = new_series(root, [BASE], num_repeats, name)
    return run_series(series, root, ["paceline"], observer), machine, observer


def test_a_failed_repeat_is_counted_and_the_series_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    result, machine, observer = run_with(monkeypatch, tmp_path, 4, "ok", "failed", "fault", "ok")
    (group,) = result.groups
    assert (group.ok, group.failed, group.missing) == (2, 2, 2)
    assert [status for *_, status in observer.ended_turns] == ["ok", "failed", "fault", "ok"]
    assert group.figures["step_time_s"].value == pytest.approx(0.201)
    assert group.faults == ("launcher: is gone",)
    assert result.resume == "paceline run --resume g" and not result.interrupted
    assert [record.repeat.number for record in machine.records if record.repeat] == [1, 2, 4]


def on_hosts(names: str, **fields: Any) -> Request:
    where = HostPlacement(hosts=tuple(Host(name=name) for name in names.split()))
    return Request("tiny-gpt", overrides=("steps=20",), device="cpu", where=where, **fields)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    made = Fleet()
    monkeypatch.setitem(sys.modules, "paceline.machines.ssh", made)
    return made


def test_what_is_left_of_a_lost_part_runs_on_the_others(tmp_path: Path, fleet: Fleet):
    fleet.down, observer = {"n2"}, Silent()
    series = new_series(tmp_path, [on_hosts("n1 n2 n3")], 6, "g", nodes_per_trial=1)
    result = run_series(series, tmp_path, ["paceline"], observer)
    (group,) = result.groups
    assert (group.ok, group.failed) == (6, 1) and result.resume is None
    assert observer.lost_slots == [("n2", True)]
    done = [
        record for folder in run_folders(tmp_path) if (record := read_record(folder)).status == "ok"
    ]
    on = {
        record.repeat.number: record.spec.cluster.hosts
        for record in done
        if record.repeat and record.spec
    }
    assert on == {1: ("n1",), 4: ("n1",), 3: ("n3",), 6: ("n3",), 2: ("n1",), 5: ("n3",)}


def test_a_pair_of_a_lost_part_stays_together(tmp_path: Path, fleet: Fleet):
    fleet.down = {"n1"}
    base = on_hosts("n1 n2 n3")
    sides = [side_request(base, text) for text in ("", "layout.micro_batch=2")]
    series = new_series(tmp_path, sides, 3, "g", nodes_per_trial=1)
    result = run_series(series, tmp_path, ["paceline"], Silent())
    assert [group.ok for group in result.groups] == [3, 3]
    done = [
        record for folder in run_folders(tmp_path) if (record := read_record(folder)).status == "ok"
    ]
    places = {
        record.spec.cluster.hosts
        for record in done
        if record.repeat and record.repeat.number == 1 and record.spec
    }
    assert len(places) == 1


def test_without_a_whole_part_it_ends_and_goes_on_elsewhere(tmp_path: Path, fleet: Fleet):
    fleet.down, observer = {"n2", "n3"}, Silent()
    series = new_series(tmp_path, [on_hosts("n2 n3")], 4, "g", nodes_per_trial=1)
    result = run_series(series, tmp_path, ["paceline"], observer)
    assert (result.groups[0].ok, len(fleet.runs) <= 4) == (0, True)
    assert {name for name, for_good in observer.lost_slots if for_good} == {"n2", "n3"}
    assert result.resume == "paceline run --resume g --max-parallel 2 --hosts n[2-3]"
    again = resumed_series(tmp_path, "g", None, on_hosts("n4 n5").where, max_parallel=2)
    assert [part.hosts for part in again.slots] == [("n4",), ("n5",)]
    whole = run_series(again, tmp_path, ["paceline"], Silent())
    assert whole.groups[0].ok == 4 and whole.resume is None


def test_repeats_on_all_hosts_end_when_one_is_lost_twice(tmp_path: Path, fleet: Fleet):
    fleet.dying, observer = {"n2"}, Silent()
    series = new_series(tmp_path, [on_hosts("n1 n2")], 5, "g")
    result = run_series(series, tmp_path, ["paceline"], observer)
    assert (result.groups[0].ok, result.groups[0].failed) == (0, 2)
    assert observer.lost_slots == [("n[1-2]", False), ("n[1-2]", True)]
    assert result.resume == "paceline run --resume g"


def test_a_report_that_cannot_be_written_costs_a_warning_and_not_the_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    result, *_ = run_with(monkeypatch, tmp_path, 1, "disk full")
    assert (result.groups[0].ok, result.groups[0].failed) == (1, 0)
    assert result.groups[0].runs[0].warnings[-1] == "report: no room"


def test_bad_input_ends_the_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match="is wrong"):
        run_with(monkeypatch, tmp_path, 3, "ok", "user", "ok")


def test_an_interrupt_keeps_what_there_is_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    result, machine, _ = run_with(monkeypatch, tmp_path, 3, "ok", "cancelled", "ok")
    assert result.interrupted and machine.endings == ["ok"]
    assert (result.groups[0].ok, result.groups[0].failed) == (1, 1)
    series = resumed_series(tmp_path, "g", None)
    monkeypatch.setattr(flow, "run", machine)
    machine.endings = ["ok", "ok"]
    whole = run_series(series, tmp_path, ["paceline"], Silent())
    assert (whole.groups[0].ok, whole.groups[0].missing, whole.resume) == (3, 0, None)
    assert len(whole.groups[0].runs) == 4


def test_a_group_is_compared_with_the_one_of_its_recipe_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, *_ = run_with(monkeypatch, tmp_path, 1, "ok")
    assert first.compare is None
    make_finished(tmp_path, 7, 0.2, **repeat_fields(1, "another-recipe"))
    second, *_ = run_with(monkeypatch, tmp_path, 2, "ok", "ok", name="h")
    assert second.compare == "paceline compare g h"
    run_with(monkeypatch, tmp_path, 1, "nan", name="i")
    after_failure, *_ = run_with(monkeypatch, tmp_path, 1, "ok", name="j")
    assert after_failure.compare == "paceline compare h j"


def test_the_commands_name_the_folder_of_runs_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(flow, "run", FakeMachine("ok", "failed"))
    series = new_series(tmp_path, [BASE], 2, "g")
    result = run_series(series, tmp_path, [], Silent(), runs_dir=Path("/my runs"))
    assert result.resume == "paceline run --resume g --runs-dir '/my runs'"
