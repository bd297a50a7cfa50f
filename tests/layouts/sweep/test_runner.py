"""An interrupted sweep resumes, and every way to end is a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import SystemFaultError, UserError
from paceline.files.run_folder import this_controller
from paceline.layouts.sweep.plan import Sweep, SweepOptions, dimensions, new_sweep
from paceline.layouts.sweep.result import SweepResult, SweepRow
from paceline.layouts.sweep.trials import (
    SweepTask,
    run_sweep,
    sweep_result,
    sweep_row,
    sweep_trials,
)
from paceline.machines.placement import Request
from paceline.machines.probe import inventory
from paceline.runs import flow
from paceline.runs.outcome import evaluate
from paceline.runs.plan import Plan
from paceline.runs.tasks.slot import JobSlot
from tests.estimate.given import SHIPPED
from tests.runs.series_example import make_finished

Ending = float | str | Exception
"""A step time in seconds, a status, or what is raised."""


@pytest.fixture(autouse=True)
def a_short_look_at_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "BUSY_SAMPLE_S", 0.001)


@dataclass
class Runner:
    """Stands in for flow.run: makes a run folder that ends as the micro-batch of its plan says."""

    endings: Callable[[int, int], Ending]
    """By micro-batch and number of the run."""
    ran: list[int] = field(default_factory=list[int])
    """Micro-batches, in the order in which they ran."""

    def __call__(
        self, plan: Plan, root: Path, command: list[str], watch: flow.Watcher, **how: Any
    ) -> Any:
        micro_batch = plan.spec.layout.micro_batch
        self.ran.append(micro_batch)
        ending = self.endings(micro_batch, len(self.ran))
        if isinstance(ending, Exception):
            raise ending
        finished = isinstance(ending, float)
        fields: dict[str, Any] = {} if finished else {"reason": f"it was {ending}"}
        folder = make_finished(
            root,
            len(list(root.glob("*/run.json"))),
            ending if finished else 1.0,
            spec=plan.spec,
            status="ok" if finished else str(ending),
            group=how["group"],
            **fields,
        )
        return evaluate(folder)


class Silent:
    """An observer that records the rows."""

    def __init__(self) -> None:
        self.rows: list[SweepRow] = []
        self.lost_slots: list[tuple[str, str]] = []

    @contextmanager
    def running(self, task: SweepTask, plan: Plan) -> Iterator[flow.Watcher]:
        yield lambda progress: None

    def task_ended(self, task: SweepTask, kept: SweepRow) -> None:
        self.rows.append(kept)

    def slot_lost(self, slot: JobSlot, why: str, for_good: bool) -> None:
        self.lost_slots.append((slot.name, why))


def a_sweep(mbs: str = "1,2,4", repeats: int = 1, timeout_s: float | None = None) -> Sweep:
    varied, fixed = dimensions({"mbs": mbs}, ["steps=20"])
    request = Request("tiny-gpt", overrides=fixed, devices=1, device="cpu", timeout_s=timeout_s)
    return new_sweep(SweepOptions(request, varied, repeats), SHIPPED)


@dataclass
class Bench:
    """A runs folder, and sweeps in it by a runner of one's own."""

    root: Path
    monkeypatch: pytest.MonkeyPatch

    def run(
        self, sweep: Sweep, endings: Callable[[int, int], Ending]
    ) -> tuple[SweepResult, list[int]]:
        runner = Runner(endings)
        self.monkeypatch.setattr(flow, "run", runner)
        trials = sweep_trials(sweep, self.root)
        result = run_sweep(sweep, trials, self.root, ["x", "sweep", "tiny-gpt"], Silent())
        return result, runner.ran


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def statuses(result: SweepResult) -> list[str]:
    return [row.status for row in result.rows]


