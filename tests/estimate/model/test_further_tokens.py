"""Layers that predict one token more: a block, a product that joins two streams, and the head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from paceline.estimate.estimates import Estimates, estimates_of_cases
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.model.block import gemm_rate, gemm_seconds
from paceline.estimate.model.case import Case, Cases, cases_of
from paceline.estimate.model.coefficients import coefficient_values
from paceline.estimate.model.step import step_components
from paceline.estimate.model.weights import balanced_stage_layers, stage_layers
from paceline.estimate.request import EstimateRequest
from paceline.estimate.run_case import case_of

QUESTION = EstimateRequest("deepseek-v3", "H100", 1024, overrides=("layout.tp=2",))
NEXT = replace(QUESTION, overrides=(*QUESTION.overrides, "model.mtp_layers=0"))


def case(request: EstimateRequest) -> Case:
    return case_of(request.spec, request.machine, request.resolved_software)


def estimates(case: Case) -> Estimates:
    return estimates_of_cases(cases_of([case]), shipped_evidence())


def test_the_head_is_passed_once_more_behind_a_product_of_two_streams():
    two, c = cases_of([case(QUESTION)]), coefficient_values(shipped_evidence().fit().centre)
    one = cases_of([replace(case(QUESTION), mtp_layers=0)])
    joined = 3 * gemm_seconds(
        two, c, gemm_rate(two, c), np.array([4096.0]), np.array([7168 / 2]), np.array([14336.0])
    )
    once = _head(one, c)
    assert _head(two, c) == pytest.approx(2 * once + joined[0])
    # 3 x 2 x 4096 tokens x 7168 x 129280 / 2 at no more than the peak, 989.5 TFLOP/s.
    assert once > 3 * 2 * 4096 * 7168 * 129280 / 2 / 989.5e12


def _head(x: Cases, c: Mapping[str, float]) -> float:
    return float(step_components(x, c).head[0] - step_components(x, c).root[0])


def test_logits_of_both_tokens_are_kept_on_the_last_stage():
    both = estimates(case(QUESTION)).memory.logits[0]
    one = estimates(replace(case(QUESTION), mtp_layers=0)).memory.logits[0]
    # 6 bytes a logit in a fused loss, half of the vocabulary on each of two tensor ranks, plus
    # the head's input in 16 bit before and behind its norm.
    logits, stream = 6 * 4096 * 129280 / 2, 4096 * 7168
    assert one == pytest.approx(logits + 4 * stream, rel=0.01) and both == pytest.approx(2 * one)


def test_a_model_without_such_layers_has_one_block_and_one_pass_less():
    one, two = case(NEXT), case(QUESTION)
    assert (one.mtp_layers, two.mtp_layers) == (0, 1) and two.layers == one.layers + 1
    assert estimates(one).step_time_s[0] < estimates(two).step_time_s[0]


def test_the_last_rank_of_a_model_with_several_heads_has_fewer_layers():
    x = cases_of([case(replace(QUESTION, overrides=("layout.tp=1", "layout.pp=16")))])
    work = step_components(x, coefficient_values(shipped_evidence().fit().centre))
    head_layers = work.head / work.layer
    most, last = balanced_stage_layers(x, head_layers)
    even, _ = stage_layers(x)
    assert last[0] < most[0] <= even[0] + 1 and 15 * most[0] + last[0] >= 62
    # No other place of whole layers makes the slowest rank faster.
    slowest = [max(np.ceil((62 - n) / 15), n + head_layers[0]) for n in range(5)]
    assert max(most[0], last[0] + head_layers[0]) == pytest.approx(min(slowest))
