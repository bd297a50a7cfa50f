"""What CUDA graphs take off a step: the host's time, and what hosts add to each exchange."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.model.block import Block, block_time
from paceline.estimate.model.case import Case, CudaGraphs, cases_of
from paceline.estimate.model.coefficients import coefficient_values
from paceline.estimate.model.step import StepTime, step_time
from paceline.estimate.request import EstimateRequest
from paceline.estimate.run_case import case_of
from paceline.estimate.single_estimate import estimate
from tests.estimate.memory.test_device_memory import LLAMA_8B

C = coefficient_values(shipped_evidence().fit().centre)
SMALL = replace(LLAMA_8B, devices=8, global_batch=1, micro_batch=1, seq_len=512, cp=4, tp=2)
"""A small batch, whose step time is bound by CPU launches."""


def step(case: Case, captured: CudaGraphs) -> StepTime:
    return step_time(cases_of([replace(case, cuda_graphs=captured)]), C)


def block(case: Case, captured: CudaGraphs) -> Block:
    return block_time(cases_of([replace(case, cuda_graphs=captured)]), C)


def test_between_a_graphs_kernels_lies_a_time_of_their_own_and_no_host():
    assert block(SMALL, "none").host[0] > 5 * block(SMALL, "blocks").host[0]
    assert block(SMALL, "blocks").host[0] == pytest.approx(C["graph_launches_s"])
    assert block(SMALL, "iteration").host[0] == pytest.approx(C["graph_launches_s"])


def test_narrow_products_have_kernels_that_round_their_operands():
    narrow = replace(SMALL, peak_narrow=2 * SMALL.peak_16bit)
    assert block(narrow, "blocks").host[0] == pytest.approx(2 * C["graph_launches_s"])


def test_recomputation_launches_a_third_more():
    again = replace(SMALL, full_recompute=True)
    assert block(again, "blocks").host[0] == pytest.approx(4 / 3 * C["graph_launches_s"])


def test_captured_blocks_leave_what_lies_beside_them_and_iterations_do_not():
    eager, blocks, whole = (step(SMALL, each) for each in ("none", "blocks", "iteration"))
    assert blocks.fixed[0] == eager.fixed[0] == C["step_fused_s"]
    assert whole.fixed[0] == C["step_graph_s"]
    saved = blocks.host[0] - whole.host[0]
    assert saved == pytest.approx(C["host_microbatch_s"] - C["graph_launches_s"])
    assert eager.total[0] > blocks.total[0] > whole.total[0]


@pytest.mark.parametrize("exchange", ["any", "all-gather", "all-to-all"])
def test_no_host_begins_a_captured_exchange(exchange: str):
    case = replace(SMALL, cp_exchange=exchange)
    assert block(case, "blocks").cp[0] < block(case, "none").cp[0]
    assert block(case, "blocks").tp[0] < block(case, "none").tp[0]


def test_the_start_of_a_captured_exchange_is_longer_between_nodes():
    near, far = (replace(SMALL, domain=domain, inter_bytes_per_s=1e15) for domain in (8, 2))
    assert block(near, "blocks").cp[0] < block(far, "blocks").cp[0]


def test_large_blocks_hardly_gain():
    large = replace(LLAMA_8B, micro_batch=4, tp=1, cp=1)
    assert step(large, "blocks").total[0] > 0.93 * step(large, "none").total[0]


def test_older_software_is_slower_and_a_question_says_so():
    asked = EstimateRequest("llama31-8b", "GB300", 8, devices_per_node=4)
    old, new = (
        estimate(replace(asked, software_date=year), shipped_evidence()) for year in (2025.2, None)
    )  # fmt: skip
    assert old.parts["gemm"] > 1.03 * new.parts["gemm"]
    assert old.parts["elementwise"] == pytest.approx(new.parts["elementwise"])


def test_a_question_of_graphs_reaches_the_case():
    asked = EstimateRequest("llama31-8b", "GB300", 8, devices_per_node=4, cuda_graphs="iteration")
    case = case_of(asked.spec, asked.machine, asked.resolved_software)
    assert case.cuda_graphs == "iteration"
    assert estimate(asked, shipped_evidence()).parts["fixed"] == pytest.approx(C["step_graph_s"])
