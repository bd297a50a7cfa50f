"""The test against reference convergence points gives the official tool's figures."""

from __future__ import annotations

import csv
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest

from paceline.mlperf.rules import BENCHMARKS, SCORED_ONLY, find_benchmark
from paceline.mlperf.score.convergence import (
    ConvergenceReference,
    MeasuredSpeed,
    compare_with_reference,
    expected_time,
    olympic_mean,
    prune_references,
    reference_at,
    references,
    rulesets,
)


def reference(batch: int, mean: float, stdev: float = 10.0) -> ConvergenceReference:
    return ConvergenceReference((batch,), batch, mean, stdev, 18)


def test_an_olympic_mean_leaves_out_one_value_at_each_end():
    assert olympic_mean([1.0, 2.0, 4.0, inf]) == 3.0


def test_the_rounds_of_a_benchmark_are_known():
    assert rulesets("llama2_70b_lora")[:2] == ["4.1.0", "5.0.0"]
    assert rulesets("flux1") == ["5.1.0", "6.0.0", "6.1.0"]
    assert rulesets("resnet") == []


def test_a_batch_that_is_slower_than_its_neighbours_is_left_out():
    kept = prune_references(
        [reference(8, 300), reference(16, 100), reference(32, 190), reference(48, 200)]
    )

    assert [r.global_batch for r in kept] == [16, 48]
    assert prune_references([]) == []


def test_the_figures_are_those_of_the_official_tool(reference_data: Path):
    with (reference_data / "mlperf/rcp_expected.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) > 30
    for line in lines:
        points = references(line["benchmark"], line["ruleset"])
        batch, kept = int(line["batch_size"]), line["kept_after_pruning"] == "True"
        if line["n"] != "0":
            assert kept == (batch in [r.global_batch for r in points])
        if line["n"] != "0" and not kept:
            continue
        convergence = compare_with_reference(points, batch, [1e9] * 10, 10)
        assert convergence.kind == ("interpolated" if line["n"] == "0" else "exact")
        assert convergence.reference_samples == pytest.approx(float(line["olympic_mean"]))
        assert convergence.min_samples == pytest.approx(
            float(line["min_acceptable_mean"]), abs=1e-3
        )


def test_fewer_samples_within_chance_scale_the_time_and_beyond_it_fail():
    points = [reference(8, 3000.0, 300.0)]
    least = points[0].min_mean(10)

    slow = compare_with_reference(points, 8, [3100.0] * 9 + [inf], 10)
    fast = compare_with_reference(points, 8, [2900.0] * 10, 10)
    too_fast = compare_with_reference(points, 8, [least - 0.01] * 10, 10)

    assert (slow.status, slow.scaling_factor) == ("passed", 1.0)
    assert (fast.status, fast.scaling_factor) == ("passed", 3000 / 2900)
    assert (too_fast.status, too_fast.scaling_factor) == ("failed", None)
    assert too_fast.reason is not None and "requires at least" in too_fast.reason


def test_a_batch_between_two_references_is_held_against_their_line():
    convergence = compare_with_reference(
        [reference(8, 100), reference(16, 200)], 10, [1000.0] * 10, 10
    )

    assert (convergence.kind, convergence.reference_samples) == ("interpolated", 125.0)
    assert convergence.reference_batches == (8, 16)


def test_a_smaller_batch_passes_only_against_the_smallest_reference():
    points = [reference(8, 100), reference(16, 200)]

    assert compare_with_reference(points, 4, [100.0] * 10, 10).status == "passed"
    beyond = compare_with_reference(points, 4, [50.0] * 10, 10)
    assert (beyond.status, beyond.kind) == ("missing", "smaller-batch")


def test_a_larger_batch_has_no_reference():
    convergence = compare_with_reference([reference(8, 100)], 9, [100.0] * 10, 10)

    assert (convergence.status, convergence.scaling_factor) == ("missing", None)
    assert convergence.reason == "no reference for a batch of 9; the largest is 8"


@pytest.mark.parametrize(
    ("benchmark", "ruleset"),
    [(b, r) for b in (*BENCHMARKS, *SCORED_ONLY) for r in rulesets(b)],
)
def test_made_up_submissions_are_judged_as_the_official_tool_judges_them(
    benchmark: str, ruleset: str
):
    tool = pytest.importorskip("mlperf_logging.rcp_checker.rcp_checker")
    official = tool.RCP_Checker("training", ruleset, benchmark, False)
    points, chance = references(benchmark, ruleset), Random(7)
    num_runs = find_benchmark(benchmark, "").num_runs
    largest = points[-1].global_batch
    statuses: set[str] = set()
    for _ in range(40):
        batch = chance.choice([chance.choice(points).global_batch, chance.randint(1, largest)])
        centre = min(points, key=lambda r: abs(r.global_batch - batch)).mean * chance.uniform(
            0.9, 1.2
        )
        samples = [float(int(centre * chance.uniform(0.95, 1.05))) for _ in range(num_runs)]
        samples[0] = chance.choice([samples[0], 1e9])
        passed, factor = official._eval_submission_record(
            official_record(official, batch), list(samples), ""
        )
        counted = [inf if s == 1e9 else s for s in samples]
        convergence = compare_with_reference(points, batch, counted, num_runs)
        assert (convergence.status == "passed") == passed
        if passed:
            assert convergence.scaling_factor == pytest.approx(factor, rel=1e-12)
        statuses.add(convergence.status)
    assert {"passed", "failed"} <= statuses


def official_record(official: Any, batch: int) -> Any:
    """The record against which the tool holds a batch, none of which is beyond the largest."""
    options = {"rcp_pass": "pruned_rcps"}
    exact = official._find_rcp(batch, **options)
    below, above = (
        official._find_top_min_rcp(batch, **options),
        official._find_bottom_max_rcp(batch, **options),
    )
    if exact is None and below is not None:
        return official._create_interp_rcp(batch, below, above)[1]
    return exact or official._find_min_rcp(**options)


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
