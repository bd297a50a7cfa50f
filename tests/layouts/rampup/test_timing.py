"""What a stage takes in many layouts."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.errors import UserError
from paceline.core.layout import Layout
from paceline.core.layout_checks import layout_problems, native_problems
from paceline.core.parallel_run import ParallelRun
from paceline.core.pipeline import bubble_fraction
from paceline.estimate.fit.evidence import shipped
from paceline.estimate.request import EstimateRequest
from paceline.estimate.single_estimate import estimate
from paceline.layouts.rampup.timing import RampStage, Stretch, problems, runnable, setting_of, timed
from paceline.layouts.search.space import Space
from tests.layouts.rampup.study import question, setting

SPACE = Space(most_tp=2, most_cp=1, micro_batches=(1, 2), zero_stages=(1,))
WHOLE = RampStage((Stretch(512, None),))


def test_a_measured_step_lies_in_the_interval():
    layouts = [Layout(zero_stage=1), Layout(zero_stage=1, recompute="full"), Layout(pp=2)]
    estimates = timed(setting(), layouts, WHOLE, 2)
    for row, measured_s in enumerate((23, 29, 23)):
        low, high = estimates.interval_s
        assert low[row] < measured_s < high[row]


def test_the_bubble_is_that_of_the_schedule():
    layouts = [Layout(pp=pp, zero_stage=1, recompute="full") for pp in (1, 2, 4)]
    estimates = timed(setting(), layouts, RampStage((Stretch(32, None),)), 4)
    expected = [bubble_fraction("1f1b", pp, 1, 2 * pp) for pp in (1, 2, 4)]
    assert estimates.bubble == pytest.approx(expected, abs=0.06)


def test_a_stage_of_several_batches_takes_the_mean_of_their_steps():
    layouts = [Layout(zero_stage=1)]
    stretches = (Stretch(64, 100), Stretch(96, 300))
    both = timed(setting(), layouts, RampStage(stretches), 4)
    single = [timed(setting(), layouts, RampStage((stretch,)), 4) for stretch in stretches]
    mean = (100 * single[0].step_s + 300 * single[1].step_s) / 400
    assert both.step_s == pytest.approx(mean)
    assert both.memory_bytes == pytest.approx(single[1].memory_bytes)
    assert single[0].bubble == 0 < single[0].exchange < 0.5


def test_the_fastest_is_the_fastest_of_those_that_fit():
    stage = RampStage((Stretch(128, None),))
    layouts = runnable(setting("V100-16GB"), stage, 2, SPACE)
    estimates = timed(setting("V100-16GB"), layouts, stage, 2)
    fastest, every = estimates.fastest(), estimates.followed()
    assert fastest is not None and len(fastest.layouts) == 1 and fastest.p_oom[0] <= 0.5
    fits = np.flatnonzero(every.p_oom <= 0.5)
    # Sums over one layout and over many may differ in the last bit.
    assert fastest.step_s[0] == pytest.approx(every.step_s[fits].min(), rel=1e-12)
    assert fastest.step_s[0] > every.step_s.min()


def test_none_is_fastest_where_none_fits():
    layouts = [Layout(micro_batch=64)]
    assert timed(setting("V100-16GB"), layouts, WHOLE, 1).fastest() is None


def test_what_is_runnable_runs_every_batch_of_the_stage():
    stage = RampStage((Stretch(64, None), Stretch(96, None)))
    layouts, shape = runnable(setting(), stage, 4, SPACE), setting().spec.model
    assert layouts
    for layout in layouts:
        for batch in (64, 96):
            assert not layout_problems(ParallelRun(layout, shape, 16, batch, 2048))
            assert not native_problems(
                ParallelRun(layout, shape, 16, batch, dtype="fp16", device="cuda")
            )
    alone = runnable(setting(), RampStage((Stretch(64, None),)), 16, SPACE)
    assert Layout(zero_stage=1) in alone
    assert Layout(zero_stage=1) not in runnable(setting(), stage, 16, SPACE)


def test_the_trainers_own_rules_hold_for_its_recipes():
    uneven, few = Layout(pp=4, vp=2), Layout(pp=4)
    assert "cannot be split into 4 equal rounds" in problems(setting(), uneven, 9 * 32, 16)[0]
    assert not problems(setting(), uneven, 8 * 32, 16)
    assert not problems(setting(), few, 32, 16)


def test_it_is_the_estimate_of_the_same_run():
    whole = EstimateRequest("llama31-8b", "H100", 64, overrides=("training.global_batch=256",))
    layout = setting_of(whole, shipped()).recipe.layout
    stage = RampStage((Stretch(256, None),))
    estimates = timed(setting_of(whole, shipped()), [layout], stage, 8).followed()
    assert estimates.step_s[0] == pytest.approx(estimate(whole, shipped()).step_time_s)


def test_a_recipe_whose_own_layout_does_not_fit_the_devices_is_no_obstacle():
    large = setting_of(EstimateRequest("llama31-405b", "H100", 1, devices_per_node=1), shipped())
    assert large.recipe.layout.model_devices > 1 and large.spec.layout == large.recipe.layout


def test_a_device_without_data_is_refused():
    with pytest.raises(UserError):
        setting_of(question("abacus"), shipped())
