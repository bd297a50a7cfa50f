"""What a stage takes in many layouts."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.errors import UserError
from paceline.core.layout import Layout
from paceline.core.layout_checks import layout_problems, native_problems
from paceline.core.parallel_run import ParallelRun
from paceline.core.pipeline import bubble_fraction
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.request import EstimateRequest
from paceline.estimate.single_estimate import estimate
from paceline.layouts.rampup.timing import (
    BatchSteps,
    RampStage,
    layout_refusals,
    ramp_context,
    runnable_layouts,
    stage_estimates,
)
from paceline.layouts.search.space import SearchSpace
from tests.layouts.rampup.study import question, setting

SPACE = SearchSpace(max_tp=2, max_cp=1, micro_batches=(1, 2), zero_stages=(1,))
WHOLE = RampStage((BatchSteps(512, None),))


def test_a_measured_step_lies_in_the_interval():
    layouts = [Layout(zero_stage=1), Layout(zero_stage=1, recompute="full"), Layout(pp=2)]
    estimates = stage_estimates(setting(), layouts, WHOLE, 2)
    for row, measured_s in enumerate((23, 29, 23)):
        low, high = estimates.interval_s
        assert low[row] < measured_s < high[row]


def test_the_bubble_is_that_of_the_schedule():
    layouts = [Layout(pp=pp, zero_stage=1, recompute="full") for pp in (1, 2, 4)]
    estimates = stage_estimates(setting(), layouts, RampStage((BatchSteps(32, None),)), 4)
    expected = [bubble_fraction("1f1b", pp, 1, 2 * pp) for pp in (1, 2, 4)]
    assert estimates.bubble_share == pytest.approx(expected, abs=0.06)


def test_a_stage_of_several_batches_takes_the_mean_of_their_steps():
    layouts = [Layout(zero_stage=1)]
    parts = (BatchSteps(64, 100), BatchSteps(96, 300))
    both = stage_estimates(setting(), layouts, RampStage(parts), 4)
    single = [stage_estimates(setting(), layouts, RampStage((stretch,)), 4) for stretch in parts]
    mean = (100 * single[0].step_s + 300 * single[1].step_s) / 400
    assert both.step_s == pytest.approx(mean)
    assert both.memory_bytes == pytest.approx(single[1].memory_bytes)
    assert single[0].bubble_share == 0 < single[0].exchange_share < 0.5


def test_the_fastest_is_the_fastest_of_those_that_fit():
    stage = RampStage((BatchSteps(128, None),))
    layouts = runnable_layouts(setting("V100-16GB"), stage, 2, SPACE)
    estimates = stage_estimates(setting("V100-16GB"), layouts, stage, 2)
    fastest, every = estimates.fastest(), estimates.simulated()
    assert fastest is not None and len(fastest.layouts) == 1 and fastest.p_oom[0] <= 0.5
    fits = np.flatnonzero(every.p_oom <= 0.5)
    # Sums over one layout and over many may differ in the last bit.
    assert fastest.step_s[0] == pytest.approx(every.step_s[fits].min(), rel=1e-12)
    assert fastest.step_s[0] > every.step_s.min()


def test_none_is_fastest_where_none_fits():
    layouts = [Layout(micro_batch=64)]
    assert stage_estimates(setting("V100-16GB"), layouts, WHOLE, 1).fastest() is None


def test_what_is_runnable_runs_every_batch_of_the_stage():
    stage = RampStage((BatchSteps(64, None), BatchSteps(96, None)))
    layouts, shape = runnable_layouts(setting(), stage, 4, SPACE), setting().spec.model
    assert layouts
    for layout in layouts:
        for batch in (64, 96):
            assert not layout_problems(ParallelRun(layout, shape, 16, batch, 2048))
            assert not native_problems(
                ParallelRun(layout, shape, 16, batch, dtype="fp16", device="cuda")
            )
    alone = runnable_layouts(setting(), RampStage((BatchSteps(64, None),)), 16, SPACE)
    assert Layout(zero_stage=1) in alone
    assert Layout(zero_stage=1) not in runnable_layouts(setting(), stage, 16, SPACE)


def test_the_trainers_own_rules_hold_for_its_recipes():
    uneven, few = Layout(pp=4, vp=2), Layout(pp=4)
    assert (
        "cannot be split into 4 equal rounds" in layout_refusals(setting(), uneven, 9 * 32, 16)[0]
    )
    assert not layout_refusals(setting(), uneven, 8 * 32, 16)
    assert not layout_refusals(setting(), few, 32, 16)


def test_it_is_the_estimate_of_the_same_run():
    whole = EstimateRequest("llama31-8b", "H100", 64, overrides=("training.global_batch=256",))
    layout = ramp_context(whole, shipped_evidence()).recipe.layout
    stage = RampStage((BatchSteps(256, None),))
    estimates = stage_estimates(
        ramp_context(whole, shipped_evidence()), [layout], stage, 8
    ).simulated()
    assert estimates.step_s[0] == pytest.approx(estimate(whole, shipped_evidence()).step_time_s)


def test_a_recipe_whose_own_layout_does_not_fit_the_devices_is_no_obstacle():
    large = ramp_context(
        EstimateRequest("llama31-405b", "H100", 1, devices_per_node=1), shipped_evidence()
    )
    assert large.recipe.layout.model_devices > 1 and large.spec.layout == large.recipe.layout


def test_a_device_without_data_is_refused():
    with pytest.raises(UserError):
        ramp_context(question("abacus"), shipped_evidence())
