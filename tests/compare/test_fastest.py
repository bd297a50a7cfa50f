"""Confidence in the fastest of several options, compared with simulated truth."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.compare.significance import rank_options


def test_without_repeats_nothing_is_claimed():
    assert rank_options([[1.0], [1.1], [1.2]], 0) is None


def test_chances_add_up_and_follow_the_distance():
    clear = rank_options([[1.0, 1.001, 0.999], [1.1, 1.101, 1.099], [1.2, 1.2, 1.201]], 0)
    assert clear is not None and clear[0].chance > 0.99
    close = rank_options([[1.0, 1.004, 0.996], [1.001, 0.998, 1.005], [1.2, 1.2, 1.201]], 0)
    assert close is not None and sum(each.chance for each in close) == pytest.approx(1.0)
    assert (
        0.4 < close[0].chance < 0.8 and close[1].faster_than_best > 0.2 > close[2].faster_than_best
    )


def test_one_repeat_tells_the_scatter_of_the_others():
    few = rank_options([[1.0, 1.05], [1.02]], 0)
    assert few is not None and 0.3 < few[0].chance < 0.7


def test_a_stated_probability_comes_true_as_often():
    rng, stated, right = np.random.default_rng(5), [], []
    for _ in range(150):
        truths = rng.normal(0, 0.01, 5)
        runs = np.exp(truths[:, None] + rng.normal(0, 0.005, (5, 3)))
        best = int(np.argmin(np.median(runs, axis=1)))
        each = rank_options(runs.tolist(), best)
        assert each is not None
        stated.append(each[best].chance)
        right.append(best == int(np.argmin(truths)))
    assert np.mean(right) == pytest.approx(np.mean(stated), abs=0.08)


def test_options_that_vary_more_than_others_are_seldom_called_the_best():
    rng, wrong, stated, right = np.random.default_rng(6), 0, [], []
    for _ in range(100):
        truths = rng.exponential(0.03, 12)
        spreads = rng.permutation([0.004, 0.02] * 6)
        runs = np.exp(truths[:, None] + spreads[:, None] * rng.normal(size=(12, 2)))
        best = int(np.argmin(np.median(runs, axis=1)))
        each = rank_options(runs.tolist(), best)
        assert each is not None
        stated.append(each[best].chance)
        right.append(best == int(np.argmin(truths)))
        wrong += stated[-1] >= 0.9 and truths[best] - truths.min() > 0.005
    assert wrong <= 2
    assert np.mean(stated) - np.mean(right) < 0.17


@pytest.mark.parametrize(("num_layouts", "num_runs"), [(5, 2), (12, 3)])
def test_a_stated_probability_comes_true_where_spreads_differ_tenfold(
    num_layouts: int, num_runs: int
):
    rng, stated, right, sure = np.random.default_rng(8), [], [], []
    for _ in range(150):
        truths = rng.normal(0, 0.03, num_layouts)
        spreads = np.exp(rng.uniform(*np.log([0.005, 0.05]), num_layouts))
        runs = np.exp(truths[:, None] + spreads[:, None] * rng.normal(size=(num_layouts, num_runs)))
        best = int(np.argmin(np.median(runs, axis=1)))
        each = rank_options(runs.tolist(), best)
        assert each is not None
        stated.append(each[best].chance)
        right.append(best == int(np.argmin(truths)))
        sure += [truths[best] - truths.min() <= 0.005] if stated[-1] >= 0.9 else []
    assert np.mean(stated) - np.mean(right) < 0.05
    assert np.mean(sure) > 0.9


@pytest.mark.parametrize(("num_layouts", "num_repeated"), [(5, 1), (12, 1), (12, 2)])
def test_one_or_two_repeats_do_not_make_the_others_sure(num_layouts: int, num_repeated: int):
    """Two close runs of one layout made 20% of all layouts the best by 90%, mostly wrongly."""
    rng, sure, stated, right = np.random.default_rng(7), 0, [], []
    for _ in range(120):
        truths = rng.exponential(0.03, num_layouts)
        times = [
            np.exp(truth + rng.normal(0, 0.015, 2 if at < num_repeated else 1)).tolist()
            for at, truth in enumerate(truths)
        ]
        best = int(np.argmin([np.median(runs) for runs in times]))
        each = rank_options(times, best)
        assert each is not None
        stated.append(each[best].chance)
        right.append(best == int(np.argmin(truths)))
        sure += stated[-1] >= 0.9
    assert sure <= 6
    assert np.mean(stated) - np.mean(right) < 0.2
