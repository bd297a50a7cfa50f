"""What experts add to a step, by who holds them, how tokens reach them and what software does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.model.case import Case, cases_of
from paceline.estimate.model.coefficients import coefficient_values
from paceline.estimate.model.experts import grouped_rate
from paceline.estimate.model.step import StepTime, step_time
from paceline.estimate.model.weights import rank_weights

C = coefficient_values(shipped_evidence().fit().centre)
QWEN = Case(
    layers=94, hidden=4096, ffn=1536, heads=64, kv_heads=4, head_dim=128, vocab=151936,
    seq_len=4096, gated=True, experts=128, experts_per_token=8, peak_16bit=2.5e15,
    peak_narrow=5e15, block_scaled=True, memory_bytes_per_s=8e12, intra_bytes_per_s=900e9,
    inter_bytes_per_s=100e9, devices=64, global_batch=256, micro_batch=4, tp=8, pp=2, ep=32,
    zero_stage=1, sequence_parallel=True, generation="blackwell", software_date=2026.5,
)  # fmt: skip


def parts(**changes: object) -> StepTime:
    """Seconds of one step by part."""
    return step_time(cases_of([replace(QWEN, **changes)]), C)  # pyright: ignore[reportArgumentType]


def test_a_dispatcher_that_sends_a_copy_for_each_expert_takes_longer():
    assert parts(dispatcher="alltoall").ep > parts(dispatcher="deepep").ep
    assert parts(dispatcher="deepep", proxied=True).ep > parts(dispatcher="deepep").ep


def test_an_exchange_beside_other_work_shows_less_than_one_that_nothing_hides():
    assert parts(ep_overlap="on").ep < parts().ep < parts(ep_overlap="off").ep


def test_a_captured_step_waits_for_no_host():
    assert parts(cuda_graphs="iteration").host < parts(micro_batch=1).host
    small, graph = parts(micro_batch=1), parts(micro_batch=1, cuda_graphs="iteration")
    assert small.total > graph.total
    assert small.gemm == graph.gemm


def test_a_graph_of_blocks_leaves_experts_to_the_host():
    none, blocks, whole = (
        parts(micro_batch=1, cuda_graphs=captured).host
        for captured in ("none", "blocks", "iteration")
    )
    assert none > blocks > whole


def test_host_threads_begin_an_exchange_later_the_more_ranks_there_are():
    handed = {"dispatcher": "deepep", "micro_batch": 1, "ep_overlap": "off"}
    few, many = (
        parts(**handed, ep=ep, proxied=True).ep - parts(**handed, ep=ep).ep for ep in (16, 32)
    )
    assert many > few > 0


def test_attention_is_in_8_bit_where_experts_have_kernels_of_their_own():
    wide = parts(peak_narrow=0.0, block_scaled=False).attention
    assert wide > 1.3 * parts().attention
    assert parts(four_bit=True).attention == pytest.approx(wide)
    assert parts(software_date=2026.3).attention > 1.3 * parts().attention


def test_tokens_beyond_a_capacity_spare_the_host_a_wait():
    assert parts(micro_batch=1, drops_tokens=True).host < parts(micro_batch=1).host


def test_narrow_expert_gemms_without_fused_casts_gain_a_part_of_the_peak():
    fused, unfused = parts(software_date=2026.45).gemm, parts(software_date=2026.3).gemm
    wide = parts(software_date=2026.3, peak_narrow=0.0, block_scaled=False).gemm
    assert 1.1 * fused < unfused < 0.95 * wide
    exponent = C["grouped_narrow"]
    rates = (np.array([2e15]), np.array([1e15]))
    x = cases_of([replace(QWEN, software_date=2026.3)])
    narrow, same = grouped_rate(x, C, *rates), grouped_rate(x, C, rates[1], rates[1])
    assert narrow / same == pytest.approx(2**exponent) and 0 < exponent < 1


def test_dense_models_do_not_ask_when_experts_became_faster():
    dense = {"experts": 1.0, "experts_per_token": 1.0, "ep": 1.0}
    assert (
        parts(software_date=2026.45, **dense).elementwise
        == parts(software_date=2026.3, **dense).elementwise
    )


def test_whole_experts_spread_as_many_weights_over_the_same_ranks():
    whole, cut = (
        rank_weights(cases_of([replace(QWEN, whole_experts=held, ep=ep)]))[1]
        for held, ep in ((True, 32.0), (False, 4.0))
    )
    assert whole == pytest.approx(cut)


def test_narrow_heads_pay_for_exponentials_where_products_outran_them():
    wide = {"peak_narrow": 0.0, "block_scaled": False}
    heads = {"heads": 128.0, "head_dim": 64.0, "kv_heads": 8.0}
    assert parts(**heads, **wide).attention == pytest.approx(1.5 * parts(**wide).attention)
    old = {"generation": "ampere"}
    assert parts(**heads, **old).attention == pytest.approx(parts(**old).attention)


def test_group_limited_routing_sends_fewer_copies_between_nodes():
    limited = parts(expert_groups=8.0, groups_per_token=4.0, ep=64.0, pp=1.0)
    free = parts(expert_groups=8.0, groups_per_token=8.0, ep=64.0, pp=1.0)
    assert limited.ep < free.ep == parts(ep=64.0, pp=1.0).ep


def test_8_bit_dispatch_saves_a_quarter_of_the_bytes_both_ways():
    assert parts(dispatch_bytes=1.0).ep == pytest.approx(0.75 * parts().ep, rel=0.05)


def test_kernels_that_scale_their_operands_gain_all_of_the_narrow_peak():
    x = cases_of([replace(QWEN, software_date=2026.3, narrow_experts=True)])
    rates = (np.array([2e15]), np.array([1e15]))
    assert grouped_rate(x, C, *rates) == pytest.approx(2 * grouped_rate(x, C, rates[1], rates[1]))
