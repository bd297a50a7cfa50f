"""What would help most: every figure's share in the step, and what twice of it brings."""

from __future__ import annotations

from dataclasses import replace
from math import log

import numpy as np
import pytest

from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.fit.interval import Z80
from paceline.estimate.fit.posterior import predict
from paceline.estimate.model.case import cases_of
from paceline.estimate.request import EstimateRequest
from paceline.estimate.run_case import case_of
from paceline.estimate.scenarios import FIGURES, Elasticity, elasticities
from paceline.estimate.single_estimate import estimate

NODES = EstimateRequest("llama31-70b", "H100-SXM", 64, intra_link="450 GB/s", inter_link="50 GB/s")


def by_figure(estimate_request: EstimateRequest) -> dict[str, Elasticity]:
    return {each.figure: each for each in elasticities(estimate_request, shipped_evidence())}


@pytest.mark.parametrize(
    "estimate_request",
    [
        NODES,
        replace(NODES, overrides=("training.dtype=fp8",)),
        EstimateRequest("gpt-1b3", "V100", 64),
        EstimateRequest("opt-350m-sft", "A100", 8, software="torch"),
        EstimateRequest("flux1-schnell", "H100", 64),
        EstimateRequest("llama2-70b-lora", "B200", 8),
    ],
)
def test_all_the_step_is_seconds_at_one_of_the_figures(estimate_request: EstimateRequest):
    answers = elasticities(estimate_request, shipped_evidence())
    assert sum(each.elasticity for each in answers) == pytest.approx(1.0, abs=2e-4)
    assert {each.figure for each in answers} == {figure.name for figure in FIGURES}
    assert [each.elasticity for each in answers] == sorted(
        (each.elasticity for each in answers), reverse=True
    )
    for each in answers:
        assert each.elasticity >= -1e-9 and each.low <= each.elasticity <= each.high


def test_twice_of_a_figure_is_what_an_estimate_with_it_says():
    answers = by_figure(NODES)
    faster = {
        "network bandwidth": replace(NODES, inter_link="100 GB/s"),
        "NVLink domain bandwidth": replace(NODES, intra_link="900 GB/s"),
    }
    for name, estimate_request in faster.items():
        assert answers[name].step_time_if_doubled_s == pytest.approx(
            estimate(estimate_request, shipped_evidence()).step_time_s
        )
    assert (answers["network bandwidth"].value, answers["network bandwidth"].unit) == (50e9, "B/s")
    assert answers["CPU launch overhead"].value is None


def test_the_interval_is_that_of_coefficients_drawn_from_their_posterior():
    fit, x = shipped_evidence().fit(), case_of(NODES.spec, NODES.machine, NODES.resolved_software)
    products = by_figure(NODES)["GEMM throughput"]
    draws = np.random.default_rng(0).multivariate_normal(fit.centre, fit.covariance, size=200)
    one = cases_of([x])
    faster = one.with_numbers(peak_16bit=x.peak_16bit * 1.02)
    drawn = [
        log(predict(one, centre)[0] / predict(faster, centre)[0]) / log(1.02) for centre in draws
    ]
    assert products.high - products.low == pytest.approx(2 * Z80 * np.std(drawn), rel=0.2)
    assert products.elasticity == pytest.approx(np.mean(drawn), abs=0.02)


def test_what_a_training_does_not_use_does_not_help_it():
    alone = by_figure(EstimateRequest("llama31-8b", "H100", 8))
    assert alone["network bandwidth"].elasticity == 0.0
    assert (
        alone["network bandwidth"].step_time_if_doubled_s
        == estimate(EstimateRequest("llama31-8b", "H100", 8), shipped_evidence()).step_time_s
    )
    far = by_figure(EstimateRequest("llama31-405b", "H100", 16384))
    assert far["network bandwidth"].elasticity > 10 * far["communication latency"].elasticity
