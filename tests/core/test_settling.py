"""A temporary level and a slowly fading warm-up are reported."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from paceline.core.result import WindowRecord
from paceline.core.stats import median_interval
from paceline.core.window import (
    choose_window,
    level_shift,
    relative_drift,
    settling_steps,
    steady_window,
    temporary_level,
)
from tests.example import make_steps

Times = npt.NDArray[np.float64]


def autoregressive(rng: np.random.Generator, n: int, rho: float, deviation: float) -> Times:
    """n values around 0 whose neighbours correlate by rho."""
    fresh = rng.normal(0, deviation * (1 - rho * rho) ** 0.5, n + 60)
    for at in range(1, n + 60):
        fresh[at] += rho * fresh[at - 1]
    return fresh[60:]


def throttled(rng: np.random.Generator, excess: float, begins: float, n: int = 120) -> Times:
    """Steps of 0.5 s, a short warm-up, and `excess` more from a share of the run on."""
    times = 1 + autoregressive(rng, n, 0.4, 0.004) + 0.3 * np.exp(-np.arange(n) / 2)
    times[int(begins * n) :] *= 1 + excess
    times[rng.random(n) < 0.03] *= 1.3
    return 0.5 * times


def record_of(times: Times) -> WindowRecord:
    return steady_window(make_steps(times.tolist())).record


@pytest.mark.parametrize("begins", [0.2, 0.4, 0.7, 0.9])
@pytest.mark.parametrize("excess", [0.03, 0.08])
def test_a_machine_that_throttles_is_told_wherever_it_begins(begins: float, excess: float):
    rng = np.random.default_rng(1)
    records = [record_of(throttled(rng, excess, begins)) for _ in range(20)]
    told = [record for record in records if record.shift]
    assert len(told) >= 18
    for record in told:
        assert record.shift and record.shift.ratio == pytest.approx(1 + excess, abs=0.012)
        assert abs(record.shift.first_step - begins * 120) <= 8
        assert any("level-shift" in remark and "slower" in remark for remark in record.remarks)


def test_a_faster_level_that_was_taken_for_warm_up_is_not_dropped_in_silence():
    record = record_of(throttled(np.random.default_rng(2), 0.06, 0.4))
    assert record.shift and record.shift.left_out
    assert "steps before it are left out" in record.remarks[0]


def test_a_shift_is_told_of_a_window_that_was_asked_for():
    steps = make_steps(throttled(np.random.default_rng(3), 0.08, 0.5).tolist())
    record = choose_window(steps, "20:110").record
    assert record.shift and abs(record.shift.first_step - 61) <= 1
    assert choose_window(steps, "70:110").record.shift is None


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8])
def test_noise_and_spikes_alone_change_no_level(rho: float):
    rng = np.random.default_rng(4)
    shifts = 0
    for _ in range(60):
        noise = 1 + autoregressive(rng, 150, rho, 0.008)
        noise[rng.random(150) < 0.1] *= 1.4
        shifts += level_shift(noise) is not None
    assert shifts <= 3


def recovering(rng: np.random.Generator, n: int, size: float, gradual: bool) -> Times:
    """Steps that are slower by `size` from 40% of the run on, for a quarter of it."""
    edge = 0.08 if gradual else 1e-9
    at = np.arange(n) / n - 0.4
    slow = np.clip(at / edge, 0, 1) * np.clip((0.25 - at) / edge, 0, 1)
    return 1 + autoregressive(rng, n, 0.3, 0.004) + size * slow


@pytest.mark.parametrize("gradual", [False, True])
@pytest.mark.parametrize("size", [0.03, 0.08])
@pytest.mark.parametrize("n", [40, 200, 3000])
def test_throttling_that_recovers_leads_to_a_warning(n: int, size: float, gradual: bool):
    rng = np.random.default_rng(1)
    records = [record_of(recovering(rng, n, size, gradual)) for _ in range(20)]
    warned = sum(bool(record.remarks) or record.state == "uneven" for record in records)
    assert warned >= (18 if n > 40 else 15)


def test_a_temporary_level_is_reported_with_its_steps():
    record = record_of(recovering(np.random.default_rng(1), 200, 0.03, False))
    assert record.shift and record.shift.last_step is not None
    assert abs(record.shift.first_step - 81) <= 1 and abs(record.shift.last_step - 130) <= 1
    assert record.shift.ratio == pytest.approx(1.03, abs=0.002)
    span = f"steps {record.shift.first_step} to {record.shift.last_step} are"
    assert span in record.remarks[-1] and "slower than the others" in record.remarks[-1]


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("n", [60, 200, 1000])
def test_noise_and_spikes_alone_are_no_temporary_level(rho: float, n: int):
    rng = np.random.default_rng(4)
    found = 0
    for _ in range(60):
        noise = 1 + autoregressive(rng, n, rho, 0.008)
        noise[rng.random(n) < 0.1] *= 1.4
        found += temporary_level(noise) is not None
    assert found <= (6 if (n, rho) == (60, 0.8) else 3)


def test_equal_steps_have_no_temporary_level():
    assert temporary_level(np.full(60, 0.5)) is None
    assert temporary_level(np.full(19, 0.5)) is None


def test_two_clocks_lead_to_a_warning_in_most_runs():
    rng, warned = np.random.default_rng(9), 0
    for _ in range(30):
        switches = rng.random(500) < np.where(np.arange(500) % 140 < 100, 1 / 100, 1 / 40)
        slow = np.cumsum(switches) % 2
        record = record_of(1 + autoregressive(rng, 500, 0.3, 0.003) + 0.04 * slow)
        warned += bool(record.remarks) or record.state == "uneven"
    assert warned >= 24


def test_a_long_warm_up_is_worth_a_warning():
    times = np.concatenate([np.linspace(1.0, 0.55, 40), np.full(60, 0.5)])
    assert any("long-warm-up: 40 of 100" in remark for remark in record_of(times).remarks)
    assert not record_of(np.concatenate([np.full(4, 1.0), np.full(96, 0.5)])).remarks


def fading(rng: np.random.Generator, n: int, tau: float, excess: float) -> Times:
    return 1 + autoregressive(rng, n, 0.3, 0.004) + excess * np.exp(-np.arange(n) / tau)


def test_a_warm_up_that_fades_slowly_is_waited_for_or_marked():
    rng = np.random.default_rng(5)
    off = covered = 0
    for _ in range(20):
        times = fading(rng, 200, 20, 0.1)
        window = steady_window(make_steps(times.tolist()))
        low, high = median_interval(times[window.rows]) or (0.0, 0.0)
        off += abs(np.median(times[window.rows]) - 1) > 0.003
        covered += low <= 1 <= high or bool(window.record.remarks)
    assert off == 0 and covered >= 18


def test_a_run_too_short_for_its_warm_up_is_called_drifting():
    rng = np.random.default_rng(6)
    records = [record_of(fading(rng, 100, 30, 0.3)) for _ in range(10)]
    assert all(record.remarks for record in records)
    assert sum(record.state == "drifting" for record in records) >= 5


def test_settled_steps_are_kept():
    rng = np.random.default_rng(7)
    left_out = [settling_steps(1 + autoregressive(rng, 100, 0.3, 0.004)) for _ in range(100)]
    assert all(settled for _, settled in left_out)
    assert np.mean([steps for steps, _ in left_out]) < 3


def test_correlated_steps_are_seldom_called_a_drift():
    rng = np.random.default_rng(8)
    drifting = 0
    for _ in range(60):
        drift, noise = relative_drift(1 + autoregressive(rng, 100, 0.8, 0.02))
        drifting += abs(drift) > max(0.01, 3 * noise)
    assert drifting <= 6