def test_every_combination_becomes_a_row_with_its_figures(bench: Bench):
    result, ran = bench.run(a_sweep(), lambda mbs, _: 1.0 / mbs)
    assert ran == [1, 2, 4] and statuses(result) == ["ok", "ok", "ok"]
    best = result.best
    assert best is not None and best.settings == {"layout.micro_batch": "4"}
    assert best.step_time_s == pytest.approx(0.25) and best.n and best.dp == best.devices == 1
    assert best.tokens_per_s == pytest.approx(8 * 256 / 0.25)
    assert result.resume_command is None and not result.interrupted
    assert result.sentences[0].startswith("best: mbs 4")


def test_lack_of_memory_nan_and_a_time_limit_are_rows_and_the_rest_goes_on(bench: Bench):
    endings = {1: "oom", 2: "nan", 4: "timeout", 8: 0.2}
    result, _ = bench.run(a_sweep("1,2,4,8"), lambda mbs, _: endings[mbs])
    assert statuses(result) == ["oom", "nan", "timeout", "ok"]
    assert result.rows[0].reason == "it was oom" and result.rows[0].step_time_s is None
    assert result.resume_command is None and result.best is result.rows[3]


def test_what_has_run_is_not_run_again_and_its_row_is_the_same(bench: Bench):
    first, _ = bench.run(a_sweep(), lambda mbs, _: "oom" if mbs == 4 else 1.0 / mbs)
    again, ran = bench.run(a_sweep(), lambda mbs, _: 9.0)
    assert ran == [] and again.rows == first.rows


def test_a_longer_list_adds_only_what_is_new(bench: Bench):
    bench.run(a_sweep("1,2"), lambda mbs, _: 1.0 / mbs)
    result, ran = bench.run(a_sweep("1,2,8"), lambda mbs, _: 1.0 / mbs)
    assert ran == [8] and len(result.rows) == 3


def test_another_content_or_another_name_is_measured_anew(bench: Bench):
    sweep = a_sweep("1,2")
    bench.run(sweep, lambda mbs, _: 1.0)
    other = Sweep("other", sweep.recipe, None, sweep.dimensions, sweep.choices)
    assert bench.run(other, lambda mbs, _: 1.0)[1] == [1, 2]


def test_runs_of_another_machine_do_not_count(bench: Bench):
    sweep = a_sweep("1,2")
    bench.run(sweep, lambda mbs, _: 1.0)
    for trial in sweep_trials(sweep, bench.root):
        assert trial.choice.plan and trial.missing(1) == 0
    moved = [
        text
        for path in bench.root.glob("*/run.json")
        if (label := a_sweep().choices[0].plan.spec.cluster.device_label)  # type: ignore[union-attr]
        and (text := path.write_text(path.read_text().replace(label, "another CPU")))
    ]
    assert len(moved) == 2
    assert [trial.missing(1) for trial in sweep_trials(sweep, bench.root)] == [1, 1]


def test_ctrl_c_keeps_what_has_ended_and_the_same_command_goes_on(bench: Bench):
    def endings(mbs: int, number: int) -> Ending:
        if number == 2:
            raise KeyboardInterrupt
        return 1.0 / mbs

    result, _ = bench.run(a_sweep(), endings)
    assert result.interrupted and statuses(result) == ["ok", "waiting", "waiting"]
    assert result.resume_command == "paceline sweep tiny-gpt" and result.best is result.rows[0]
    again, ran = bench.run(a_sweep(), lambda mbs, _: 1.0 / mbs)
    assert ran == [2, 4] and statuses(again) == ["ok"] * 3 and again.resume_command is None


def test_a_run_that_the_user_stops_ends_the_sweep(bench: Bench):
    done = evaluate(make_finished(bench.root, 0, 1.0))
    result, ran = bench.run(a_sweep(), lambda mbs, _: flow.CancelledRunError(done))
    assert result.interrupted and ran == [1]


