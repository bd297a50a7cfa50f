"""Averages over log intervals and step times from printed rates."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.run import RunSettings
from paceline.core.steps import Step, Steps
from paceline.engines.log_reading.log_content import LogContent
from paceline.logs.completion import completed_steps, log_interval

KNOWN = RunSettings(global_batch=16, seq_len=100, num_devices=4, origin="imported")


def rates(**columns: float) -> Steps:
    return Steps.of(Step(index=n, **columns) for n in (1, 2, 3))


@pytest.mark.parametrize(
    ("index", "stated", "interval"),
    [
        ([1, 2, 3, 4], None, 1),
        ([10, 20, 30, 40], None, 10),
        ([1, 10, 20, 30, 40, 50, 60], None, 10),
        ([1, 2, 3, 1000, 1001, 1002], None, 1),
        ([10, 20], None, 1),
        ([10, 20], 10, 10),
        ([5, 5, 5], 0, 1),
    ],
)
def test_the_log_interval_is_stated_or_the_usual_distance(
    index: list[int], stated: int | None, interval: int
):
    assert log_interval(np.array(index), stated) == interval


def test_every_line_says_how_many_steps_it_averages():
    steps = Steps.of(Step(index=n, step_time_s=1.0) for n in (10, 20, 30))
    assert list(completed_steps(steps, KNOWN, LogContent()).averaged_over) == [10, 10, 10]


def test_a_step_time_follows_from_samples_per_second():
    steps = completed_steps(rates(samples_per_s=8.0), KNOWN, LogContent())
    assert list(steps["step_time_s"]) == [2.0, 2.0, 2.0]


def test_a_step_time_follows_from_tokens_per_second_of_a_device():
    steps = completed_steps(rates(tokens_per_s_per_device=100.0), KNOWN, LogContent())
    assert list(steps["step_time_s"]) == [4.0, 4.0, 4.0]


def test_the_printed_batch_goes_before_the_known_one():
    steps = completed_steps(rates(samples_per_s=8.0, global_batch=32.0), KNOWN, LogContent())
    assert list(steps["step_time_s"]) == [4.0, 4.0, 4.0]


def test_a_printed_step_time_is_never_replaced():
    steps = completed_steps(rates(samples_per_s=8.0, step_time_s=5.0), KNOWN, LogContent())
    assert list(steps["step_time_s"]) == [5.0, 5.0, 5.0]


@pytest.mark.parametrize("rate", [0.0, float("inf"), -1.0])
def test_a_senseless_rate_gives_no_time(rate: float):
    assert not completed_steps(rates(samples_per_s=rate), KNOWN, LogContent()).known("step_time_s")


def test_without_a_batch_there_is_no_time():
    facts = KNOWN.model_copy(update={"global_batch": None})
    assert not completed_steps(rates(samples_per_s=8.0), facts, LogContent()).known("step_time_s")
