"""Step times come back out of the average that a bar prints, or are not claimed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engines.log_reading.progress_bars import BarTimes

REAL_BARS = ((96, 3.74), (97, 3.68), (98, 3.64), (99, 3.61), (100, 3.58))
"""The end of a public run, of which the log says in another way that its steps took 3.53 s."""


def averages(times: list[float]) -> list[float]:
    """tqdm's average behind each step, one update a step."""
    time, weight, shown = 0.0, 0.0, []
    for seconds in times:
        time, weight = 0.3 * seconds + 0.7 * time, 0.3 + 0.7 * weight
        shown.append(time / weight)
    return shown


def printed(average: float) -> tuple[bytes, bytes]:
    """The rate as the bar prints it."""
    if average > 1:
        return f"{average:.2f}".encode(), b"s/it"
    return f"{1 / average:.2f}".encode(), b"it/s"


def read(times: list[float]) -> tuple[list[float], BarTimes]:
    bar = BarTimes()
    shown = enumerate(averages(times), start=1)
    return [bar.step_time_s(count, *printed(average)) for count, average in shown], bar


@given(st.lists(st.floats(1.5, 90), min_size=1, max_size=40))
def test_the_step_times_come_back_to_within_the_resolution(times: list[float]):
    shown_times, bar = read(times)
    assert bar.resolution_s < 0.06
    np.testing.assert_allclose(shown_times, times, atol=0.03)


@given(st.lists(st.floats(0.2, 0.9), min_size=1, max_size=40))
def test_rates_above_one_a_second_are_finer(times: list[float]):
    shown_times, bar = read(times)
    finite = ~np.isnan(shown_times)
    np.testing.assert_allclose(np.array(shown_times)[finite], np.array(times)[finite], atol=0.03)
    assert bar.resolution_s < 0.06


def test_a_spike_stays_in_its_own_step():
    shown_times, _ = read([3.5] * 10 + [30.0] + [3.5] * 10)
    assert shown_times[10] == pytest.approx(30.0, abs=0.03)
    assert [shown_times[9], shown_times[11]] == pytest.approx([3.5, 3.5], abs=0.03)


def test_the_end_of_a_real_run():
    bar = BarTimes()
    shown_times = [bar.step_time_s(count, str(rate).encode(), b"s/it") for count, rate in REAL_BARS]
    assert math.isnan(shown_times[0]), "what stood before the first bar is not known"
    assert shown_times[1:] == pytest.approx([3.53] * 4, abs=0.05)


def test_a_bar_that_is_drawn_again_tells_nothing_new():
    bar = BarTimes()
    assert bar.step_time_s(1, b"2.00", b"s/it") == 2.0
    assert math.isnan(bar.step_time_s(1, b"2.00", b"s/it"))
    assert bar.step_time_s(2, b"2.00", b"s/it") == pytest.approx(2.0)


def test_a_bar_that_is_missing_takes_the_next_time_with_it():
    bar = BarTimes()
    times = [bar.step_time_s(count, b"2.00", b"s/it") for count in (1, 2, 4, 5, 6)]
    assert np.isnan(times).tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("rate", [b"?", b"0.00", b"1.2.3", b"9" * 12])
def test_a_rate_that_is_none_tells_nothing(rate: bytes):
    bar = BarTimes()
    assert math.isnan(bar.step_time_s(1, rate, b"s/it"))
    assert math.isnan(bar.step_time_s(2, b"2.00", b"s/it"))
    assert bar.step_time_s(3, b"2.00", b"s/it") == pytest.approx(2.0, abs=0.03)


def test_the_first_step_of_all_is_the_average_itself():
    bar = BarTimes()
    assert math.isnan(bar.step_time_s(0, b"?", b"it/s"))
    assert bar.step_time_s(1, b"27.20", b"s/it") == 27.2
