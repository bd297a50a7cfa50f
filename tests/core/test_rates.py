from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import rates

positive = st.floats(1e-3, 1e9)


def test_a_step_time_gives_samples_and_tokens_per_second():
    assert rates.samples_per_s(128, 2.0) == 64
    assert rates.tokens_per_s(8192, 128, 2.0) == 524_288


def test_flops_are_shared_by_the_devices():
    assert rates.flops_per_s_per_device(1e15, 64, 10.0, 8) == 8e14


def test_mfu_is_a_fraction_of_the_peak():
    assert rates.mfu(400e12, 1000e12) == 0.4


def test_mfu_of_an_unknown_device_is_unknown():
    assert rates.mfu(400e12, None) is None


def test_days_are_whole_turns_of_the_clock():
    assert rates.days(86_400e6, 1e6) == 1.0


def test_scaling_efficiency_needs_its_base():
    assert rates.scaling_efficiency(196, 2, 100, 1) == 0.98
    assert rates.scaling_efficiency(196, 2, 196, 2) == 1.0


@given(batch=st.integers(1, 10**6), step_time_s=positive)
def test_samples_per_second_and_step_time_are_each_others_inverse(batch: int, step_time_s: float):
    rate = rates.samples_per_s(batch, step_time_s)
    assert rates.step_time_s(batch, rate) == pytest.approx(step_time_s, rel=1e-12)


@given(step_time_s=positive, factor=st.floats(1.01, 100))
def test_a_slower_step_lowers_every_rate_in_proportion(step_time_s: float, factor: float):
    slow = step_time_s * factor
    for rate in (
        lambda t: rates.tokens_per_s(2048, 512, t),
        lambda t: rates.samples_per_s(512, t),
        lambda t: rates.flops_per_s_per_device(1e15, 512, t, 8),
        lambda t: 1 / rates.days(1e12, rates.tokens_per_s(2048, 512, t)),
    ):
        assert rate(slow) * factor == pytest.approx(rate(step_time_s), rel=1e-9)


@given(value=positive, num=st.integers(1, 4096), base=positive, base_num=st.integers(1, 4096))
def test_efficiency_against_two_bases_is_consistent(
    value: float, num: int, base: float, base_num: int
):
    one_way = rates.scaling_efficiency(value, num, base, base_num)
    back = rates.scaling_efficiency(base, base_num, value, num)
    assert one_way * back == pytest.approx(1.0, rel=1e-9)
