"""A tuning from question to recipe: runs are stored and found again, every way to end is a row."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.tune import exit_code
from paceline.core.errors import EXIT_INCOMPLETE, SystemFaultError, UserError
from paceline.core.hosts import Host
from paceline.files.recipe import load_recipe
from paceline.layouts.search.space import SearchSpace
from paceline.layouts.tune import candidates
from paceline.layouts.tune.result import TuneResult
from paceline.layouts.tune.search import Budget
from paceline.layouts.tune.tuning import RESULT_FILE, TuneOptions, headline, new_tuning
from paceline.machines.placement import HostPlacement, Request
from paceline.machines.probe import inventory
from paceline.runs import flow
from tests.layouts.sweep.test_runner import Ending, Runner, Silent

SPACE = SearchSpace(micro_batches=(1, 2, 4, 8), recompute=("none",))


@pytest.fixture(autouse=True)
def nothing_measured_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No look at the cores, no probes of the processor, no calibration of the user's."""
    monkeypatch.setattr(inventory, "BUSY_SAMPLE_S", 0.001)
    monkeypatch.setattr(candidates, "probed_machine", lambda *_: None)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def options(runs: int = 9, devices: int = 1, *more: str, **fields: Any) -> TuneOptions:
    request = Request("tiny-llama", None, ("steps=20", *more), devices, "cpu")
    return TuneOptions(request, Budget(runs=runs), SPACE, **fields)


@dataclass
class Bench:
    """A runs folder, and tunings in it whose runs end by a function of the micro-batch."""

    root: Path
    monkeypatch: pytest.MonkeyPatch

    def run(
        self, tune_options: TuneOptions, endings: Callable[[int, int], Ending]
    ) -> tuple[TuneResult, list[int]]:
        runner = Runner(endings)
        self.monkeypatch.setattr(flow, "run", runner)
        tuning = new_tuning(tune_options, None, self.root, ["x", "tune", "tiny-llama"])
        return tuning.run(Silent()), runner.ran


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path / "runs", monkeypatch)


def by_micro_batch(mbs: int, _: int) -> Ending:
    return 1.0 / mbs


def test_the_fastest_is_found_and_written_as_a_recipe_that_runs(bench: Bench):
    result, ran = bench.run(options(), by_micro_batch)
    best = result.best
    assert best is not None and best.layout.micro_batch == 8 and best.own
    assert sorted(set(ran)) != [] and ran[0] == 8  # the recipe's own comes first
    assert best.step_time_s == pytest.approx(1 / 8) and best.tokens_per_s and best.num_runs == 1
    assert result.recipe_file is not None
    written, recipe = load_recipe(result.recipe_file), load_recipe("tiny-llama", None, ["steps=20"])
    assert written.layout == best.layout and written.devices == 1
    assert written.name == "tiny-llama-tuned"
    same = {"name", "layout", "devices", "variants"}
    assert written.model_dump(exclude=same) == recipe.model_dump(exclude=same)
    stored = json.loads((bench.root / result.name / RESULT_FILE).read_text())
    assert TuneResult.model_validate(stored) == result


def test_rows_tell_what_was_expected_before_and_after(bench: Bench):
    result, _ = bench.run(options(), by_micro_batch)
    for row in result.rows:
        assert row.before.low_s < row.before.step_time_s < row.before.high_s
        assert row.step_time_s is not None
        assert row.after.low_s < row.step_time_s < row.after.high_s
        assert row.after.high_s - row.after.low_s < row.before.high_s - row.before.low_s


def test_the_same_command_runs_nothing_again_and_a_longer_budget_goes_on(bench: Bench):
    def slower(mbs: int, _: int) -> Ending:
        return 0.1 * mbs

    first, ran = bench.run(options(1), slower)
    assert ran == [8] and first.stop == "budget"
    again, more = bench.run(options(1), slower)
    assert more == [] and [r.label for r in again.rows] == [r.label for r in first.rows]
    assert again.rows[0].runs == first.rows[0].runs and again.sentences[0] == first.sentences[0]
    longer, more = bench.run(options(9), slower)
    assert more and 8 not in more and longer.best is not None and not longer.best.own
    assert "the recipe's own layout (dp 1 mbs 8) takes" in longer.sentences[1]


def test_another_question_or_name_measures_anew(bench: Bench):
    first, _ = bench.run(options(1), by_micro_batch)
    other, ran = bench.run(options(1, 1, "seq_len=128"), by_micro_batch)
    assert ran and other.name != first.name
    named, ran = bench.run(options(1, name="mine"), by_micro_batch)
    assert ran and named.name == "mine" and (bench.root / "mine" / RESULT_FILE).is_file()


