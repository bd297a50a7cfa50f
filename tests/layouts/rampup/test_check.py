"""Schedules made by hand: what cannot run, what does not fit, and what runs but is slow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.layout import Layout
from paceline.layouts.rampup.check import (
    MAX_SLOWDOWN,
    CheckedSchedule,
    CheckedStage,
    ScheduleLine,
    check_schedule,
    read_schedule,
)
from paceline.layouts.rampup.plan import RampOptions
from tests.layouts.rampup.study import SCHEDULE_16GB, SCHEDULE_32GB, planned, setting

OPTIONS = RampOptions((32, 64, 128, 256, 512))
FULL = Layout(zero_stage=1, recompute="full")


def study(tmp_path: Path, text: str, device: str, **axes: object) -> CheckedSchedule:
    """One of the study's schedules in the layout that it recommends."""
    path = tmp_path / "schedule.md"
    path.write_text(text)
    schedule = read_schedule(path, FULL.model_copy(update=axes))
    return check_schedule(setting(device), OPTIONS, schedule, planned(OPTIONS, device))


def judged(line: ScheduleLine, device: str = "V100-32GB") -> CheckedStage:
    """The judgement of a single line."""
    return check_schedule(setting(device), OPTIONS, [line], planned(OPTIONS, device)).stages[0]


def test_the_schedule_for_16_gb_nodes_is_feasible_but_half_of_it_is_bubble(tmp_path: Path):
    checked = study(tmp_path, SCHEDULE_16GB, "V100-16GB", pp=2)
    for stage in checked.stages:
        assert stage.verdict == "slow" and stage.plan and stage.plan.micro_batches == 1
        assert 0.35 < stage.plan.bubble_share <= 0.5 and stage.slowdown and stage.slowdown > 1.5
        assert "one micro-batch for 2 pipeline stages" in stage.reasons[0]
        assert stage.best and stage.best.nodes == stage.nodes and stage.best.bubble_share < 0.12
        assert any("on the same nodes" in reason for reason in stage.reasons)
        assert not any("not supported by the native trainer" in reason for reason in stage.reasons)
    plan = planned(OPTIONS, "V100-16GB")
    assert checked.days and plan.days and checked.days > 1.5 * plan.days
    assert (
        checked.device_hours
        and plan.device_hours
        and checked.device_hours > 1.5 * plan.device_hours
    )


def test_a_filled_pipeline_in_the_same_layout_is_not_called_a_bubble():
    filled = judged(ScheduleLine(16, 512, FULL.model_copy(update={"pp": 2})), "V100-16GB")
    assert filled.plan and filled.plan.micro_batches == 16 and filled.plan.bubble_share < 0.1
    assert not any("bubble" in reason for reason in filled.reasons)


def test_the_schedule_for_32_gb_nodes_has_no_pipeline_and_waits_for_gradients(tmp_path: Path):
    checked = study(tmp_path, SCHEDULE_32GB, "V100-32GB", recompute="none")
    for stage in checked.stages:
        assert stage.verdict == "good" and stage.plan and stage.plan.bubble_share == 0
        assert stage.reasons[0].startswith("one micro-batch per replica")
        assert "exposed gradient communication" in stage.reasons[0]
        assert stage.slowdown and stage.slowdown <= MAX_SLOWDOWN


def test_batches_between_the_stages_that_do_not_divide_are_named(tmp_path: Path):
    first, second, third = study(tmp_path, SCHEDULE_32GB, "V100-32GB", recompute="none").stages
    assert not any("divide" in reason for reason in first.reasons)
    assert "batch 96 of the recipe's ramp-up: not divisible by 64" in second.reasons
    assert not any("divide" in reason for reason in third.reasons)


def test_a_layout_whose_sizes_do_not_divide_cannot_run():
    checked = judged(ScheduleLine(16, 32, FULL))
    assert checked.verdict == "cannot run" and checked.plan is None and checked.slowdown is None
    assert "is not a multiple of dp 64" in checked.reasons[0]
    whole = check_schedule(
        setting(),
        OPTIONS,
        [ScheduleLine(16, 32, FULL), ScheduleLine(16, 512, FULL)],
        planned(OPTIONS),
    )
    assert whole.days is None and whole.device_hours is None


def test_a_layout_that_does_not_fit_is_out_of_memory():
    checked = judged(ScheduleLine(2, 512, FULL.model_copy(update={"micro_batch": 64})), "V100-16GB")
    assert checked.verdict == "out of memory" and checked.plan and checked.plan.p_oom > 0.5
    assert "GiB per device" in checked.reasons[0]


@pytest.mark.parametrize("engine", ["native", "megatron"])
def test_a_layout_is_held_against_the_rules_of_its_engine(engine: str):
    native = setting("V100-16GB")
    other = replace(native, spec=native.spec.model_copy(update={"engine": engine}))
    layout = FULL.model_copy(update={"pp": 2, "schedule": "zero-bubble"})
    schedule = [ScheduleLine(16, 128, layout)]
    checked = check_schedule(other, OPTIONS, schedule, planned(OPTIONS, "V100-16GB")).stages[0]
    assert (
        any("not supported by the native trainer" in reason for reason in checked.reasons)
        or engine != "native"
    )
    assert any("zero-bubble" in reason for reason in checked.reasons), checked.reasons


def test_the_plan_itself_is_good():
    plan = planned(OPTIONS, "V100-16GB")
    schedule = [ScheduleLine(stage.nodes, stage.batch, stage.layout) for stage in plan.stages]
    checked = check_schedule(setting("V100-16GB"), OPTIONS, schedule, plan)
    assert {stage.verdict for stage in checked.stages} == {"good"}
    assert checked.days == pytest.approx(plan.days)
