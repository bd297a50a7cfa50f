"""Budgets between no recomputation and a full one: which cuts take them, and how much they keep."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.layout import Layout
from paceline.core.run import RunSpec
from paceline.estimate.estimates import MAX_P_OOM_TO_FIT, Estimates, estimates_of_layouts
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.request import EstimateRequest
from paceline.layouts.search.memory import (
    BUDGETS,
    largest_fitting_budgets,
    layouts_supporting_budgets,
    splits_needing_recompute,
    with_recompute_budget,
)

FULL = Layout(zero_stage=3, micro_batch=2, recompute="full")
NONE = Layout(zero_stage=3, micro_batch=2)


def test_a_cut_takes_budgets_where_it_fits_with_full_recomputation_alone():
    both_fit = [Layout(), Layout(recompute="full")]
    neither = [Layout(tp=2), Layout(tp=2, recompute="full")]
    alone = [Layout(pp=2, recompute="full"), Layout(recompute="selective")]
    layouts = [*both_fit, *neither, *alone, FULL, NONE]
    odds = np.array([0.4, 0.0, 1.0, 0.6, 0.1, 0.9, 0.5, 0.51])
    assert splits_needing_recompute(layouts, odds, 0.5) == [(7, 6)]
    assert splits_needing_recompute(layouts, odds, 0.05) == [(0, 1)]


def test_of_the_budgets_that_fit_the_largest_is_kept():
    def odds(layouts: list[Layout]) -> np.ndarray:
        most = np.array([0.35 if layout.tp == 1 else 0.0 for layout in layouts])
        return (np.array([layout.recompute_budget or 0.0 for layout in layouts]) > most) * 1.0

    found = largest_fitting_budgets([FULL, Layout(tp=2, recompute="full")], odds, 0.5)
    assert found == [with_recompute_budget(FULL, 0.3)]
    assert found[0] == FULL.model_copy(update={"recompute": "budget", "recompute_budget": 0.3})
    assert largest_fitting_budgets([], odds, 0.5) == []


@pytest.fixture(scope="module")
def spec() -> RunSpec:
    return EstimateRequest("llama31-8b", "H100", 8).spec_of_any_layout


@pytest.mark.parametrize("axes", [{}, {"pp": 4, "vp": 2}, {"tp": 2, "sequence_parallel": True}])
def test_a_larger_budget_takes_no_longer_and_needs_no_less(spec: RunSpec, axes: dict[str, object]):
    full = FULL.model_copy(update=axes)
    layouts = [
        full,
        *(with_recompute_budget(full, share) for share in BUDGETS),
        NONE.model_copy(update=axes),
    ]
    estimates = _estimates(spec, layouts)
    assert (np.diff(estimates.step_time_s) <= 0).all() and (np.diff(estimates.p_oom) >= 0).all()
    used = estimates.memory.device_used
    assert (np.diff(used) >= 0).all() and used[-1] > 1.2 * used[0]
    assert estimates.step_time_s[0] > 1.1 * estimates.step_time_s[-1]


def test_the_largest_budget_that_fits_uses_the_devices_memory(spec: RunSpec):
    (found,) = largest_fitting_budgets(
        [FULL], lambda some: _estimates(spec, some).p_oom, MAX_P_OOM_TO_FIT
    )
    more = with_recompute_budget(FULL, (found.recompute_budget or 0.0) + 0.1)
    assert _estimates(spec, [found, more]).fits.tolist() == [True, False]


def test_only_the_native_trainer_takes_them_and_not_in_every_layout(spec: RunSpec):
    bubbles = Layout(pp=2, schedule="zero-bubble", recompute="full")
    assert layouts_supporting_budgets(spec, [FULL, bubbles]) == [FULL]
    other = spec.model_copy(update={"engine": "megatron"})
    assert layouts_supporting_budgets(other, [FULL]) == []
    flux = EstimateRequest("flux1-schnell", "H100", 8).spec_of_any_layout
    assert layouts_supporting_budgets(flux, [FULL]) == []


def _estimates(spec: RunSpec, layouts: list[Layout]) -> Estimates:
    question = EstimateRequest("llama31-8b", "H100", 8)
    return estimates_of_layouts(
        spec, question.machine, shipped_evidence(), layouts, question.resolved_software
    )
