"""Robust statistics, and an interval that covers what it claims."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.stats import median_interval, summarize


def test_mad_of_a_normal_sample_estimates_its_deviation():
    values = np.random.default_rng(1).normal(10.0, 0.5, 20_000)
    assert summarize(values).relative_spread == pytest.approx(0.05, rel=0.03)


def test_jitter_tax_is_what_spikes_add_to_the_mean():
    values = np.array([1.0] * 9 + [2.0])
    assert summarize(values).jitter_tax == pytest.approx(0.1)


def test_the_interval_covers_the_true_median_about_as_often_as_it_says():
    rng = np.random.default_rng(2)
    trials = [median_interval(rng.normal(1.0, 0.01, 60), seed) for seed in range(200)]
    covered = sum(t is not None and t[0] <= 1.0 <= t[1] for t in trials)
    assert 0.85 <= covered / 200 <= 0.995


def test_correlated_steps_get_a_wider_interval_than_their_shuffled_copy():
    rng = np.random.default_rng(3)
    slow = np.repeat(rng.normal(1.0, 0.02, 40), 5)
    shuffled = rng.permutation(slow)
    wide, narrow = median_interval(slow), median_interval(shuffled)
    assert wide is not None and narrow is not None
    assert wide[1] - wide[0] > 1.3 * (narrow[1] - narrow[0])


def test_fewer_than_two_blocks_give_no_interval():
    assert median_interval(np.ones(9)) is None


@given(st.lists(st.floats(0.001, 1e3), min_size=1, max_size=60))
def test_order_of_the_figures_holds(values: list[float]):
    s = summarize(np.array(values))
    assert min(values) <= s.p05 <= s.median <= s.p95 <= max(values) * (1 + 1e-12)
    if s.low is not None and s.high is not None:
        assert s.low <= s.high
