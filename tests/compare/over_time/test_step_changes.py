"""Step changes are found where they are, and noise is left alone."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.compare.over_time.step_changes import fit_series, neighbor_noise, potts_breaks
from paceline.core.steps import FloatColumn
from tests.compare.over_time.step_series import (
    NOISE,
    drifting,
    found_at,
    lasting_noise,
    noise,
    stepped,
)


def cost(y: FloatColumn, breaks: list[int] | tuple[int, ...], price: float) -> float:
    """Sum of the distances from each level's median, and the price of the breaks."""
    parts = [y[a:b] for a, b in pairwise([0, *breaks, len(y)])]
    return sum(float(np.abs(p - np.median(p)).sum()) for p in parts) + price * len(breaks)


def divisions(n: int) -> list[tuple[int, ...]]:
    """Every way to cut n rows into levels of two or more."""
    candidates = [cut for k in range(n // 2) for cut in combinations(range(2, n - 1), k)]
    return [c for c in candidates if all(b - a >= 2 for a, b in pairwise([0, *c, n]))]


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=9), st.sampled_from([0.1, 0.5, 1.0, 3.0]))
@settings(max_examples=150, deadline=None)
def test_no_division_is_cheaper_than_the_one_found(values: list[float], price: float):
    y = np.array(values)
    breaks = potts_breaks(y, price)
    assert tuple(breaks) in divisions(len(y))
    cheapest = min(cost(y, breaks, price) for breaks in divisions(len(y)))
    assert cost(y, breaks, price) == pytest.approx(cheapest, abs=1e-9)


def test_a_step_is_found_with_its_size_and_interval():
    fit = fit_series(stepped(20, 14, 1.021))
    (change,) = fit.changes
    assert (change.at, change.n_before, change.n_after) == (20, 20, 14)
    assert change.low < 1.021 < change.high and change.high - change.low < 0.01
    assert fit.levels[1].value / fit.levels[0].value == pytest.approx(change.ratio)
    assert fit.drift is None and fit.noise == pytest.approx(NOISE, rel=0.4)


def test_faster_is_a_step_as_well():
    (change,) = fit_series(stepped(12, 12, 0.97)).changes
    assert change.at == 12 and change.high < 1


def test_a_passing_slowdown_has_two_ends():
    values = noise(30, 1) * np.repeat([1, 1.05, 1], [12, 6, 12])
    assert [change.at for change in fit_series(values).changes] == [12, 18]


def false_alarms(n: int, spread: float, trials: int) -> float:
    """Share of series without a change in which a step or a drift is found."""
    fits = [fit_series(noise(n, seed, spread)) for seed in range(trials)]
    return sum(bool(fit.changes) or fit.drift is not None for fit in fits) / trials


@pytest.mark.parametrize("n", [20, 30, 50])
def test_noise_alone_is_called_a_change_in_one_series_of_a_hundred_at_most(n: int):
    assert false_alarms(n, NOISE, 400) <= 0.01


def test_much_noise_is_no_reason_for_false_alarms():
    assert false_alarms(20, 5 * NOISE, 400) <= 0.0175  # 1% and two standard errors of 400 trials


@pytest.mark.parametrize("n_before", [5, 15, 40])
def test_two_per_cent_over_five_runs_are_found_in_95_of_100_series(n_before: int):
    fits = [fit_series(stepped(n_before, 5, 1.02, seed)) for seed in range(400)]
    assert sum(found_at(fit, n_before) for fit in fits) >= 0.95 * 400


def test_the_interval_covers_the_true_size_in_about_95_of_100_series():
    changes = [fit_series(stepped(15, 15, 1.02, seed)).changes for seed in range(400)]
    covered = [c[0].low <= 1.02 <= c[0].high for c in changes if len(c) == 1]
    assert 0.92 <= np.mean(covered) <= 0.98


def test_what_is_called_findable_is_found_in_9_of_10_cases():
    num_found = 0
    for seed in range(200):
        promised = fit_series(noise(20, seed)).findable
        assert promised is not None
        num_found += bool(fit_series(stepped(15, 5, 1 + promised, 1000 + seed)).changes)
    assert num_found >= 0.88 * 200


def test_a_change_within_the_margin_is_not_named():
    assert fit_series(stepped(30, 30, 1.006)).changes == ()
    assert len(fit_series(stepped(30, 30, 1.006), margin=0.002).changes) == 1


def test_one_disturbed_run_is_no_step_and_hides_none():
    values = stepped(10, 10, 1.03, seed=3)
    values[4] *= 1.3
    assert [change.at for change in fit_series(values).changes] == [10]


