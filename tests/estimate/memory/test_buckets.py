"""What the end of DeepSpeed's step leaves with the allocator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.estimate.memory.device_memory import p_oom, rank_memory
from paceline.estimate.memory.framework import PRIORS
from paceline.estimate.memory.states import beyond_logits, step_buffers
from paceline.estimate.model.case import Case, cases_of
from tests.estimate.memory.test_published import read

GB = 1e9
GPT: Case = read(tp="1", pp="2", mbs="1").case


def made(parameters: float, share: float, largest: float, case: Case = GPT) -> float:
    arrays = (np.array([value]) for value in (parameters, share, largest))
    return float(step_buffers(cases_of([case]), *arrays)[0])


def test_all_buckets_and_all_that_is_gathered_exist_at_once_where_the_host_is_ahead():
    assert made(2.0 * GB, 0.5 * GB, 0.1 * GB) == pytest.approx((4 * 2.0 + 6 * 0.5) * GB)
    whole = replace(GPT, zero_stage=0.0)
    assert made(2.0 * GB, 2.0 * GB, 0.1 * GB, whole) == pytest.approx((2 + 8) * 2.0 * GB)


def test_one_buffer_at_a_time_is_new_only_if_it_is_larger_than_those_before():
    waits = replace(GPT, blocking_launches=True)
    # 1.0 (the table), no more for the bucket, 2.0 and 4.0 for overflow and norm.
    assert made(2.3 * GB, 0.5 * GB, 0.5 * GB, waits) == pytest.approx((1.0 + 2.0 + 4.0) * GB)
    # 0.2, 1.0 for the bucket, 1.033 for what is gathered: the shard plus the table is more.
    assert made(3.1 * GB, 1.0 * GB, 0.1 * GB, waits) == pytest.approx((0.2 + 6.0) * GB)
    assert made(2.3 * GB, 0.5 * GB, 0.5 * GB, waits) < made(2.3 * GB, 0.5 * GB, 0.5 * GB)


def test_gradients_summed_in_fp32_need_neither_buckets_nor_a_shard():
    summed = replace(GPT, summed_gradient_bytes=4.0)
    # 2.0 for a tensor in fp32, and all weights, which are gathered at once up to 5e9 of them.
    assert made(2.3 * GB, 0.5 * GB, 0.5 * GB, summed) == pytest.approx((2.0 + 4.6) * GB)
    assert made(10.0 * GB, 0.5 * GB, 3.0 * GB, summed) == pytest.approx(12.0 * GB)
    whole = replace(summed, zero_stage=0.0)
    assert made(2.3 * GB, 2.3 * GB, 0.5 * GB, whole) == pytest.approx(2.0 * GB)


def test_logits_leave_room_for_whole_buckets():
    buffers, parameters = np.array([8 * GB]), np.array([2 * GB])
    for logits, left in ((0.2, 8.0), (0.3, 7.0), (0.6, 5.0), (4.0, 0.0)):
        found = beyond_logits(buffers, parameters, np.array([logits * GB]))
        assert found[0] == pytest.approx(left * GB)
    assert beyond_logits(np.zeros(1), np.zeros(1), np.array([GB]))[0] == 0


def test_a_steps_buffers_are_held_but_given_back_before_a_device_runs_out():
    case = read(tp="1", pp="2", mbs="8").case
    plain = {"softmax": replace(PRIORS["softmax"], makes_buckets=0.0)}
    without, found = (rank_memory(cases_of([case]), 0, f) for f in (plain, PRIORS))
    more = found.reserved[0] - without.reserved[0]
    assert more > 3 * GB and found.allocated[0] == without.allocated[0]
    assert found.reclaimable[0] == pytest.approx(more)
    assert found.needed_bytes[0] == pytest.approx(without.device_used[0])
    assert p_oom(found, found.needed_bytes[0])[0] == pytest.approx(0.5)
    # Of a small micro-batch only what its passes take is free when the step needs its buffers.
    small = rank_memory(cases_of([read(tp="1", pp="2", mbs="1").case]), 0, PRIORS)
    assert 0 < small.reclaimable[0] < more


def test_what_embedding_keeps_grows_with_the_micro_batches_in_flight():
    cases = [read(tp="1", pp=pp, mbs="1").case for pp in ("2", "4")]
    bare = {"softmax": replace(PRIORS["softmax"], embedding_kept=0.0)}
    two, four = (
        rank_memory(cases_of([c]), 0, PRIORS).activations[0]
        - rank_memory(cases_of([c]), 0, bare).activations[0]
        for c in cases
    )
    assert (two, four) == pytest.approx((2 * 3 * 2048 * 2048, 4 * 3 * 2048 * 2048))


def test_tensor_ranks_keep_a_part_each_of_what_they_hand_on():
    case = read(tp="4", pp="2", mbs="1").case
    none, split, whole = (
        rank_memory(cases_of([case]), 0, {"softmax": replace(PRIORS["softmax"], **changes)})
        for changes in ({"keeps_transfers": 0.0}, {}, {"splits_transfers": 0.0})
    )
    parts = [float(f.activations[0] - none.activations[0]) for f in (split, whole)]
    assert parts[1] == pytest.approx(4 * parts[0]) and parts[0] > 0
