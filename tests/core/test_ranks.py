"""Ranks are merged, and the one that waits least is named."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.ranks import binomial_tail, find_straggler, merge_ranks, rank_summaries
from paceline.core.steps import Steps
from tests.example import make_steps, noisy

HOSTS = {0: "a", 1: "b", 2: "c", 3: "d"}


def busy_ranks(excess: float, ranks: int = 4, n: int = 60) -> dict[int, Steps]:
    """Ranks of equal step time; the last one is `excess` busier."""
    steps_of: dict[int, Steps] = {}
    for rank in range(ranks):
        factor = 1 + (excess if rank == ranks - 1 else 0)
        busy = [factor * b for b in noisy(n, 0.15, 0.002, seed=rank)]
        steps_of[rank] = make_steps([0.2] * n, busy_time_s=busy)
    return steps_of


WINDOW = np.arange(1, 61)


def test_the_busiest_rank_is_named_when_it_is_ten_per_cent_slower():
    straggler = find_straggler(busy_ranks(0.10), HOSTS, WINDOW)
    assert straggler is not None
    assert (straggler.rank, straggler.host, straggler.named) == (3, "d", True)
    assert straggler.excess == pytest.approx(0.10, abs=0.02)


def test_equal_ranks_are_not_blamed():
    blamed = 0
    for seed in range(50):
        ranks = {
            r: make_steps([0.2] * 60, busy_time_s=noisy(60, 0.15, 0.004, seed=seed * 4 + r))
            for r in range(4)
        }
        straggler = find_straggler(ranks, HOSTS, WINDOW)
        blamed += straggler is not None and straggler.named
    assert blamed == 0


def test_among_noisy_equal_ranks_few_are_blamed():
    blamed = 0
    for seed in range(100):
        ranks = {
            r: make_steps([0.2] * 60, busy_time_s=noisy(60, 0.15, 0.03, seed=seed * 4 + r))
            for r in range(4)
        }
        straggler = find_straggler(ranks, HOSTS, WINDOW)
        blamed += straggler is not None and straggler.named
    assert blamed <= 4


def test_five_thousand_steps_are_judged_too():
    ranks = {
        r: make_steps([0.2] * 5000, busy_time_s=noisy(5000, 0.15 + 0.01 * r, seed=r))
        for r in range(2)
    }
    straggler = find_straggler(ranks, HOSTS, np.arange(1, 5001))
    assert straggler is not None and (straggler.rank, straggler.named) == (1, True)


@pytest.mark.parametrize(("wins", "trials", "expected"), [(0, 9, 1.0), (2, 2, 0.25), (1, 2, 0.75)])
def test_binomial_tail(wins: int, trials: int, expected: float):
    assert binomial_tail(wins, trials, 0.5) == pytest.approx(expected)


def test_half_a_per_cent_is_not_worth_a_name():
    straggler = find_straggler(busy_ranks(0.005), HOSTS, WINDOW)
    assert straggler is not None and not straggler.named


def test_one_rank_has_no_straggler():
    assert find_straggler({0: make_steps([0.2] * 9)}, HOSTS, WINDOW) is None


def two_stages(excess: float, ranks: int = 8, n: int = 60) -> dict[int, Steps]:
    """Half of the ranks do twice the work of the others; the last one is `excess` busier."""
    steps_of: dict[int, Steps] = {}
    for rank in range(ranks):
        work = 0.1 if rank < ranks // 2 else 0.2
        factor = work * (1 + (excess if rank == ranks - 1 else 0))
        busy = [factor * b for b in noisy(n, 1.0, 0.01, seed=rank)]
        steps_of[rank] = make_steps([0.3] * n, busy_time_s=busy)
    return steps_of


STAGES = {rank: rank // 4 for rank in range(8)}


def test_stages_of_a_pipeline_are_not_held_against_each_other():
    unaware = find_straggler(two_stages(0.0), HOSTS, WINDOW)
    assert unaware is not None and unaware.excess > 0.3
    straggler = find_straggler(two_stages(0.0), HOSTS, WINDOW, STAGES)
    assert straggler is not None and not straggler.named and abs(straggler.excess) < 0.02


def test_the_busiest_rank_of_a_stage_is_named():
    straggler = find_straggler(two_stages(0.10), HOSTS, WINDOW, STAGES)
    assert straggler is not None
    assert (straggler.rank, straggler.stage, straggler.named) == (7, 1, True)
    assert straggler.excess == pytest.approx(0.10, abs=0.02)


def test_a_slow_rank_of_the_lighter_stage_is_found_too():
    ranks = two_stages(0.0)
    ranks[2] = make_steps([0.3] * 60, busy_time_s=noisy(60, 0.11, 0.001, seed=9))
    straggler = find_straggler(ranks, HOSTS, WINDOW, STAGES)
    assert straggler is not None
    assert (straggler.rank, straggler.stage, straggler.named) == (2, 0, True)


def test_a_rank_that_is_alone_in_its_stage_is_judged_by_nobody():
    alone = {rank: rank for rank in range(8)}
    assert find_straggler(two_stages(0.5), HOSTS, WINDOW, alone) is None
    mixed = {rank: 0 if rank < 7 else 1 for rank in range(8)}
    straggler = find_straggler(two_stages(0.5), HOSTS, WINDOW, mixed)
    assert straggler is not None and straggler.rank != 7


def test_few_are_blamed_in_a_pipeline_of_equal_stages():
    blamed = 0
    for seed in range(60):
        ranks = {
            r: make_steps([0.2] * 60, busy_time_s=noisy(60, 0.15, 0.03, seed=seed * 8 + r))
            for r in range(8)
        }
        straggler = find_straggler(ranks, HOSTS, WINDOW, {rank: rank // 2 for rank in ranks})
        blamed += straggler is not None and straggler.named
    assert blamed <= 3


def test_summaries_name_the_stage():
    summaries = rank_summaries(two_stages(0.0), HOSTS, WINDOW, STAGES)
    assert [summary.stage for summary in summaries] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_shares_of_tensor_pipeline_and_data_ranks_add_up_to_the_batch():
    """2 x 2 x 2 ranks: four ranks share a replica's 1000 tokens and tell its loss."""
    loss_of_replica = (2.0, 4.0)
    ranks = {
        (pp * 2 + dp) * 2 + tp: make_steps([1.0], tokens=[1000 / 4], loss=[loss_of_replica[dp]])
        for pp in range(2)
        for dp in range(2)
        for tp in range(2)
    }
    merged = merge_ranks(ranks)
    assert list(merged["tokens"]) == [2000.0]
    assert list(merged["loss"]) == [3.0]


