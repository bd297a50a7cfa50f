"""ZeRO-2 and 3: what is gathered and scattered, how often, and among whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.fit.refit import cpu_prior
from paceline.estimate.model.case import cases_of
from paceline.estimate.model.coefficients import CENTRE, coefficient_values
from paceline.estimate.model.step import StepTime, block_exchange, root_exchange, step_time
from paceline.estimate.model.weights import block_weights, shards
from tests.estimate.machines import CPU, H100

C = coefficient_values(shipped_evidence().fit().centre)
ON_CPU = cpu_prior("bf16").medians
TORCH = replace(H100, implementation="torch", devices=64, global_batch=256)


def gpus(**changes: Any) -> StepTime:
    return step_time(cases_of([replace(TORCH, **changes)]), C)


def processes(**changes: Any) -> StepTime:
    return step_time(cases_of([replace(CPU, **changes)]), ON_CPU)


def test_gradients_reduced_once_cost_the_same_however_many_micro_batches_there_are():
    def exchanged(global_batch: int, once: bool) -> float:
        step = processes(zero_stage=2, global_batch=global_batch, gradients_once=once)
        return float(step.zero[0])

    assert exchanged(8, True) < exchanged(8, False)
    assert exchanged(32, True) == pytest.approx(exchanged(16, True), rel=0.05)


def test_on_a_processor_stage_2_costs_more_than_1_and_less_than_3():
    one, two, three = (float(processes(zero_stage=n).total[0]) for n in (1, 2, 3))
    assert 1.05 * one < two < 0.97 * three


def test_stage_2_scatters_every_micro_batch_and_gathers_once_a_step():
    few, many = (processes(zero_stage=2, global_batch=n) for n in (8, 16))
    assert few.zero[0] > 0 and many.zero[0] == pytest.approx(2 * few.zero[0])
    assert few.dp[0] > 0 and many.dp[0] == pytest.approx(few.dp[0], rel=0.01)
    assert processes(zero_stage=3).dp[0] == 0


def test_all_that_fsdp_exchanges_adds_to_a_processors_step():
    x = cases_of([replace(CPU, zero_stage=2)])
    block, root = block_exchange(x, ON_CPU), root_exchange(x, ON_CPU)
    microbatches = CPU.global_batch / CPU.devices
    scattered = microbatches * (CPU.layers * block.scatter + root.scatter)[0]
    gathered = (CPU.layers * block.gather + root.gather)[0]
    step = processes(zero_stage=2)
    assert step.zero[0] + step.dp[0] == pytest.approx(scattered + gathered, rel=1e-6)


def test_on_gpus_stage_2_hides_most_of_it():
    plain, sharded = gpus(zero_stage=1), gpus(zero_stage=2)
    x = cases_of([replace(TORCH, zero_stage=2)])
    scattered = 4 * TORCH.layers * block_exchange(x, C).scatter[0]
    assert 0 < sharded.zero[0] < 0.6 * scattered
    assert sharded.total[0] == pytest.approx(plain.total[0], rel=0.1)


def test_gathering_is_in_the_computing_dtype_and_scattering_in_fp32():
    def exchange(**changes: Any) -> tuple[float, float]:
        x = cases_of([replace(TORCH, zero_stage=3, **changes)])
        exchanged = block_exchange(x, {**C, "inter_start_s": 1e-12})
        return float(exchanged.gather[0]), float(exchanged.scatter[0])

    narrow, wide = exchange(), exchange(compute_bytes=4.0)
    assert narrow[1] == pytest.approx(2 * narrow[0]) and wide[0] == pytest.approx(2 * narrow[0])
    assert wide[1] == pytest.approx(narrow[1])
    frozen = exchange(frozen=True)
    assert frozen[0] == pytest.approx(narrow[0]) and frozen[1] == 0


def test_hybrid_shards_inside_a_node_do_not_wait_for_the_network():
    slow = {"zero_stage": 3, "inter_bytes_per_s": 1e9}
    whole, hybrid = (gpus(**slow, frozen=True, dp_shard=n) for n in (0.0, 8.0))
    assert hybrid.zero[0] < 0.1 * whole.zero[0]
    whole, hybrid = gpus(**slow), gpus(**slow, dp_shard=8.0)
    assert hybrid.zero[0] < 0.95 * whole.zero[0]
    assert hybrid.optimizer[0] == pytest.approx(8 * whole.optimizer[0], rel=0.01)
    assert gpus(zero_stage=3, dp_shard=64.0).total[0] == gpus(zero_stage=3).total[0]


def test_copies_of_a_hybrid_shard_add_up_their_gradients():
    x = cases_of([replace(TORCH, zero_stage=3, dp_shard=8.0)])
    alone = cases_of([replace(TORCH, zero_stage=3, devices=8)])
    hybrid, single = block_exchange(x, C), block_exchange(alone, C)
    owned = 4 * block_weights(x)[0] / 8
    assert hybrid.among[0] > 2 * 7 / 8 * owned / TORCH.inter_bytes_per_s > single.among[0] == 0
    assert hybrid.gather[0] == pytest.approx(single.gather[0])
    # The network overlaps with a node's links on GPUs, but not on one CPU.
    both = 2 * hybrid.gather[0] + hybrid.scatter[0]
    assert hybrid.of_microbatch(x, 2)[0] == max(both, hybrid.among[0])
    x = cases_of([replace(CPU, zero_stage=3, dp_shard=2.0, devices=4)])
    exchanged = block_exchange(x, ON_CPU)
    both = 2 * exchanged.gather[0] + exchanged.scatter[0]
    assert exchanged.of_microbatch(x, 2)[0] == pytest.approx(both + exchanged.among[0])


def test_shards_are_all_ranks_or_those_of_a_hybrid_one():
    some = [{}, {"dp_shard": 8.0}, {"dp_shard": 8.0, "zero_stage": 1}, {"dp_shard": 512.0}]
    ranks, _ = shards(cases_of([replace(TORCH, **{"zero_stage": 3, **one}) for one in some]))
    assert np.array_equal(ranks, [64, 8, 64, 64])


def test_a_pipeline_of_pytorch_reduces_gradients_once():
    few, many = (gpus(zero_stage=2, pp=2, global_batch=n) for n in (128, 512))
    assert few.zero[0] == many.zero[0] == 0
    assert few.dp[0] == pytest.approx(many.dp[0], rel=0.01)
    more = gpus(zero_stage=2, pp=2, global_batch=64)
    assert more.total[0] < few.total[0]


def test_a_host_that_starts_what_it_computes_pays_for_every_exchange():
    slow = {**ON_CPU, "host_sharded_s": ON_CPU["host_sharded_s"] + 1e-3}
    x = cases_of([replace(CPU, zero_stage=3)])
    more = step_time(x, slow).total[0] - step_time(x, ON_CPU).total[0]
    exchanges = CPU.global_batch / CPU.devices * (3 * CPU.layers + 2)
    assert more == pytest.approx(1e-3 * exchanges)
    on_gpus = cases_of([replace(TORCH, zero_stage=3)])
    dearer = {**coefficient_values(CENTRE), "host_sharded_s": 1.0}
    assert (
        step_time(on_gpus, dearer).total[0]
        == step_time(on_gpus, coefficient_values(CENTRE)).total[0]
    )
