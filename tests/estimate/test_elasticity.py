"""What would help most: every figure's share in the step, and what twice of it brings."""

from __future__ import annotations

from dataclasses import replace
from math import log

import numpy as np
import pytest

from paceline.estimate.answer import estimate
from paceline.estimate.elasticity import FIGURES, Elasticity, elasticities
from paceline.estimate.fit.evidence import shipped
from paceline.estimate.fit.interval import Z80
from paceline.estimate.fit.posterior import predict
from paceline.estimate.model.case import cases_of
from paceline.estimate.question import Question
from paceline.estimate.run_case import case_of

NODES = Question("llama31-70b", "H100-SXM", 64, intra_link="450 GB/s", inter_link="50 GB/s")


def by_figure(question: Question) -> dict[str, Elasticity]:
    return {each.figure: each for each in elasticities(question, shipped())}


@pytest.mark.parametrize(
    "question",
    [
        NODES,
        replace(NODES, overrides=("training.dtype=fp8",)),
        Question("gpt-1b3", "V100", 64),
        Question("opt-350m-sft", "A100", 8, stack="torch"),
        Question("flux1-schnell", "H100", 64),
        Question("llama2-70b-lora", "B200", 8),
    ],
)
def test_all_the_step_is_seconds_at_one_of_the_figures(question: Question):
    answers = elasticities(question, shipped())
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
        "network": replace(NODES, inter_link="100 GB/s"),
        "links inside the fast domain": replace(NODES, intra_link="900 GB/s"),
    }
    for name, question in faster.items():
        assert answers[name].doubled_s == pytest.approx(estimate(question, shipped()).step_time_s)
    assert (answers["network"].value, answers["network"].unit) == (50e9, "B/s")
    assert answers["host and launches"].value is None


def test_the_interval_is_that_of_coefficients_drawn_from_their_posterior():
    fit, x = shipped().fit(), case_of(NODES.spec, NODES.machine, NODES.software)
    products = by_figure(NODES)["matrix products"]
    draws = np.random.default_rng(0).multivariate_normal(fit.centre, fit.covariance, size=200)
    one = cases_of([x])
    faster = one.changed(peak_16bit=x.peak_16bit * 1.02)
    drawn = [
        log(predict(one, centre)[0] / predict(faster, centre)[0]) / log(1.02) for centre in draws
    ]
    assert products.high - products.low == pytest.approx(2 * Z80 * np.std(drawn), rel=0.2)
    assert products.elasticity == pytest.approx(np.mean(drawn), abs=0.02)


def test_what_a_training_does_not_use_does_not_help_it():
    alone = by_figure(Question("llama31-8b", "H100", 8))
    assert alone["network"].elasticity == 0.0
    assert (
        alone["network"].doubled_s
        == estimate(Question("llama31-8b", "H100", 8), shipped()).step_time_s
    )
    far = by_figure(Question("llama31-405b", "H100", 16384))
    assert far["network"].elasticity > 10 * far["latency of exchanges"].elasticity
