"""Looks at pairs: what decides, what goes on, what is given up, and how often wrongly."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from paceline.compare.sequential.interim_analysis import (
    Design,
    PairsAnalysis,
    analysis_points,
    analyze_at,
    analyze_pairs,
)

DESIGN = Design(16)


def pairs(change: float, n: int, deviation: float = 0.004, seed: int = 0) -> list[list[float]]:
    """n runs of each side; the second is truly slower by `change`."""
    logs = np.random.default_rng(seed).normal(0, deviation, (2, n))
    return (0.2 * np.exp(logs) * np.array([[1.0], [1 + change]])).tolist()


def until_the_end(change: float, deviation: float, seed: int, design: Design) -> PairsAnalysis:
    first, second = pairs(change, design.max_pairs, deviation, seed)
    looks = (analyze_at(first[:n], second[:n], design) for n in analysis_points(design.max_pairs))
    return next(look for look in looks if look.conclusion != "continue")


def test_a_large_difference_is_decided_at_the_first_looks():
    look = until_the_end(0.05, 0.004, 0, DESIGN)
    assert look.conclusion == "higher" and look.num_pairs <= 4
    assert look.low <= 1.05 <= look.high


def test_what_both_runs_of_a_pair_share_is_gone():
    day = np.exp(np.random.default_rng(3).normal(0, 0.05, 5))
    first, second = (np.array(side) * day for side in pairs(0.02, 5, 0.002))
    assert analyze_at(first.tolist(), second.tolist(), DESIGN).conclusion == "higher"


def test_the_last_look_asks_for_nothing_more():
    first = [0.2, 0.202] * 8
    second = [0.2 * (1.008 + 0.02 * (at % 3 - 1)) for at in range(16)]
    assert analyze_at(first[:14], second[:14], DESIGN).conclusion in ("continue", "futile")
    assert analyze_at(first, second, DESIGN).conclusion == "undecided"


def test_a_hopeless_series_is_given_up_and_says_what_is_still_possible():
    look = until_the_end(0.0, 0.03, 1, DESIGN)
    assert look.conclusion == "futile" and look.num_pairs < 16
    assert look.largest == pytest.approx(max(1 - look.low, look.high - 1)) and look.largest > 0.02


def test_identical_values_are_the_same_and_need_five_pairs():
    assert analyze_at([0.2] * 4, [0.2] * 4, DESIGN).conclusion == "continue"
    assert analyze_at([0.2] * 5, [0.2] * 5, DESIGN).conclusion == "same"


def test_rounding_widens_the_margin():
    first, second = pairs(0.02, 8, 0.001)
    assert analyze_at(first, second, DESIGN).conclusion == "higher"
    assert analyze_at(first, second, Design(16, resolution=0.03)).conclusion == "same"


def test_every_look_of_the_plan_is_kept_up_to_the_pairs_there_are():
    first, second = pairs(0.0, 7)
    assert [look.num_pairs for look in analyze_pairs(first, second, DESIGN)] == [3, 4, 5, 6]
    assert analyze_pairs(first[:2], second[:2], DESIGN) == []


def test_a_series_asked_after_every_pair_crosses_no_more_often_than_its_error():
    made = range(1, 17)
    last = {n: analyze_pairs([0.2] * n, [0.2] * n, DESIGN)[-1] for n in made if n >= 3}
    levels = {look.num_pairs: look.level for look in last.values()}
    rng = np.random.default_rng(1)
    z = rng.standard_normal((400_000, 16)).cumsum(axis=1) / np.sqrt(made)
    crossed = [np.abs(z[:, n - 1]) > stats.norm.isf(level / 2) for n, level in levels.items()]
    # Three standard errors of 400,000 series are 0.1 %.
    assert np.any(crossed, axis=0).mean() == pytest.approx(0.04, abs=0.001)


@pytest.mark.parametrize("deviation", [0.004, 0.012])
def test_over_all_looks_false_answers_stay_below_five_per_cent(deviation: float):
    answers = [until_the_end(0.0, deviation, seed, DESIGN).conclusion for seed in range(300)]
    assert sum(answer in ("higher", "lower") for answer in answers) / 300 <= 0.05
    at_margin = [until_the_end(0.01, deviation, seed, DESIGN).conclusion for seed in range(300)]
    assert at_margin.count("same") / 300 <= 0.06
    slower = [until_the_end(0.02, 0.004, seed, DESIGN) for seed in range(100)]
    assert sum(look.conclusion == "higher" for look in slower) >= 97
    assert np.mean([look.num_pairs for look in slower]) < 5
