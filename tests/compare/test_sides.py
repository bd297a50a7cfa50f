"""The sides of a comparison: who counts, how far print may be off, which repeat lies apart."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.compare.sides import ComparisonSide, metric_value, outlier_sentences
from paceline.core.result import Metric, WindowRecord
from paceline.core.stats import printed_step_s
from tests.compare.members import member, side


def test_a_side_with_too_many_failures_is_invalid_and_says_which():
    broken = member("b", status="oom", reason="rank 1 ran out of memory")
    assert side([0.2] * 3).invalid is None
    few = ComparisonSide("x", (member("a"), broken))
    assert few.invalid == (
        "x has no valid figure from 1 of 2 runs (b: rank 1 ran out of memory); "
        "3 valid runs would be enough"
    )
    enough = ComparisonSide("x", (*(member(str(i)) for i in range(3)), broken))
    assert enough.invalid is None and enough.left_out == ("b: rank 1 ran out of memory",)
    assert ComparisonSide("x", (broken,)).invalid is not None


def test_a_run_without_steady_steps_does_not_count():
    short = WindowRecord(rule="35:44", first_step=9, last_step=9, n=1, n_warmup=8, state="short")
    assert not member("a", window=short).usable
    last = short.model_copy(update={"rule": "last"})
    assert member("a", window=last).usable and member("a", window=last).last_step_only
    average = short.model_copy(update={"rule": "as printed"})
    assert member("a", window=average).usable and member("a", window=average).averaged


@pytest.mark.parametrize(
    ("times", "step"),
    [
        ([29.0, 28.0], 1.0),
        ([14.72, 14.7], 0.01),
        ([5.6904, 5.691], 1e-4),
        ([], 0.0),
        ([0.1234567891], 0.0),
    ],
)
def test_the_step_of_printed_times_is_seen_in_them(times: list[float], step: float):
    assert printed_step_s(np.array(times)) == pytest.approx(step)


def test_whole_seconds_leave_half_a_second_open():
    whole = ComparisonSide("x", (member("a", 29.0, printed_step_s=1.0),))
    assert whole.rounding == pytest.approx(0.5 / 29)


def test_the_mean_step_stands_for_the_median_where_a_source_averages():
    run = member("a", 0.2, jitter=0.05)
    assert metric_value(run, "step_time_s", False) == 0.2
    assert metric_value(run, "step_time_s", True) == pytest.approx(0.21)
    at_median = metric_value(run, "tokens_per_s", False) or 0.0
    assert metric_value(run, "tokens_per_s", True) == pytest.approx(at_median / 1.05)
    assert metric_value(run, "memory_resident_bytes", True) == metric_value(
        run, "memory_resident_bytes", False
    )
    assert metric_value(run, "no_such_metric", True) is None


def test_the_noise_within_runs_is_read_from_their_intervals():
    interval = {"step_time_s": Metric(value=0.2, unit="s", low=0.198, high=0.202)}
    single = ComparisonSide("x", (member("a", metrics=interval),))
    assert single.within_run_error("step_time_s") == pytest.approx(0.02 / 3.92, rel=0.01)
    two = ComparisonSide("x", (member("a", 0.2), member("b", 0.21)))
    assert two.within_run_error("step_time_s") == pytest.approx(0.0244, rel=0.01)
    assert single.within_run_error("mfu") == 0.0


def test_a_repeat_far_from_all_others_is_named():
    assert outlier_sentences(["a", "b", "c"], [0.2, 0.201, 0.26], 0.01) == [
        "c is 26.0% above its other repeats"
    ]
    assert outlier_sentences(["a", "b", "c"], [0.2, 0.201, 0.203], 0.01) == []
    assert outlier_sentences(["a", "b"], [0.2, 0.4], 0.01) == []