def test_the_loss_is_weighted_by_the_tokens_of_each_replica():
    ranks = {
        rank: make_steps([1.0], tokens=[tokens / 2], loss=[loss])
        for rank, (tokens, loss) in enumerate([(300, 2.0), (300, 2.0), (100, 6.0), (100, 6.0)])
    }
    merged = merge_ranks(ranks)
    assert list(merged["tokens"]) == [400.0] and list(merged["loss"]) == [3.0]


def test_padding_of_one_rank_does_not_shift_the_loss():
    """Each rank relates its sum to the mean count, so equal samples weigh the same."""
    ranks = {
        rank: make_steps([1.0], tokens=[tokens], samples=[4.0], loss=[loss])
        for rank, (tokens, loss) in enumerate([(100, 2.0), (20, 0.5)])
    }
    merged = merge_ranks(ranks)
    assert list(merged["loss"]) == [1.25] and list(merged["tokens"]) == [120.0]


def test_merging_takes_the_longest_time_and_sums_tokens():
    ranks = {
        0: make_steps([1.0, 2.0], tokens=[10, 10], loss=[4.0, 2.0], comm_wait_s=[0.1, 0.1]),
        1: make_steps([1.5, 1.0], tokens=[30, 30], loss=[0.0, 6.0], comm_wait_s=[0.3, 0.5]),
    }
    merged = merge_ranks(ranks)
    assert list(merged["step_time_s"]) == [1.5, 2.0]
    assert list(merged["tokens"]) == [40, 40]
    assert list(merged["loss"]) == pytest.approx([1.0, 5.0])
    assert list(merged["comm_wait_s"]) == pytest.approx([0.2, 0.3])


def test_only_steps_that_every_rank_finished_count():
    merged = merge_ranks({0: make_steps([1.0] * 5), 1: make_steps([1.0] * 3)})
    assert list(merged.index) == [1, 2, 3]


def test_no_rank_gives_no_steps():
    assert len(merge_ranks({})) == 0


def test_one_unknown_loss_makes_the_steps_loss_unknown():
    ranks = {
        0: make_steps([1.0], tokens=[10], loss=[float("nan")]),
        1: make_steps([1.0], tokens=[10], loss=[2.0]),
    }
    assert np.isnan(merge_ranks(ranks)["loss"][0])


def test_summaries_look_only_at_the_window():
    ranks = {0: make_steps([9.0, 1.0, 1.0], busy_time_s=[9.0, 0.5, 0.5])}
    (summary,) = rank_summaries(ranks, {0: "a"}, np.array([2, 3]))
    assert summary.busy_time_s == 0.5 and summary.comm_wait_s is None
