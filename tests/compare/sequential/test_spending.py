"""What each look may spend, against the definition and against simulated sums."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from paceline.compare.sequential.interim_analysis import (
    analysis_points,
    error_spent,
    nominal_levels,
)


def test_a_single_look_may_spend_everything():
    assert nominal_levels((7,), 0.05) == pytest.approx((0.05,), rel=1e-6)


def test_two_equal_looks_have_the_levels_of_the_published_plan():
    # Lan and DeMets (1983): alpha log(1 + (e - 1) t), two looks: z 2.157 and 2.201.
    first, second = nominal_levels((5, 10), 0.05)
    z = [NormalDist().inv_cdf(1 - level / 2) for level in (first, second)]
    assert z == pytest.approx([2.157, 2.201], abs=0.002)


def test_everything_is_spent_at_the_last_look_and_never_more():
    assert error_spent(0.05, 1.0) == pytest.approx(0.05) == error_spent(0.05, 1.7)
    assert error_spent(0.05, 0.0) == 0.0


def test_looks_are_close_at_first_and_end_with_the_last_pair():
    assert analysis_points(9) == (3, 4, 5, 6, 8, 9)
    assert analysis_points(3) == (3,)


@pytest.mark.parametrize("most", [5, 16])
def test_all_looks_together_cross_as_often_as_the_error_says(most: int):
    looks = analysis_points(most)
    sums = np.cumsum(np.random.default_rng(1).normal(size=(100_000, most)), axis=1)
    crossed = np.zeros(len(sums), dtype=bool)
    for look, level in zip(looks, nominal_levels(looks, 0.05), strict=True):
        crossed |= np.abs(sums[:, look - 1]) / look**0.5 > NormalDist().inv_cdf(1 - level / 2)
    assert crossed.mean() == pytest.approx(0.05, abs=0.003)
    unspent = np.abs(sums[:, [look - 1 for look in looks]]) / np.sqrt(looks) > 1.96
    assert unspent.any(axis=1).mean() > 0.08, "looking without spending is the fault meant here"