def test_ctrl_c_keeps_what_has_ended_and_the_same_command_goes_on(bench: Bench):
    def endings(mbs: int, number: int) -> Ending:
        if number == 2:
            raise KeyboardInterrupt
        return 1.0 / mbs

    result, ran = bench.run(options(), endings)
    assert result.stop == "interrupted" and result.resume_command == "paceline tune tiny-llama"
    assert len(result.rows) == 1 and result.best is not None and len(ran) == 2
    again, more = bench.run(options(), by_micro_batch)
    assert (
        again.stop != "interrupted" and more and ran[0] not in more and again.resume_command is None
    )


def test_the_end_of_the_allocation_breaks_it_off(bench: Bench):
    ended = "paceline.runs.tasks.runner.allocation_fault"
    bench.monkeypatch.setattr(ended, lambda _: "job 7 has ended")
    result, ran = bench.run(
        options(), lambda mbs, _: 1.0 if mbs == 8 else SystemFaultError("n", "x")
    )
    assert len(ran) == 2 and ran[0] == 8 and result.stop == "interrupted"
    assert (
        result.resume_command == "paceline tune tiny-llama" and exit_code(result) == EXIT_INCOMPLETE
    )
    assert any("job 7 has ended" in line for line in result.sentences)
    assert [row.status for row in result.rows] == ["ok"]


def on_two_hosts(runs: int = 9) -> TuneOptions:
    changed = options(runs, 1, "batch_per_device=null", "global_batch=16", name="there")
    hosts = tuple(Host(name=name) for name in ("n1", "n2"))
    return replace(changed, request=replace(changed.request, where=HostPlacement(hosts=hosts)))


def test_a_lost_host_ends_it_after_a_second_try_and_costs_no_layout(bench: Bench):
    gone = SystemFaultError("n2", "does not answer", hosts=("n2",))
    result, ran = bench.run(on_two_hosts(), lambda mbs, number: 1.0 / mbs if number == 1 else gone)
    assert len(ran) == 3 and ran[1] == ran[2] and len(result.rows) == result.num_runs == 1
    assert result.stop == "interrupted" and exit_code(result) == EXIT_INCOMPLETE
    assert "no further run is possible: every slot has lost a host: n2: does not answer" in (
        result.sentences
    )
    again, more = bench.run(on_two_hosts(), by_micro_batch)
    assert again.stop != "interrupted" and ran[0] not in more[:1] and len(again.rows) > 1
    assert "paceline run" in again.sentences[-1] and "--hosts=n[1-2]" in again.sentences[-1]


def test_a_host_that_is_back_at_once_costs_nothing(bench: Bench):
    gone = SystemFaultError("n2", "does not answer", hosts=("n2",))
    result, ran = bench.run(on_two_hosts(), lambda mbs, number: gone if number == 2 else 1.0 / mbs)
    assert result.stop != "interrupted" and ran[1] == ran[2]
    assert {row.status for row in result.rows} == {"ok"}


def test_lack_of_memory_is_learned_from(bench: Bench):
    result, ran = bench.run(options(), lambda mbs, _: "oom" if mbs >= 4 else 1.0 / mbs)
    out = [row for row in result.rows if row.status == "oom"]
    assert out and out[0].step_time_s is None and out[0].reason == "it was oom"
    assert result.best is not None and result.best.layout.micro_batch == 2
    assert ran.count(4) + ran.count(8) == len(out)
    again, more = bench.run(options(), by_micro_batch)
    assert more == [] and [row.status for row in again.rows] == [row.status for row in result.rows]


def test_without_any_figure_layouts_that_are_left_are_not_called_slower(bench: Bench):
    result, ran = bench.run(options(2), lambda *_: "nan")
    assert len(ran) == 2 and result.best is None and result.stop == "budget"
    assert result.n_hopeful == result.n_layouts - 2
    assert "expected to be slower" not in result.sentences[-1]


def test_a_dry_run_says_that_nothing_was_started(bench: Bench):
    result = new_tuning(options(3), None, bench.root, ["x"]).result()
    assert result.stop == "not started" and result.n_hopeful == result.n_layouts
    assert result.sentences[0].startswith("no run started")
    assert {layout.reason for layout in result.untried_layouts} == {"may be the fastest"}


def test_a_repeat_that_fails_is_one_run_and_may_be_tried_again(bench: Bench):
    def endings(mbs: int, number: int) -> Ending:
        close = 1.0 if mbs < 8 else 1.001
        return close if number <= 4 else "timeout"

    result, ran = bench.run(options(12), endings)
    assert result.num_runs == len(ran) and len(ran) > 6
    assert all(row.num_runs <= 3 for row in result.rows)


