"""What the time model misses is learned along the axes; doubt stays where nothing was measured."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.estimate.fit.interval import Z80
from paceline.layouts.search.residuals import SHARED_SD, LayoutPrior, Posterior, posterior_after

GRID = np.array([[a, b] for a in range(4) for b in range(4)], dtype=float)
"""Two axes of four values."""


def prior(predicted: float = 1.0, loadings: int = 1) -> LayoutPrior:
    return LayoutPrior(GRID, np.full(len(GRID), np.log(predicted)), np.zeros((len(GRID), loadings)))


def after(rows: list[int], seconds: np.ndarray, expected: LayoutPrior | None = None) -> Posterior:
    return posterior_after(expected or prior(), rows, np.log(seconds[rows]))


def test_before_any_run_the_prediction_stands_with_wide_bounds():
    belief = posterior_after(prior(2.0), [], np.array([]))
    assert np.allclose(np.exp(belief.mean), 2.0) and (belief.sd > SHARED_SD).all()


def test_a_factor_that_all_share_is_learned_from_one_run():
    belief = after([5], np.full(16, 2.0))
    assert np.exp(belief.mean) == pytest.approx(np.full(16, 2.0), rel=0.15)
    assert belief.sd.max() < SHARED_SD and belief.sd[5] == belief.sd.min()


def test_a_slope_along_an_axis_is_carried_to_what_was_not_measured():
    truth = np.exp(0.2 * GRID[:, 0] - 0.1 * GRID[:, 1])
    belief = after([0, 3, 12, 5], truth)
    assert np.exp(belief.mean)[15] == pytest.approx(truth[15], rel=0.08)


def test_uncertain_coefficients_move_what_they_load_on():
    loads = np.where(GRID[:, :1] > 1, 0.5, 0.0)
    expected = LayoutPrior(GRID, np.zeros(16), loads)
    truth = np.where(GRID[:, 0] > 1, 1.5, 1.0)
    belief = after([0, 1, 8], truth, expected)
    assert np.exp(belief.mean)[15] == pytest.approx(1.5, rel=0.15)
    assert np.exp(belief.mean)[2] == pytest.approx(1.0, rel=0.1)


def test_repeats_narrow_the_doubt_about_their_layout():
    truth = np.ones(16)
    once, often = after([0, 5], truth), after([0, 5, 5, 5], truth)
    assert often.sd[5] < once.sd[5]


def test_noise_is_learned_from_repeats():
    random, rows = np.random.default_rng(0), [r for r in range(16) for _ in range(3)]
    calm, noisy = (
        posterior_after(prior(), rows, random.normal(0, sd, len(rows))).noise_sd
        for sd in (0.003, 0.05)
    )
    assert calm < 0.01 < 0.025 < noisy


def test_most_true_times_lie_in_their_intervals():
    inside: list[bool] = []
    for seed in range(30):
        random = np.random.default_rng(seed)
        truth = np.exp(GRID @ random.normal(0, 0.1, 2) + random.normal(0, 0.03, 16))
        rows = random.choice(16, 6, replace=False).tolist()
        belief = after(rows, truth)
        far = np.abs(belief.mean - np.log(truth)) / belief.sd
        inside += [far[row] < Z80 for row in range(16) if row not in rows]
    assert 0.65 < np.mean(inside) < 0.98
