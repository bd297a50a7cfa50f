"""Which combinations run, in which order, and why others do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import UserError
from paceline.estimate.calibrate.lookup import FileEvidence
from paceline.estimate.estimates import MAX_P_OOM_TO_RUN
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.model.case import Implementation
from paceline.layouts.sweep.plan import Combination, Sweep, SweepOptions, dimensions, new_sweep
from paceline.machines.placement import Request
from paceline.machines.probe import inventory
from tests.estimate.given import SHIPPED
from tests.layouts.sweep.test_prediction import calibrated

V100 = """
name: study
device: V100-SXM2-32GB
nodes: 2
devices_per_node: 4
launcher: slurm
"""


@pytest.fixture(autouse=True)
def a_short_look_at_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "BUSY_SAMPLE_S", 0.001)


def planned(
    recipe: str = "tiny-gpt",
    *,
    place: dict[str, Any] | None = None,
    prune: bool = True,
    name: str | None = None,
    prune_above: float = MAX_P_OOM_TO_RUN,
    stack: Implementation | None = None,
    sets: tuple[str, ...] = (),
    **named: str,
) -> Sweep:
    varied, fixed = dimensions(named, sets)
    request = Request(recipe, overrides=fixed, **(place or {"devices": 4}))
    options = SweepOptions(
        request, varied, name=name, prune=prune, prune_above=prune_above, stack=stack
    )
    return new_sweep(options, SHIPPED)


def labels(choices: list[Combination]) -> list[str]:
    return [" ".join(choice.settings.values()) for choice in choices]


def labelled(sweep: Sweep) -> list[tuple[str, Combination]]:
    return [(" ".join(choice.settings.values()), choice) for choice in sweep.choices]


def running(sweep: Sweep) -> list[Combination]:
    return [choice for choice in sweep.choices if choice.runs]


def test_where_nothing_can_be_predicted_small_comes_first_and_tensor_parallelism_last():
    sweep = planned(tp="2,1", pp="2,1", mbs="2,1")
    assert labels(running(sweep)) == [
        "1 1 1",
        "1 1 2",
        "1 2 1",
        "1 2 2",
        "2 1 1",
        "2 1 2",
        "2 2 1",
        "2 2 2",
    ]
    assert not any(choice.prediction for choice in sweep.choices)


def test_another_model_is_no_faster_layout(tmp_path: Path):
    (tmp_path / "study.yaml").write_text(V100)
    sweep = planned(
        "gpt-1b3",
        place={"cluster": str(tmp_path / "study.yaml")},
        sets=("model.num_layers=2,24",),
        mbs="4,8",
    )
    times = [choice.prediction.step_time_s for choice in sweep.choices if choice.prediction]
    assert len(running(sweep)) == 4 and max(times) > 4 * min(times)


def test_what_cannot_run_is_listed_last_with_the_reason():
    sweep = planned(tp="1,3", mbs="1,3")
    refused = {" ".join(c.settings.values()): c.refusal for c in sweep.choices if not c.runs}
    assert labels(running(sweep)) == ["1 1"] and len(refused) == 3
    assert "does not divide 4 devices" in (refused["3 1"] or "")
    assert "is not a multiple of dp 4 x micro_batch 3" in (refused["1 3"] or "")
    assert [choice.runs for choice in sweep.choices] == [True, False, False, False]


def test_a_value_that_its_field_does_not_take_is_bad_input_and_no_row():
    with pytest.raises(UserError, match="--recompute some: 'some' is not one of"):
        planned(recompute="none,some")
    with pytest.raises(UserError, match="recipe 'tiny-gtp'"):
        planned("tiny-gtp", tp="1,2")


def test_a_wrong_value_is_told_of_the_option_that_was_typed():
    with pytest.raises(UserError) as wrong:
        planned(tp="0,1", sets=("steps=8",))
    assert str(wrong.value) == "--tp 0: 0 is too small; allowed: a number above 0"
    with pytest.raises(UserError) as wrong:
        planned(sets=("tp=0,1", "steps=8"))
    assert str(wrong.value) == "--set layout.tp=0: 0 is too small; allowed: a number above 0"


def test_all_run_on_as_many_devices_as_the_largest_layout_takes():
    sweep = planned(place={"device": "cpu"}, tp="1,2", pp="1,2")
    assert {choice.plan.spec.world_size for choice in running(sweep) if choice.plan} == {4}
    varied = planned(place={"device": "cpu"}, sets=("devices=1,2",))
    assert {choice.plan.spec.world_size for choice in running(varied) if choice.plan} == {1, 2}


def test_the_batch_does_not_grow_in_a_sweep_unless_that_is_asked_for():
    sweep = planned("gpt-1b3-tiny", tp="1,2")
    assert any("without the recipe's ramp-up" in notice for notice in sweep.notices)
    assert all(c.plan.spec.training.ramp_up is None for c in running(sweep) if c.plan)
    kept = planned("gpt-1b3-tiny", tp="1,2", sets=("training.ramp_up.samples=48",))
    assert all(c.plan.spec.training.ramp_up for c in running(kept) if c.plan)
    assert not any("ramp-up" in notice for notice in kept.notices)


def test_two_ways_to_write_the_same_run_give_one_run():
    sweep = planned(sets=("lr=1e-3,0.001",))
    assert len(running(sweep)) == 1
    assert [choice.refusal for choice in sweep.choices] == [None, "runs the same as another"]


def on_v100(tmp_path: Path, **named: Any) -> Sweep:
    path = tmp_path / "study.yaml"
    path.write_text(V100)
    return planned("gpt-1b3", place={"cluster": str(path)}, **named)


def test_on_devices_of_the_catalog_the_fastest_expected_runs_first(tmp_path: Path):
    sweep = on_v100(tmp_path, tp="1,2", pp="1,2,4", mbs="1,2,4", recompute="none,full")
    safe = [c.prediction for c in running(sweep) if c.prediction and c.prediction.p_oom <= 0.5]
    times = [prediction.step_time_s for prediction in safe]
    assert len(times) > 20 and times == sorted(times)
    first = running(sweep)[0]
    assert first.settings["layout.recompute"] == "none" and first.settings["layout.tp"] == "1"


def test_what_may_run_out_of_memory_runs_last_and_what_surely_does_is_pruned(tmp_path: Path):
    of = {"mbs": "1,2,4,8,16", "recompute": "full,none", "sets": ("zero_stage=0",)}
    of |= {"prune_above": 0.7}
    sweep = on_v100(tmp_path, **of)
    odds = [c.prediction.p_oom > 0.5 for c in running(sweep) if c.prediction]
    assert odds == sorted(odds)
    pruned = [choice for choice in sweep.choices if choice.prune_reason]
    assert pruned and all("OOM probability" in (choice.prune_reason or "") for choice in pruned)
    everything = on_v100(tmp_path, **of, prune=False)
    assert len(running(everything)) == len(running(sweep)) + len(pruned)


def test_the_row_of_the_study_that_barely_ran_is_no_longer_lost(tmp_path: Path):
    """The 1.3B study's 16 GB nodes: PP 1, micro-batch 1 ran at 29 s, "borderline OOM"."""
    path = tmp_path / "study.yaml"
    path.write_text(V100.replace("32GB", "16GB"))
    of = {"place": {"cluster": str(path)}, "pp": "1,2,4,8", "mbs": "1,4"}
    own, megatron = planned("gpt-1b3", **of), planned("gpt-1b3", **of, stack="softmax")
    rows = [next(c for c in labelled(sweep) if c[0] == "1 1")[1] for sweep in (own, megatron)]
    # The native trainer keeps fp32 weights and gradients: 20 GiB of the 15.8 that there are.
    assert rows[1].runs and (rows[0].prune_reason or "").startswith("OOM probability")
    expected = rows[1].prediction
    assert expected and expected.memory == "borderline" and 20 < expected.step_time_s < 38
    strict = planned("gpt-1b3", **of, prune_above=0.5)
    pruned = [choice for choice in strict.choices if choice.prune_reason]
    assert pruned and all("above --prune-above 0.5" in (c.prune_reason or "") for c in pruned)
    assert all(choice.prediction and choice.prediction.p_oom > 0.5 for choice in pruned)


