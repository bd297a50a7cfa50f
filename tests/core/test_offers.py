"""Days, money, energy and goodput: each follows from its formula, and what is unknown stays unknown."""

from __future__ import annotations

import pytest

from paceline.core.offers import Failures, Prices, bill


def test_days_and_hours_follow_from_the_rate():
    found = bill(1e12, 1e6, 100, None, Prices())
    assert found.days == pytest.approx(1e6 / 86400) and found.device_hours == pytest.approx(
        1e8 / 3600
    )
    assert (found.cost, found.energy_kwh, found.carbon_kg, found.goodput) == (None,) * 4


def test_money_and_energy_scale_with_their_prices():
    prices = Prices(per_device_hour=2.0, spot_per_device_hour=1.0, pue=1.25, carbon_g_per_kwh=400)
    found = bill(3.6e9, 1e6, 10, 700, prices)
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
    plain, failing = (bill(1e12, 1e6, 1000, None, Prices(), f) for f in (None, failures))
    assert failing.goodput is not None
    assert failing.days == pytest.approx(plain.days / failing.goodput)
