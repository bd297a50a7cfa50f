"""Robust statistics, and an interval that covers what it claims."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.stats import group_medians, median_interval, summarize


def test_mad_of_a_normal_sample_estimates_its_deviation():
    values = np.random.default_rng(1).normal(10.0, 0.5, 20_000)
    assert summarize(values).relative_spread == pytest.approx(0.05, rel=0.03)


def test_jitter_tax_is_what_spikes_add_to_the_mean():
    values = np.array([1.0] * 9 + [2.0])
    assert summarize(values).jitter_overhead == pytest.approx(0.1)


def correlated(n: int, rho: float, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """n values around 1 whose neighbours correlate by rho."""
    noise = rng.normal(size=n + 50)
    values = np.empty(n + 50)
    values[0] = noise[0]
    for i in range(1, n + 50):
        values[i] = rho * values[i - 1] + (1 - rho * rho) ** 0.5 * noise[i]
    return 1 + 0.01 * values[50:]


@pytest.mark.parametrize(
    ("n", "rho", "least"),
    [(20, 0.0, 0.87), (30, 0.0, 0.87), (60, 0.0, 0.87), (60, 0.7, 0.75), (200, 0.7, 0.82)],
)
def test_the_interval_covers_the_true_median_about_as_often_as_it_says(
    n: int, rho: float, least: float
):
    rng = np.random.default_rng(2)
    trials = [median_interval(correlated(n, rho, rng), seed) for seed in range(120)]
    covered = sum(t is not None and t[0] <= 1.0 <= t[1] for t in trials)
    assert least <= covered / 120 <= 0.998


def test_correlated_steps_get_a_wider_interval_than_their_shuffled_copy():
    rng = np.random.default_rng(3)
    slow = np.repeat(rng.normal(1.0, 0.02, 40), 5)
    shuffled = rng.permutation(slow)
    wide, narrow = median_interval(slow), median_interval(shuffled)
    assert wide is not None and narrow is not None
    assert wide[1] - wide[0] > 1.3 * (narrow[1] - narrow[0])


def test_fewer_than_four_blocks_give_no_interval():
    assert median_interval(np.ones(19)) is None


def test_a_million_steps_are_summarized_at_once():
    values = np.random.default_rng(0).normal(1.0, 0.01, 1_000_000)
    summary = summarize(values)
    assert summary.low is not None and summary.low < 1.0005


def test_the_interval_of_a_long_skewed_series_holds_its_own_median_and_the_true_one():
    rng = np.random.default_rng(5)
    truth, covered = 0.5, 0
    for _ in range(40):
        values = truth * rng.lognormal(0, 0.4, 6000)
        low, high = median_interval(values) or (np.inf, -np.inf)
        assert low <= np.median(values) <= high < 1.05 * truth
        covered += low <= truth <= high
    assert covered >= 35


def test_the_interval_of_a_long_series_knows_of_correlated_neighbours():
    rng = np.random.default_rng(6)
    trials = [median_interval(correlated(6000, 0.8, rng)) for _ in range(40)]
    assert sum(t is not None and t[0] <= 1.0 <= t[1] for t in trials) >= 35


def test_group_medians_keep_order_and_level():
    assert list(group_medians(np.arange(10.0), 5)) == [0.5, 2.5, 4.5, 6.5, 8.5]
    assert len(group_medians(np.arange(11.0), 5)) <= 5


@given(st.lists(st.floats(0.001, 1e3), min_size=1, max_size=60))
def test_order_of_the_figures_holds(values: list[float]):
    s = summarize(np.array(values))
    assert min(values) <= s.p05 <= s.median <= s.p95 <= max(values) * (1 + 1e-12)
    if s.low is not None and s.high is not None:
        assert s.low <= s.high
