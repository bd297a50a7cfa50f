"""The time model: its parts add up, and each answers to what it is about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.model.block import block_time, gemm_rate
from paceline.estimate.model.case import Case, cases_of, cases_with
from paceline.estimate.model.coefficients import CENTRE, NAMES, PRIORS, coefficient_values
from paceline.estimate.model.collectives import all_reduce_s, all_to_all_s
from paceline.estimate.model.machine import machine
from paceline.estimate.model.step import StepTime, step_time
from paceline.estimate.model.weights import num_microbatches, rank_weights

C = coefficient_values(shipped_evidence().fit().centre)
LLAMA_70B = Case(
    layers=80, hidden=8192, ffn=28672, heads=64, kv_heads=8, head_dim=128, vocab=128256,
    seq_len=8192, gated=True, peak_16bit=989.5e12, memory_bytes_per_s=3.35e12,
    intra_bytes_per_s=450e9, inter_bytes_per_s=50e9, devices=64, global_batch=128,
    tp=4, pp=4, cp=2, vp=5, zero_stage=1, sequence_parallel=True, generation="hopper",
)  # fmt: skip

sizes = st.sampled_from([1.0, 2.0, 4.0, 8.0])
layouts = st.fixed_dictionaries(
    {
        "tp": sizes, "pp": sizes, "cp": sizes, "micro_batch": sizes,
        "zero_stage": st.sampled_from([0.0, 1.0, 2.0, 3.0]),
        "full_recompute": st.booleans(), "flash": st.booleans(),
        "implementation": st.sampled_from(["softmax", "fused", "torch"]),
        "generation": st.sampled_from(["volta", "ampere", "hopper", "blackwell", "other", "cpu"]),
        "frozen": st.booleans(), "causal": st.booleans(),
        "peak_narrow": st.sampled_from([0.0, 2e15]),
    }
)  # fmt: skip


def step(**changes: Any) -> StepTime:
    return step_time(cases_of([replace(LLAMA_70B, **changes)]), C)


def seconds(**changes: Any) -> float:
    return float(step(**changes).total[0])


@given(layouts)
def test_no_part_is_negative_and_all_add_up(layout: dict[str, Any]):
    parts = step(**layout).at(0)
    assert all(part >= 0 and np.isfinite(part) for part in parts.values())
    assert sum(parts.values()) == pytest.approx(seconds(**layout))


@pytest.mark.parametrize(("devices", "published_s"), [(64, 14.72), (256, 14.80), (2048, 14.98)])
def test_the_published_70b_is_met_and_grows_with_scale(devices: int, published_s: float):
    assert seconds(devices=devices, global_batch=2 * devices) == pytest.approx(
        published_s, rel=0.05
    )


def test_the_bubble_follows_its_formula():
    one = step(cp=1, tp=8, vp=1)
    m = float(num_microbatches(cases_of([replace(LLAMA_70B, cp=1, tp=8, vp=1)]))[0])
    two = step(cp=1, tp=8, vp=1, global_batch=256)
    assert one.bubble[0] == pytest.approx(two.bubble[0])
    share = one.bubble[0] / (one.total - one.dp - one.optimizer - one.fixed - one.jitter)[0]
    assert share == pytest.approx(3 / (m + 3), rel=0.1)
    assert step(pp=1, tp=8, devices=64).bubble[0] == 0


@pytest.mark.parametrize(
    ("changes", "part", "factor"),
    [
        ({"full_recompute": True}, "gemm", 4 / 3),
        ({"frozen": True}, "gemm", 2 / 3),
        ({"causal": False}, "attention", 2.0),
        ({"global_batch": 256}, "gemm", 2.0),
        ({"selective_recompute": True}, "attention", 4.5 / 3.5),
    ],
)
def test_a_part_answers_to_what_it_is_about(changes: dict[str, Any], part: str, factor: float):
    before, after = getattr(step(), part)[0], getattr(step(**changes), part)[0]
    assert after / before == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize(
    "worse",
    [
        {"peak_16bit": 500e12}, {"intra_bytes_per_s": 50e9}, {"inter_bytes_per_s": 5e9},
        {"memory_bytes_per_s": 1e12}, {"hidden": 8190, "head_dim": 127.97}, {"power": 0.7},
        {"sequence_parallel": False}, {"compiled": False, "implementation": "torch"}, {"domain": 2},
    ],
    ids=str,
)  # fmt: skip
def test_what_makes_a_machine_or_a_layout_worse_takes_longer(worse: dict[str, Any]):
    assert seconds(**worse) > seconds()


def test_narrow_products_are_faster_and_the_rest_is_not():
    wide, narrow = step(), step(peak_narrow=1979e12)
    assert narrow.gemm[0] < 0.75 * wide.gemm[0]
    assert narrow.attention[0] == pytest.approx(wide.attention[0])


def test_zero3_hides_what_it_exchanges_behind_work_and_not_all_of_it():
    plain = step(tp=1, pp=1, cp=1, vp=1, zero_stage=1)
    sharded = step(tp=1, pp=1, cp=1, vp=1, zero_stage=3)
    assert plain.zero[0] == 0 < sharded.zero[0] < sharded.gemm[0]
    assert sharded.dp[0] == 0 < plain.dp[0]


def test_experts_cost_by_the_token_and_move_over_the_network():
    moe = {"experts": 8, "experts_per_token": 2, "ffn": 14336, "tp": 1, "cp": 1}
    local, spread = step(**moe), step(**moe, ep=8)
    dense = step(tp=1, cp=1, ffn=2 * 14336)
    assert local.ep[0] == 0 < spread.ep[0]
    grouped = C["gemm_grouped"]
    assert dense.gemm[0] < local.gemm[0] < dense.gemm[0] / grouped
    assert local.elementwise[0] > dense.elementwise[0]


def test_experts_that_ranks_share_out_are_not_gathered_whole():
    moe = {"experts": 64, "experts_per_token": 2, "ffn": 14336, "tp": 1, "cp": 1, "pp": 1, "vp": 1}
    slow = {**moe, "zero_stage": 3, "inter_bytes_per_s": 1e9}
    assert step(**slow, ep=8).zero[0] < 0.2 * step(**slow).zero[0]


def test_a_group_across_domains_shares_its_ports():
    x = cases_of([LLAMA_70B])
    ones = np.ones(1)
    inside, across = (float(all_reduce_s(x, C, 1e9 * ones, n * ones, ones)[0]) for n in (8, 16))
    strided = float(all_reduce_s(x, C, 1e9 * ones, 16 * ones, 8 * ones)[0])
    assert inside < across < strided
    assert float(all_reduce_s(x, C, 1e9 * ones, ones, ones)[0]) == 0


def test_weights_are_counted_as_the_model_has_them():
    rest, ffns = rank_weights(cases_of([replace(LLAMA_70B, tp=1, pp=1)]))
    assert rest[0] + ffns[0] == pytest.approx(70.55e9, rel=0.005)


def test_zero_bubble_idles_a_third():
    one, third = step(vp=1), step(vp=1, schedule="zero-bubble")
    assert third.bubble[0] == pytest.approx(one.bubble[0] / 3)
    assert step(vp=1, schedule="gpipe").bubble[0] == pytest.approx(one.bubble[0])


def test_frozen_weights_have_no_gradients_to_compute_or_scatter():
    axes = {"tp": 1, "pp": 1, "cp": 1, "vp": 1, "zero_stage": 3}
    trained, frozen = step(**axes), step(**axes, frozen=True)
    assert frozen.head[0] < 0.75 * trained.head[0]
    assert frozen.zero[0] < trained.zero[0]


def test_experts_are_optimized_by_the_ranks_that_hold_them():
    """Spreading experts leaves each rank with fewer, which fewer ranks share: the same traffic."""
    moe = {"experts": 64, "experts_per_token": 2, "ffn": 1024, "tp": 1, "cp": 1, "pp": 1, "vp": 1}
    alone, spread = step(**moe), step(**moe, ep=8)
    assert spread.optimizer[0] == pytest.approx(alone.optimizer[0])
    unsharded = step(**moe, ep=8, zero_stage=0).optimizer[0]
    assert unsharded < 0.3 * step(**moe, zero_stage=0).optimizer[0]


def test_many_layouts_at_once_are_those_one_by_one():
    tp, micro = np.array([1.0, 2.0, 8.0]), np.array([1.0, 4.0, 2.0])
    together = step_time(cases_with(LLAMA_70B, {"tp": tp, "micro_batch": micro}), C).total
    alone = [seconds(tp=t, micro_batch=b) for t, b in zip(tp, micro, strict=True)]
    assert together.tolist() == pytest.approx(alone)


def test_a_host_that_cannot_keep_up_sets_the_pace():
    tiny = {"hidden": 256, "ffn": 1024, "heads": 4, "kv_heads": 4, "seq_len": 128, "vocab": 1000}
    # Exchanges are in full view where tensor ranks share no sequence, so there are none.
    tiny |= {"sequence_parallel": False, "tp": 1, "cp": 1}
    parts, large = (
        block_time(cases_of([case]), C) for case in (replace(LLAMA_70B, **tiny), LLAMA_70B)
    )
    assert parts.host[0] > 0.9 * parts.total[0]
    assert large.host[0] < 0.05 * large.total[0]


def test_tensor_parallelism_overlaps_with_sequence_parallelism_alone():
    cut = {"tp": 4, "pp": 1, "vp": 1}
    plain, shared = step(**cut, sequence_parallel=False), step(**cut)
    # As many bytes, but twice the starts.
    assert plain.tp[0] > 1.5 * shared.tp[0]
    torch = {"implementation": "torch"}
    assert step(**cut, **torch).tp[0] > step(**cut, **torch, sequence_parallel=False).tp[0]


def test_copies_of_experts_far_apart_share_few_ports():
    moe = {
        "experts": 64, "experts_per_token": 4, "ffn": 2048, "whole_experts": True, "devices": 4096,
        "tp": 1, "pp": 4, "vp": 1, "cp": 1, "domain": 72, "global_batch": 4096,
    }  # fmt: skip
    near, far = step(**moe, ep=8).dp[0], step(**moe, ep=64).dp[0]
    # An eighth of the experts to exchange, through one port and not nine.
    assert far > 0.9 * near


def test_every_coefficient_has_a_prior_a_width_and_a_meaning():
    assert len(set(NAMES)) == len(PRIORS) == len(CENTRE)
    assert all(prior.value > 0 and 0 < prior.sd <= 1 and prior.what for prior in PRIORS)
    assert set(shipped_evidence().medians) <= set(NAMES)


def test_what_experts_exchange_across_nodes_goes_through_each_ranks_own_port():
    moe = {"experts": 64, "experts_per_token": 8, "ffn": 2048, "tp": 1, "cp": 1, "pp": 1, "vp": 1}
    inside, across = step(**moe, ep=8), step(**moe, ep=64)
    tokens, passes = 128 * 8192 / 64, 2 * 2 * 80
    sent = 2 * tokens * 8192 * 7 * (1 - (7 / 8) ** 8)
    through_the_port_s = C["ep_exposed"] * passes * sent / 50e9
    assert across.ep[0] > through_the_port_s > 3 * inside.ep[0]
    slower = step(**moe, ep=64, inter_bytes_per_s=25e9)
    assert slower.ep[0] == pytest.approx(2 * across.ep[0], rel=0.05)
    assert step(**moe, ep=8, inter_bytes_per_s=25e9).ep[0] == inside.ep[0]


def test_an_all_to_all_sends_a_token_once_to_each_other_domain():
    x, ones = cases_of([replace(LLAMA_70B, inter_bytes_per_s=1e6)]), np.ones(1)
    one, eight, all_of_them = (
        float(all_to_all_s(x, C, n * 1e6 * ones, 64 * ones, ones, n * ones)[0])
        for n in (1.0, 8.0, 1000.0)
    )
    port = 1e6 * C["inter"]
    assert one == pytest.approx(7 / 8 * 1e6 / port, rel=1e-3)
    assert eight == pytest.approx(7 * (1 - (7 / 8) ** 8) * 1e6 / port, rel=1e-3)
    assert all_of_them == pytest.approx(7 * 1e6 / port, rel=1e-3)


def test_sequence_parallelism_starts_two_collectives_for_each_sum():
    slow = {**C, "intra_start_s": C["intra_start_s"] + 1e-3}
    more = [
        float((step_time(x, slow).tp - step_time(x, C).tp)[0])
        for sequence in (False, True)
        for x in [
            cases_of([replace(LLAMA_70B, implementation="torch", sequence_parallel=sequence)])
        ]
    ]
    assert more[1] == pytest.approx(2 * more[0]) and more[0] > 0


def test_processes_that_share_cores_share_their_hosts_time():
    alone, crowded = step(generation="cpu"), step(generation="cpu", cpu_oversubscription=2.0)
    assert crowded.host[0] == pytest.approx(2 * alone.host[0])
    assert crowded.fixed[0] == pytest.approx(2 * alone.fixed[0])
    assert crowded.gemm[0] == alone.gemm[0] and crowded.tp[0] > alone.tp[0]


def test_who_fills_a_pipeline_has_the_cores_of_those_that_wait():
    free = {**C} | {name: 1e-12 for name in C if name.startswith("host_") or "start_s" in name}
    alone, crowded = (
        step_time(cases_of([replace(LLAMA_70B, generation="cpu", cpu_oversubscription=n)]), free)
        for n in (1.0, 2.0)
    )
    assert crowded.gemm[0] == pytest.approx(alone.gemm[0])
    assert crowded.bubble[0] == pytest.approx(alone.bubble[0] / 2)


@pytest.mark.parametrize(("device", "published"), [("MI300X", 668e12), ("H100", 795e12)])
def test_products_stay_below_the_best_that_anybody_published(device: str, published: float):
    here = machine(device)
    x = cases_of([replace(LLAMA_70B, generation=here.generation, peak_16bit=here.peak_16bit())])
    assert 0.75 * published < gemm_rate(x, C)[0] < published


@pytest.mark.parametrize(("device", "least", "most"), [("B300", 3.4, 4.9), ("GB200", 3.2, 4.0)])
def test_the_gain_of_4_bits_is_that_of_a_published_profile(device: str, least: float, most: float):
    here = machine(device)
    changes: dict[str, Any] = {
        "generation": here.generation,
        "peak_16bit": here.peak_16bit(),
        "peak_narrow": here.peak_narrow("nvfp4"),
        "four_bit": True,
        "block_scaled": True,
    }
    x = cases_of([replace(LLAMA_70B, **changes)])
    gain = gemm_rate(x, C)[0] / gemm_rate(x, C, narrow=False)[0]
    assert least < gain < most


def test_casts_to_4_bits_take_longer_than_to_8():
    block = [
        block_time(cases_of([replace(LLAMA_70B, peak_narrow=2e15, four_bit=four)]), C)
        for four in (False, True)
    ]
    plain = block_time(cases_of([LLAMA_70B]), C).elementwise[0]
    to_8, to_4 = (each.elementwise[0] - plain for each in block)
    assert to_4 == pytest.approx(2.3 * to_8) and to_8 > 0
