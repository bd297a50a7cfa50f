"""What can be tried: everything that the trainer runs, nothing that it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import UserError
from paceline.core.layout import Layout
from paceline.engines import engine
from paceline.estimate.calibrate.calibration import cpu_machine
from paceline.estimate.calibrate.lookup import FileEvidence
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.memory.device_memory import memory
from paceline.estimate.memory.framework import NATIVE_CPU
from paceline.estimate.model.machine import machine
from paceline.layouts.search.space import SearchSpace
from paceline.layouts.tune import candidates
from paceline.layouts.tune.tuning import SCHEDULES
from paceline.machines.placement import Request
from paceline.machines.probe import inventory
from tests.estimate.calibrate.test_calibration import calibration
from tests.layouts.sweep.test_prediction import calibrated

SPACE = SearchSpace(micro_batches=(1, 2), recompute=("none", "full"), schedules=SCHEDULES)


@pytest.fixture(autouse=True)
def nothing_measured_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(inventory, "BUSY_SAMPLE_S", 0.001)
    monkeypatch.setattr(candidates, "probed_machine", lambda *_: None)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def planned(*overrides: str, recipe: str = "tiny-llama") -> candidates.Candidates:
    return candidates.find_candidates(Request(recipe, None, overrides, 2, "cpu"), None, SPACE)


def test_all_of_them_can_be_planned_and_run():
    tiny = planned()
    kinds = {
        (layout.tp, layout.pp, layout.cp, layout.vp, layout.schedule) for layout in tiny.layouts
    }
    assert {
        (2, 1, 1, 1, "1f1b"),
        (1, 1, 2, 1, "1f1b"),
        (1, 2, 1, 2, "1f1b"),
        (1, 2, 1, 1, "gpipe"),
        (1, 2, 1, 1, "zero-bubble"),
    } <= kinds
    trainer = engine(tiny.spec.engine)
    for row, layout in enumerate(tiny.layouts):
        spec = tiny.spec.model_copy(update={"layout": layout})
        assert trainer.unsupported(spec) == []
        if row % 9 == 0:
            plan = tiny.plan(row)
            assert plan.spec.layout == layout and plan.spec.key == spec.key


def test_no_layout_comes_twice_and_zero_needs_copies_to_spread():
    tiny = planned()
    assert len(set(tiny.layouts)) == len(tiny.layouts)
    assert all(
        layout.zero_stage == 0 for layout in tiny.layouts if layout.tp == 2 or layout.pp == 2
    )


def test_the_recipes_own_layout_is_one_of_them():
    tiny = planned("layout.cp=2", "layout.cp_exchange=ring")
    assert tiny.recipe_row is not None and tiny.layouts[tiny.recipe_row].cp_exchange == "ring"
    assert planned("layout.micro_batch=5").recipe_row is None


def test_the_recipes_own_micro_batch_is_tried_in_other_layouts():
    sizes = {(layout.micro_batch, layout.pp) for layout in planned("layout.micro_batch=4").layouts}
    assert sizes == {(size, pp) for size in (1, 2, 4) for pp in (1, 2)}


def test_what_will_not_fit_leaves_room_for_what_may(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(candidates, "probed_machine", lambda *_: cpu_machine(calibration(), 2))
    small = ("memory_limit_bytes=45e6", "dtype=fp32")
    every = planned(*small, recipe="gpt-1b3-tiny")
    fitting = int(every.likely_to_fit.sum())
    monkeypatch.setattr(candidates, "MAX_CANDIDATES", fitting)
    few = planned(*small, recipe="gpt-1b3-tiny")
    assert 0 < fitting < len(every.layouts) and int(few.likely_to_fit.sum()) == fitting
    beyond = len(every.layouts) - len(few.layouts)
    assert few.num_beyond == beyond
    assert any(notice.startswith(f"{beyond} slower layouts dropped") for notice in few.notices)


def test_where_memory_lacks_without_recomputation_alone_budgets_are_candidates(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(candidates, "probed_machine", lambda *_: cpu_machine(calibration(), 2))
    roomy = planned("dtype=fp32", recipe="gpt-1b3-tiny")
    assert not any(layout.recompute == "budget" for layout in roomy.layouts)
    tight = planned("memory_limit_bytes=80e6", "dtype=fp32", recipe="gpt-1b3-tiny")
    rows = [row for row, layout in enumerate(tight.layouts) if layout.recompute == "budget"]
    assert rows and (tight.p_oom[rows] <= 0.5).all()
    assert not any(tight.layouts[row].schedule == "zero-bubble" for row in rows)
    plan = tight.plan(rows[0])
    assert plan.spec.layout == tight.layouts[rows[0]]


def test_too_few_steps_for_any_figure_are_refused():
    with pytest.raises(UserError, match="4 steps: is too few for a result"):
        planned("steps=4")


def test_layouts_are_compared_at_the_whole_batch():
    ramped = planned(recipe="gpt-1b3-tiny")
    assert ramped.spec.training.ramp_up is None and any(
        "ramp-up" in notice for notice in ramped.notices
    )


def test_settings_give_back_the_layout():
    layout = Layout(
        tp=2,
        zero_stage=3,
        dp_shard=2,
        recompute="budget",
        recompute_budget=0.3,
        sequence_parallel=True,
    )
    request = candidates.with_layout(Request("tiny-llama"), layout)
    from paceline.files.recipe import load_recipe

    assert load_recipe("tiny-llama", None, request.overrides).layout == layout


def test_without_rates_every_layout_is_alike():
    tiny = planned()
    assert tiny.x is None and np.unique(tiny.seconds).tolist() == [1.0] and not tiny.p_oom.any()


def test_a_file_of_a_processor_brings_its_rates_and_one_of_a_card_is_refused():
    request = Request("tiny-llama", None, ("dtype=fp32",), 2, "cpu")
    own = calibrated(2, max(1, inventory.cpu()["usable_cores"] // 2))
    card = own.model_copy(update={"kind": "cuda", "device": "a card"})
    other = own.model_copy(update={"dtype": "bf16"})
    by_file, by_card, in_bf16 = (
        FileEvidence(Path("f"), shipped_evidence(), f) for f in (own, card, other)
    )
    assert candidates.find_candidates(request, None, SPACE).x is None
    assert candidates.find_candidates(request, by_file, SPACE).x is not None
    with pytest.raises(UserError, match="f: was measured on a card and does not apply to cpu"):
        candidates.find_candidates(request, by_card, SPACE)
    with pytest.raises(
        UserError, match="was measured in bf16, but the training run uses fp32; allowed"
    ):
        candidates.find_candidates(request, in_bf16, SPACE)


def test_the_memory_is_that_of_the_trainer_on_cpus(monkeypatch: pytest.MonkeyPatch):
    processor = cpu_machine(calibration(), 2)
    monkeypatch.setattr(candidates, "probed_machine", lambda *_: processor)
    limited = planned("memory_limit_bytes=230e6", "dtype=fp32", recipe="gpt-1b3-tiny")
    assert limited.x is not None
    assert np.array_equal(limited.memory_bytes, memory(limited.x, NATIVE_CPU).device_used)
    assert limited.likely_to_fit.any() and limited.memory_bytes.min() < 230e6


def test_the_devices_own_context_counts(monkeypatch: pytest.MonkeyPatch):
    usual = cpu_machine(calibration(), 2)
    large = replace(usual, device=usual.device.model_copy(update={"context_bytes": 7e7}))
    used: list[np.ndarray] = []
    for device in (usual, large):
        monkeypatch.setattr(candidates, "probed_machine", lambda *_, m=device: m)
        used.append(planned("dtype=fp32", recipe="gpt-1b3-tiny").memory_bytes)
    assert used[1] - used[0] == pytest.approx(7e7)


def test_a_device_that_emulates_the_dtype_has_no_rates(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(candidates, "probed_machine", lambda *_: machine("V100-32GB"))
    assert planned("dtype=bf16").x is None and planned("dtype=fp32").x is not None


def test_layouts_are_all_compiled_or_none_and_none_is_lost_by_it():
    short, long = planned(), planned("training.steps=100000")
    assert long.spec.training.compile == "none" and long.num_infeasible == short.num_infeasible
    without = replace(SPACE, schedules=("gpipe", "1f1b"))
    request = Request("tiny-llama", None, ("training.steps=100000",), 2, "cpu")
    compiled = candidates.find_candidates(request, None, without)
    assert compiled.spec.training.compile == "blocks"
    assert compiled.plan(0).spec.training.compile == "blocks"