def test_a_place_for_the_recipe_is_looked_at_before_anything_runs(bench: Bench, tmp_path: Path):
    (tmp_path / "file").write_text("")
    for place, why in (
        (tmp_path, "is a folder"),
        (tmp_path / "file" / "x.yaml", "cannot|not a writable folder"),
    ):
        with pytest.raises(UserError, match=why):
            new_tuning(options(1, write=place), None, bench.root, ["x"])
    recipe = tmp_path / "own.yaml"
    recipe.write_text("extends: nothing")
    changed = options(1, write=recipe)
    changed = replace(changed, request=replace(changed.request, recipe=str(recipe)))
    with pytest.raises(UserError, match="is the recipe itself"):
        new_tuning(changed, None, bench.root, ["x"])


def test_nan_a_time_limit_and_a_fault_of_the_machine_are_rows(bench: Bench):
    def endings(mbs: int, _: int) -> Ending:
        ways: dict[int, Ending] = {8: "nan", 4: "timeout", 2: SystemFaultError("disk", "is full")}
        return ways.get(mbs, 1.0)

    result, ran = bench.run(options(), endings)
    statuses = {row.layout.micro_batch: row.status for row in result.rows}
    assert statuses == {8: "nan", 4: "timeout", 2: "failed", 1: "ok"} and len(ran) == 4
    reasons = {row.layout.micro_batch: row.reason for row in result.rows}
    assert reasons[2] == "disk: is full" and result.stop == "exhausted"
    _, more = bench.run(options(), endings)
    assert more == [2]  # what failed otherwise is tried another time


def test_layouts_that_are_close_are_measured_again(bench: Bench):
    result, ran = bench.run(options(12), lambda mbs, _: 1.0 if mbs < 8 else 1.001)
    assert max(ran.count(mbs) for mbs in (1, 2, 4, 8)) > 1
    assert any(row.tied_with_best for row in result.rows) and "within noise" in result.sentences[0]
    chances = [row.p_best for row in result.rows if row.p_best is not None]
    assert sum(chances) == pytest.approx(1.0)
    assert result.best is not None and "the fastest with" in result.sentences[0]


@pytest.mark.parametrize(
    ("more", "what"), [("dtype=fp8", "no layout that can run: "), ("layers=2", "not a field")]
)
def test_wrong_input_ends_the_tuning(bench: Bench, more: str, what: str):
    with pytest.raises(UserError, match=what):
        bench.run(options(2, 1, more), by_micro_batch)


@pytest.mark.parametrize(("cores", "words"), [(1, "1 physical core"), (2, "2 physical cores")])
def test_more_processes_than_physical_cores_must_be_asked_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, cores: int, words: str
):
    here = inventory.inventory()
    cpu = {**here["cpu"], "physical_cores": cores, "usable_cores": cores}
    monkeypatch.setattr("paceline.layouts.tune.tuning.inventory", lambda: {**here, "cpu": cpu})
    with pytest.raises(UserError, match=f"exceeds the {words} of this machine"):
        new_tuning(options(2, 64, "global_batch=64"), None, bench.root, ["x"])
    changed = options(2, 64, "global_batch=64", oversubscribe=True)
    tuning = new_tuning(changed, None, bench.root, ["x"])
    assert tuning.result().oversubscribed and "cannot" in headline(tuning)


def test_sentences_say_what_helps_and_what_was_never_tried(bench: Bench):
    result, _ = bench.run(options(3), by_micro_batch)
    text = "\n".join(result.sentences)
    assert ("each layout ran once" in text) == all(row.p_best is None for row in result.rows)
    assert "best: dp 1 mbs 8" in text and "with one setting changed: mbs" in text
    assert f"{len(result.rows)} of {result.n_layouts} layouts tried; not tried:" in text
    slower = [effect for effect in result.effects if effect.measured]
    assert slower and all(effect.ratio > 1 and effect.instead_of == "mbs 8" for effect in slower)
    assert all(layout.reason for layout in result.untried_layouts)


def test_a_budget_of_recomputation_is_one_setting_and_is_written(bench: Bench):
    by_budget = ("layout.recompute=budget", "layout.recompute_budget=0.3")
    result, _ = bench.run(options(9, 1, *by_budget), by_micro_batch)
    best = result.best
    assert best is not None and best.own and best.label == "dp 1 mbs 8 budget 0.3"
    assert any(
        effect.setting == "recompute none" and effect.instead_of == "recompute budget 0.3"
        for effect in result.effects
    )
    assert result.recipe_file and load_recipe(result.recipe_file).layout == best.layout
    assert best.layout.recompute_budget == 0.3


@pytest.mark.parametrize("name", ["../x", "last", "a b", ""])
def test_a_name_that_cannot_be_a_folder_is_refused(bench: Bench, name: str):
    with pytest.raises(UserError):
        new_tuning(options(1, name=name), None, bench.root, ["x"])
