"""Expected time to train from a measured speed and the reference's samples."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.mlperf.score.convergence import ConvergenceReference, reference_at
from paceline.mlperf.score.expected_time import MeasuredSpeed, expected_time

REFERENCE = ConvergenceReference((8,), 8, 1000.0, 100.0, 18)


def speed(**fields: Any) -> MeasuredSpeed:
    fields_of_speed = {
        "samples_per_s": 10.0,
        "relative_spread": 0.0,
        "num_steps": 100,
        "evaluation_s": 2.0,
    }
    return MeasuredSpeed(**(fields_of_speed | fields))


def test_a_published_run_lies_in_the_interval_and_near_the_estimate():
    """72 GB300 at a batch of 36 in round 5.1: steps of 0.160 s, evaluations of about 1.2 s, and a
    mean run time of 14.1242 minutes."""
    reference = reference_at("llama31_8b", "5.1.0", 36, 10)
    assert reference is not None and reference.batches == (32, 64)

    time = expected_time(reference, speed(samples_per_s=36 / 0.16, evaluation_s=1.2), 12288)

    assert time.minutes == pytest.approx(14.1242, rel=0.01)
    assert time.low_minutes < 14.1242 < time.high_minutes


def test_time_is_training_and_evaluations():
    time = expected_time(REFERENCE, speed(), every_samples=100)

    assert time.num_evaluations == 10
    assert time.minutes == pytest.approx((1000 / 10 + 10 * 2) / 60)


def test_intervals_between_evaluations_are_whole_batches_and_the_first_may_be_skipped():
    assert expected_time(REFERENCE, speed(), 101).num_evaluations == 10
    assert expected_time(REFERENCE, speed(), 97).num_evaluations == 10
    assert expected_time(REFERENCE, speed(), 97, skip_first=3).num_evaluations == 7
    assert expected_time(REFERENCE, speed(), 5000).num_evaluations == 1


def test_the_interval_holds_nine_of_ten_runs_of_the_reference():
    time = expected_time(REFERENCE, speed(evaluation_s=0), 100)

    assert time.coverage == 0.9
    assert time.high_minutes / time.minutes == pytest.approx(1 + 1.6449 * 0.1)
    assert time.low_minutes / time.minutes == pytest.approx(1 - 1.6449 * 0.1)


def test_an_unsteady_or_short_measurement_widens_it():
    def width(**fields: Any) -> float:
        time = expected_time(REFERENCE, speed(**fields), 100)
        return time.high_minutes - time.low_minutes

    assert width() < width(relative_spread=0.5) < width(relative_spread=0.5, num_steps=4)


def test_a_batch_beyond_all_references_has_no_expectation():
    assert reference_at("llama31_8b", "5.1.0", 1_000_000, 10) is None