def test_one_slow_run_at_the_end_is_no_step_yet():
    values = noise(20, 2)
    values[-1] *= 1.05
    assert fit_series(values).changes == ()


def test_a_slow_drift_is_named_as_such_and_not_as_stairs():
    fit = fit_series(drifting(40, 1.03, seed=4))
    assert fit.changes == () and fit.drift is not None
    assert fit.drift.low < 1.03 < fit.drift.high
    assert fit.noise == pytest.approx(NOISE, rel=0.4)
    assert fit.fitted[-1] / fit.fitted[0] == pytest.approx(fit.drift.ratio)


def test_a_step_is_not_called_a_drift():
    fits = [fit_series(stepped(15, 15, 1.03, seed)) for seed in range(100)]
    assert all(fit.drift is None for fit in fits)


def test_scatter_that_lasts_from_run_to_run_raises_few_alarms():
    alarms = [bool(fit_series(lasting_noise(20, seed)).changes) for seed in range(400)]
    assert sum(alarms) <= 0.01 * 400


@pytest.mark.parametrize("n", [1, 2, 3])
def test_too_few_runs_have_one_level(n: int):
    fit = fit_series(np.array([0.2, 0.4, 0.8][:n]))
    assert (len(fit.levels), fit.changes, fit.drift, fit.findable) == (1, (), None, None)


def test_equal_values_are_no_series_of_steps():
    fit = fit_series(np.full(12, 0.25))
    assert fit.changes == () and fit.levels[0].value == pytest.approx(0.25) and fit.noise == 0


def test_equal_values_before_and_after_are_a_step():
    (change,) = fit_series(np.repeat([0.25, 0.27], 6)).changes
    assert change.at == 6 and change.ratio == pytest.approx(1.08)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_any_series_is_cut_into_levels_of_two_or_more(values: list[float]):
    fit = fit_series(np.array(values))
    ends = [level.stop for level in fit.levels]
    assert ends[-1] == len(values) == len(fit.fitted)
    assert [change.at for change in fit.changes] == ends[:-1]
    assert all(level.n >= 2 for level in fit.levels) or len(fit.levels) == 1


@pytest.mark.parametrize("factor", [1e-6, 1000.0])
def test_the_unit_does_not_matter(factor: float):
    plain, scaled = fit_series(stepped(9, 9, 1.03)), fit_series(factor * stepped(9, 9, 1.03))
    assert plain.changes[0].ratio == pytest.approx(scaled.changes[0].ratio)


def test_a_step_hardly_moves_the_scatter():
    y = np.log(stepped(20, 20, 1.2))
    assert neighbor_noise(y) == pytest.approx(NOISE, rel=0.5)
    assert neighbor_noise(y[:1]) > 0


def test_thousands_of_runs_take_no_time_to_speak_of():
    values = stepped(1500, 1500, 1.01, seed=9)
    (change,) = fit_series(values, margin=0.005).changes
    assert abs(change.at - 1500) <= 5


@pytest.mark.parametrize(("n", "most"), [(20, 4), (50, 10)])
def test_disturbed_runs_beside_each_other_make_no_level(n: int, most: int):
    rng = np.random.default_rng(17)
    steps = 0
    for seed in range(100):
        values = noise(n, seed)
        disturbed = rng.random(n) < 0.1
        values[disturbed] *= 1 + rng.uniform(0.02, 0.1, int(disturbed.sum()))
        fit = fit_series(values)
        steps += bool(fit.changes or fit.drift)
    assert steps <= most


@pytest.mark.parametrize("n", [20, 60])
def test_runs_with_two_states_in_any_order_have_no_steps(n: int):
    rng = np.random.default_rng(7)
    alarms = 0
    for _ in range(60):
        logs = rng.normal(0, 0.002, n) + 0.02 * (rng.random(n) < 0.3)
        alarms += bool(fit_series(np.exp(logs)).changes)
    assert alarms <= 3


@pytest.mark.parametrize("n_before", [6, 10, 30])
@pytest.mark.parametrize("ratio", [1.05, 2.0])
def test_a_clear_slowdown_of_the_last_three_runs_is_found(n_before: int, ratio: float):
    found = [
        found_at(fit_series(stepped(n_before, 3, ratio, seed)), n_before) for seed in range(40)
    ]
    assert sum(found) >= 38


def test_disturbed_runs_before_a_slowdown_of_three_runs_do_not_hide_it():
    found = 0
    for seed in range(40):
        values = stepped(30, 3, 1.05, seed)
        values[[5, 20]] *= 1.1
        found += found_at(fit_series(values), 30)
    assert found >= 34
