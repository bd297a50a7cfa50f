"""Plans of a ramp-up: what is chosen for each stage, and what it adds up to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.errors import UserError
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.request import EstimateRequest
from paceline.layouts.rampup.plan import RampOptions, plan_ramp_up, planned_stages, search_space
from paceline.layouts.rampup.timing import doublings, ramp_context
from tests.layouts.rampup.study import planned, setting

STAGES = (32, 64, 128, 256, 512)
OPTIONS = RampOptions(STAGES, max_nodes=16)


def test_every_stage_has_a_layout_that_fits_and_runs_its_batch():
    for device in ("V100-32GB", "V100-16GB"):
        plan = planned(OPTIONS, device)
        assert [stage.batch for stage in plan.stages] == list(STAGES)
        for stage in plan.stages:
            assert stage.nodes <= 16 and stage.devices == 4 * stage.nodes and stage.p_oom <= 0.5
            dp = stage.layout.dp(stage.devices)
            assert stage.batch == dp * stage.layout.micro_batch * stage.micro_batches
            assert stage.low_s < stage.step_time_s < stage.high_s


def test_smaller_memory_asks_for_another_layout():
    large, small = planned(OPTIONS), planned(OPTIONS, "V100-16GB")
    assert large.stages[-1].layout != small.stages[-1].layout
    assert large.stages[-1].step_time_s < small.stages[-1].step_time_s


def test_hours_days_and_efficiency_follow_from_the_steps():
    plan = planned(OPTIONS)
    last = plan.stages[-1]
    for stage in plan.stages:
        assert stage.steps is not None and stage.days is not None and stage.samples is not None
        assert stage.samples == stage.steps * stage.batch
        assert stage.days == pytest.approx(stage.steps * stage.step_time_s / 86_400)
        assert stage.device_hours == pytest.approx(stage.days * 24 * stage.devices)
        assert stage.tokens_per_s == pytest.approx(stage.batch * 2048 / stage.step_time_s)
        per_device = stage.tokens_per_s / stage.devices
        assert stage.efficiency == pytest.approx(per_device / last.tokens_per_s * last.devices)
    assert last.efficiency == 1
    assert plan.days == pytest.approx(sum(stage.days or 0 for stage in plan.stages))
    tokens = sum(stage.samples or 0 for stage in plan.stages) * 2048
    assert tokens == pytest.approx(3.3e11, rel=1e-4)


def test_the_efficiency_that_is_asked_for_decides_on_the_nodes():
    fast, thrifty = (
        planned(replace(OPTIONS, min_efficiency=0)),
        planned(replace(OPTIONS, min_efficiency=1)),
    )
    assert all(stage.nodes == 16 for stage in fast.stages)
    for quick, slow in zip(fast.stages, thrifty.stages, strict=True):
        assert quick.tokens_per_s >= slow.tokens_per_s
        assert quick.tokens_per_s / quick.devices <= slow.tokens_per_s / slow.devices
    assert thrifty.device_hours < fast.device_hours  # type: ignore[operator]


def test_a_chosen_stage_is_the_fastest_alternative_that_is_efficient_enough():
    plan = planned(OPTIONS)
    best = max(
        other.tokens_per_s / other.devices for other in plan.alternatives if other.batch == 512
    )
    for stage in plan.stages:
        others = [other for other in plan.alternatives if other.batch == stage.batch]
        assert {other.nodes for other in others} <= set(doublings(1, 16)) and stage in others
        enough = [other for other in others if other.tokens_per_s / other.devices >= 0.8 * best]
        assert stage.tokens_per_s == max(other.tokens_per_s for other in enough)


def test_a_bubble_is_not_chosen_where_fewer_stages_fit():
    assert all(stage.bubble_share < 0.1 for stage in planned(OPTIONS, "V100-16GB").stages)


def test_stages_that_run_every_batch_divide_each_of_them():
    options = replace(OPTIONS, one_stage_per_batch=True)
    plan = planned(options)
    assert plan.stages[1].batches == (64, 96) and plan.stages[0].batches == (32,)
    assert plan.stages[-1].batches == (512,)
    for stage in plan.stages:
        unit = stage.layout.dp(stage.devices) * stage.layout.micro_batch
        assert all(batch % unit == 0 for batch in stage.batches)
    between = plan.stages[3]
    assert between.batches[-1] == 480 and between.samples
    mean = between.samples / (between.steps or 1)
    assert 256 < mean < 480
    assert between.tokens_per_s == pytest.approx(mean * 2048 / between.step_time_s)


def test_one_vocabulary_for_stages_that_go_on_from_each_other():
    assert search_space(setting(), RampOptions()).max_tp == 4
    assert search_space(setting(), RampOptions(one_stage_per_batch=True)).max_tp == 1
    assert search_space(setting(), RampOptions(max_tp=2)).max_tp == 2
    llama = ramp_context(EstimateRequest("llama31-8b", "H100", 8), shipped_evidence())
    assert search_space(llama, RampOptions(one_stage_per_batch=True)).max_tp == 8


def test_stages_double_where_none_are_given():
    assert [stage.batch for stage in planned_stages(setting(), RampOptions())] == list(STAGES)


def test_a_training_has_an_end():
    with pytest.raises(UserError, match="is not a finite number"):
        planned_stages(setting(), RampOptions(tokens=float("inf")))


def test_a_recipe_without_a_ramp_up_needs_stages_and_samples():
    plain = ramp_context(EstimateRequest("llama31-8b", "H100", 8, tokens=1e9), shipped_evidence())
    with pytest.raises(UserError, match="has no ramp-up"):
        planned_stages(plain, RampOptions())
    with pytest.raises(UserError, match="how long a stage lasts"):
        planned_stages(plain, RampOptions((64, 128)))
    stages = planned_stages(plain, RampOptions((64, 128), samples=(6400,), tokens=8192 * 19_200))
    assert [stage.steps for stage in stages] == [100, 100]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RampOptions((16, 512)), "from 32 to"),
        (RampOptions((64, 32)), "increase"),
        (RampOptions((32, 64), samples=(1, 2, 3)), "3 sample counts"),
    ],
)
def test_stages_that_cannot_be_are_refused(options: RampOptions, message: str):
    with pytest.raises(UserError, match=message):
        planned_stages(setting(), options)


def test_a_model_that_fits_nowhere_is_refused():
    fp16 = ("training.dtype=fp16",)
    question = EstimateRequest("llama31-405b", "V100-16GB", 4, overrides=fp16, devices_per_node=4)
    huge = ramp_context(question, shipped_evidence())
    with pytest.raises(UserError, match="no layout that fits on up to 1 node "):
        plan_ramp_up(huge, RampOptions((32,), max_nodes=1, samples=(100,)))


def test_an_endless_training_has_no_days():
    plan = planned(OPTIONS, "V100-32GB", "training.total_tokens=null")
    assert plan.days is None and plan.stages[-1].days is None and plan.stages[0].days
