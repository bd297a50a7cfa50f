"""One training on one machine by one evidence has one estimate, whichever verb asks for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.core.layout import Layout
from paceline.estimate.estimates import estimates_of_layouts, estimates_of_runs
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.request import EstimateRequest
from paceline.estimate.single_estimate import estimate
from paceline.layouts.rampup.timing import BatchSteps, RampStage, ramp_context, stage_estimates
from paceline.layouts.search.space import SearchSpace
from paceline.layouts.sweep.prediction import predict
from paceline.layouts.tune.ranking import rank_layouts
from tests.estimate.given import SHIPPED

NATIVE = EstimateRequest("llama31-8b", "H100-SXM", 64, software="torch", native=True)
UNEVEN = replace(NATIVE, recipe="llama31-405b", devices=128)
"""126 layers in 16 stages: the first and the last have one less."""


def laid_out(estimate_request: EstimateRequest, axes: str, batch: int = 128) -> EstimateRequest:
    changes = tuple(f"layout.{axis}" for axis in (*axes.split(), "cp=1", "zero_stage=1"))
    return replace(estimate_request, overrides=(*changes, f"training.global_batch={batch}"))


QUESTIONS = (
    laid_out(NATIVE, "tp=4 pp=4 vp=2 micro_batch=1 sequence_parallel=true"),
    laid_out(NATIVE, "tp=1 pp=8 vp=4 micro_batch=2 recompute=full"),
    laid_out(UNEVEN, "tp=8 pp=16 vp=8 micro_batch=1 sequence_parallel=true", batch=16),
    laid_out(UNEVEN, "tp=4 pp=32 vp=4 micro_batch=1 sequence_parallel=true", batch=8),
)
SMALL = SearchSpace(micro_batches=(1,), zero_stages=(1,), recompute=("none", "full"), max_cp=1)


@pytest.mark.parametrize("estimate_request", QUESTIONS)
def test_estimate_tune_sweep_and_ramp_up_say_the_same(estimate_request: EstimateRequest):
    spec, alone = estimate_request.spec, estimate(estimate_request, shipped_evidence())
    expected = (
        alone.step_time_s,
        alone.low_s,
        alone.high_s,
        alone.memory_bytes.device_used,
        alone.p_oom,
    )

    (sweep,) = predict([spec], SHIPPED)
    figures = tuple(sweep.model_dump(exclude={"memory"}).values())
    assert figures == pytest.approx(expected, rel=1e-12)

    ranking = rank_layouts(estimate_request, shipped_evidence(), SMALL, top=1000)
    rows = [row for row in ranking.layouts if row.layout == spec.layout]
    assert rows and ranking.recipe_layout
    for row in (*rows, ranking.recipe_layout):
        figures = (row.step_time_s, row.low_s, row.high_s, row.memory_bytes, row.p_oom)
        assert figures == pytest.approx(expected, rel=1e-12)

    stage = RampStage((BatchSteps(spec.training.global_batch, None),))
    nodes = spec.cluster.nodes
    ramp = stage_estimates(
        ramp_context(estimate_request, shipped_evidence()), [spec.layout], stage, nodes
    ).simulated()
    columns = (ramp.step_s, *ramp.interval_s, ramp.memory_bytes, ramp.p_oom)
    assert [column[0] for column in columns] == pytest.approx(expected, rel=1e-12)


def test_the_closed_form_would_not_have_said_it():
    estimate_request = QUESTIONS[-2]
    spec, machine = estimate_request.spec, estimate_request.machine
    closed = estimates_of_layouts(
        spec, machine, shipped_evidence(), [spec.layout], estimate_request.resolved_software
    )
    assert closed.step_time_s[0] != pytest.approx(closed.simulated().step_time_s[0], rel=1e-3)


def test_tensor_ranks_pad_the_vocabulary_of_ranked_layouts_too():
    gpt = EstimateRequest("gpt-1b3", "A100-80GB", 64)
    estimate_request = laid_out(gpt, "tp=8 pp=1 micro_batch=1 sequence_parallel=true")
    alone = estimate(estimate_request, shipped_evidence())
    recipe_has = laid_out(gpt, "tp=1 pp=1 micro_batch=1")
    ranked = rank_layouts(recipe_has, shipped_evidence(), SMALL, top=1000).layouts
    (row,) = (row for row in ranked if row.layout == estimate_request.spec.layout)
    assert row.memory_bytes == alone.memory_bytes.device_used
    assert row.step_time_s == pytest.approx(alone.step_time_s, rel=1e-12)


def test_picked_rows_are_those_of_all():
    spec, machine = NATIVE.spec_of_any_layout, NATIVE.machine
    layouts = [Layout(zero_stage=stage, recompute="full") for stage in (0, 1, 2, 3)]
    every = estimates_of_layouts(spec, machine, shipped_evidence(), layouts)
    picked = every.pick(np.array([3, 1]))
    assert picked.step_time_s.tolist() == every.step_time_s[[3, 1]].tolist()
    assert picked.p_oom.tolist() == every.p_oom[[3, 1]].tolist()
    assert np.allclose(picked.interval_s[0], every.interval_s[0][[3, 1]], rtol=1e-12)


def test_the_recipes_own_memory_limit_counts_in_an_estimate():
    estimate_request = QUESTIONS[0]
    limit = 0.9 * estimate(estimate_request, shipped_evidence()).memory_bytes.allocated
    held = replace(
        estimate_request, overrides=(*estimate_request.overrides, f"memory_limit_bytes={limit}")
    )
    assert estimate(estimate_request, shipped_evidence()).p_oom == pytest.approx(0, abs=1e-3)
    assert (estimate(held, shipped_evidence()).p_oom or 0) > 0.5


def test_machines_of_runs_are_their_own():
    spec, machine = QUESTIONS[0].spec, NATIVE.machine
    slow = replace(machine, intra_bytes_per_s=machine.intra_bytes_per_s / 4)
    both = estimates_of_runs([spec, spec], [machine, slow], shipped_evidence())
    assert both.step_time_s[1] > 1.05 * both.step_time_s[0]
