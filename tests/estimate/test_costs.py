"""Days, money, energy, goodput: each follows from its formula; what is unknown stays unknown."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.estimate.costs import Failures, Prices, checkpoint_plan, training_cost

SECONDS = st.floats(1e-3, 1e7)
CLUSTERS = st.builds(
    Failures, device_mtbf_h=st.floats(1, 1e7), restart_s=st.floats(0, 1e6),
    checkpoint_s=st.just(0.0) | st.floats(1e-3, 1e5),
)  # fmt: skip


def test_days_and_hours_follow_from_the_rate():
    found = training_cost(1e12, 1e6, 100, None, Prices())
    assert found.days == pytest.approx(1e6 / 86400) and found.device_hours == pytest.approx(
        1e8 / 3600
    )
    assert (found.cost, found.energy_kwh, found.carbon_kg, found.goodput) == (None,) * 4


def test_money_and_energy_scale_with_their_prices():
    prices = Prices(per_device_hour=2.0, spot_per_device_hour=1.0, pue=1.25, carbon_g_per_kwh=400)
    found = training_cost(3.6e9, 1e6, 10, 700, prices)
    assert found.device_hours == pytest.approx(10)
    assert (found.cost, found.spot_cost) == (pytest.approx(20), pytest.approx(10))
    assert found.energy_kwh == pytest.approx(10 * 0.7 * 1.25)
    assert found.carbon_kg == pytest.approx(10 * 0.7 * 1.25 * 0.4)


def test_the_best_interval_loses_least():
    failures = Failures(device_mtbf_h=50_000, checkpoint_s=60, restart_s=600)
    best = failures.best_interval_s(16_384)
    assert best == pytest.approx((2 * 60 * 50_000 * 3600 / 16_384) ** 0.5)
    at_best = failures.goodput(16_384)
    for interval in (best / 2, best * 2):
        assert failures.model_copy(update={"interval_s": interval}).goodput(16_384) < at_best
    assert 0.8 < at_best < failures.goodput(64) < 1


def test_failures_stretch_the_training():
    failures = Failures(device_mtbf_h=1000)
    plain, failing = (training_cost(1e12, 1e6, 1000, None, Prices(), f) for f in (None, failures))
    assert failing.goodput is not None
    assert failing.days == pytest.approx(plain.days / failing.goodput)


@settings(deadline=None)
@given(CLUSTERS, st.integers(1, 200_000), SECONDS)
def test_no_interval_beats_youngs_and_goodput_is_a_share(
    failures: Failures, devices: int, interval: float
):
    own = failures.model_copy(update={"interval_s": interval})
    best = failures.goodput(devices)
    assert 0 < own.goodput(devices) <= best * (1 + 1e-12) <= 1 + 1e-12
    assert own.at_best() == failures
    assert own.goodput(devices) >= own.goodput(2 * devices)


@settings(deadline=None)
@given(CLUSTERS, st.integers(1, 200_000), st.floats(0.1, 10))
def test_youngs_interval_is_where_saving_and_losing_cost_the_same(
    failures: Failures, devices: int, factor: float
):
    """The loss C/i + i/(2 MTBF) at `factor` x the best is (factor + 1/factor)/2 of the least."""

    def loss(interval: float) -> float:
        known = failures.model_copy(update={"interval_s": interval, "restart_s": 0.0})
        return 1 / known.goodput(devices) - 1

    best = failures.best_interval_s(devices)
    if best:
        expected = (factor + 1 / factor) / 2 * loss(best)
        assert loss(factor * best) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_a_free_checkpoint_is_best_saved_all_the_time():
    free = Failures(device_mtbf_h=1000, checkpoint_s=0, restart_s=36)
    assert free.best_interval_s(100) == 0
    assert free.goodput(100) == pytest.approx(1 / (1 + 36 / 36_000))


def test_ones_own_interval_counts_and_youngs_stands_beside_it():
    hourly = Failures(device_mtbf_h=50_000, checkpoint_s=60, interval_s=3600)
    found = training_cost(1e12, 1e6, 4096, None, Prices(), hourly)
    saving = found.checkpoints
    assert saving is not None and saving == checkpoint_plan(hourly, 4096)
    assert saving.interval_s == 3600 and found.goodput == saving.goodput == hourly.goodput(4096)
    assert saving.young_interval_s == pytest.approx((2 * 60 * 50_000 * 3600 / 4096) ** 0.5)
    assert saving.young_goodput == hourly.at_best().goodput(4096) > saving.goodput
    without = training_cost(1e12, 1e6, 4096, None, Prices(), hourly.at_best())
    assert without.checkpoints is not None and without.days < found.days
    assert without.checkpoints.interval_s == without.checkpoints.young_interval_s
    assert training_cost(1e12, 1e6, 4096, None, Prices()).checkpoints is None