def test_a_sweep_of_the_same_recipe_has_the_same_name_and_groups_by_content():
    first, longer = planned(mbs="1,2"), planned(mbs="1,2,4")
    assert first.name == longer.name and first.name.startswith("tiny-gpt-sweep-")
    others = [
        planned(pp="1,2"),
        planned(mbs="1,2", sets=("steps=9",)),
        planned("tiny-llama", mbs="1,2"),
    ]
    assert len({first.name, *(sweep.name for sweep in others)}) == 4
    groups = [[s.group(c.plan) for c in running(s) if c.plan] for s in (first, longer)]
    assert groups[0] == groups[1][:2] and len({*groups[1]}) == 3


@pytest.mark.parametrize("name", ["a/b", "last", "", ".x"])
def test_a_name_that_is_no_folder_is_refused(name: str):
    with pytest.raises(UserError, match="is not a valid name"):
        planned(mbs="1,2", name=name)


def test_layouts_are_all_compiled_or_none_unless_that_varies():
    def compiled(schedules: str, *sets: str) -> set[str]:
        sets = (
            "training.steps=100000",
            f"layout.schedule={schedules}",
            "layout.micro_batch=2",
            *sets,
        )
        sweep = planned("tiny-llama", place={"devices": 2}, sets=sets, pp="2")
        return {choice.plan.spec.training.compile for choice in sweep.choices if choice.plan}

    assert compiled("gpipe,1f1b") == {"blocks"}
    assert compiled("1f1b,zero-bubble") == {"none"}
    assert compiled("1f1b", "training.compile=none,blocks") == {"none", "blocks"}


def test_a_calibration_of_another_kind_of_device_is_refused():
    card = calibrated(2, 1).model_copy(update={"kind": "cuda", "device": "a card"})
    given = FileEvidence(Path("card.json"), shipped_evidence(), card)
    options = SweepOptions(Request("tiny-gpt", devices=2, device="cpu"), ())
    with pytest.raises(UserError, match=r"card\.json: was measured on a card and does not"):
        new_sweep(options, given)