def test_a_fault_of_the_machine_is_a_row_and_is_tried_again_another_time(bench: Bench):
    def endings(mbs: int, _: int) -> Ending:
        return SystemFaultError("disk", "is full") if mbs == 2 else 1.0

    result, ran = bench.run(a_sweep(), endings)
    assert ran == [1, 2, 4] and statuses(result) == ["ok", "failed", "ok"]
    assert result.rows[1].reason == "disk: is full"
    again, ran = bench.run(a_sweep(), lambda mbs, _: 1.0)
    assert ran == [2] and statuses(again) == ["ok", "ok", "ok"]


def test_wrong_input_ends_the_sweep(bench: Bench):
    with pytest.raises(UserError):
        bench.run(a_sweep(), lambda mbs, _: UserError("a", "is wrong"))


def test_everything_runs_once_before_anything_runs_again(bench: Bench):
    result, ran = bench.run(a_sweep("1,2", repeats=3), lambda mbs, n: 1.0 + n / 100)
    assert ran == [1, 2, 1, 2, 1, 2]
    assert [row.n for row in result.rows] == [3, 3] and len(result.rows[0].runs) == 3
    assert result.rows[0].step_time_s == pytest.approx(1.03)
    assert result.rows[0].low_s is not None and result.rows[0].low_s < 1.03


def test_a_layout_without_memory_is_not_tried_again(bench: Bench):
    _, ran = bench.run(a_sweep("1,2", repeats=3), lambda mbs, _: "oom" if mbs == 1 else 1.0)
    assert ran == [1, 2, 2, 2]


def test_more_repeats_add_what_is_missing(bench: Bench):
    bench.run(a_sweep("1,2"), lambda mbs, _: 1.0)
    _, ran = bench.run(a_sweep("1,2", repeats=2), lambda mbs, _: 1.1)
    assert ran == [1, 2]


def test_a_longer_time_limit_gives_another_chance(bench: Bench):
    endings: Callable[[int, int], Ending] = lambda mbs, _: "timeout" if mbs == 2 else 1.0  # noqa: E731
    bench.run(a_sweep("1,2", timeout_s=10), endings)
    assert bench.run(a_sweep("1,2", timeout_s=10), endings)[1] == []
    assert bench.run(a_sweep("1,2", timeout_s=5), endings)[1] == []
    assert bench.run(a_sweep("1,2", timeout_s=20), endings)[1] == [2]


def test_a_run_that_another_process_watches_is_not_started_twice(bench: Bench):
    sweep = a_sweep("1,2")
    plan = sweep.choices[0].plan
    assert plan is not None
    make_finished(
        bench.root,
        0,
        1.0,
        spec=plan.spec,
        status="running",
        group=sweep.group(plan),
        controller=this_controller(),
    )
    with pytest.raises(UserError, match="measured by another process"):
        sweep_trials(sweep, bench.root)


def test_a_run_whose_process_is_gone_is_run_again(bench: Bench):
    sweep = a_sweep("1,2")
    plan = sweep.choices[0].plan
    assert plan is not None
    gone = this_controller().model_copy(update={"boot_id": "another boot"})
    make_finished(
        bench.root,
        0,
        1.0,
        spec=plan.spec,
        status="running",
        group=sweep.group(plan),
        controller=gone,
    )
    assert [trial.missing(1) for trial in sweep_trials(sweep, bench.root)] == [1, 1]


def test_refused_combinations_are_rows_without_runs(tmp_path: Path):
    sweep = a_sweep("1,3")
    trials = sweep_trials(sweep, tmp_path)
    refused = sweep_row(trials[1])
    assert refused.status == "refused" and "multiple" in (refused.reason or "")
    assert refused.layout.micro_batch == 3 and refused.devices is None and refused.key is None
    assert trials[1].missing(5) == 0
    planned = sweep_result(sweep, trials, interrupted=False, command=["paceline", "sweep"])
    assert (
        statuses(planned) == ["waiting", "refused"] and planned.resume_command == "paceline sweep"
    )
