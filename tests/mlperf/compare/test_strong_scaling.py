"""Efficiency of strong scaling is the product of what causes it."""

from __future__ import annotations

import pytest

from paceline.mlperf.compare.published_scores import published_scores, scores_of_round
from paceline.mlperf.compare.strong_scaling import (
    StrongScalingPoint,
    point_of_published,
    scaling_steps,
)

SMALL = StrongScalingPoint("small", True, 8, 80.0, 160_000.0, 36.0, 16)
LARGE = StrongScalingPoint("large", False, 64, 16.0, 200_000.0, 230.4, 64)


def test_the_loss_is_split_into_samples_and_throughput():
    base, step = scaling_steps([LARGE, SMALL])

    assert (base.name, base.efficiency, base.samples_factor) == ("small", 1.0, 1.0)
    assert step.speedup == pytest.approx(5.0)
    assert step.efficiency == pytest.approx(5 * 8 / 64)
    assert step.samples_factor == pytest.approx(160 / 200)
    assert step.throughput_factor == pytest.approx((200_000 / 16 / 64) / (160_000 / 80 / 8))
    assert step.training_factor == pytest.approx((230.4 / 64) / (36.0 / 8))
    assert step.official is False and base.official is True


def test_the_parts_multiply_to_the_whole():
    for step in scaling_steps([SMALL, LARGE]):
        assert step.training_factor and step.other_factor
        parts = step.samples_factor * step.training_factor * step.other_factor
        assert parts == pytest.approx(step.efficiency, rel=1e-12)


def test_without_training_rates_the_throughput_stays_whole():
    bare = StrongScalingPoint("bare", True, 64, 16.0, 200_000.0)
    _, step = scaling_steps([SMALL, bare])

    assert (step.training_factor, step.other_factor) == (None, None)
    assert step.samples_factor * step.throughput_factor == pytest.approx(step.efficiency)


@pytest.mark.parametrize("points", [[], [SMALL], [SMALL, SMALL]])
def test_one_size_scales_nothing(points: list[StrongScalingPoint]):
    assert scaling_steps(points) == []


def test_published_results_show_that_larger_batches_need_more_samples():
    published = scores_of_round(published_scores(), "llama31_8b", "5.1.0", "closed")
    points = [point_of_published(result) for result in published if "theia" in result.system]
    steps = scaling_steps([point for point in points if point])

    assert [step.num_devices for step in steps] == [8, 72, 512]
    assert [step.global_batch for step in steps] == [16, 36, 64]
    efficiencies = [step.efficiency for step in steps]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert steps[2].samples_factor == pytest.approx(0.793, abs=0.001)
    assert steps[2].efficiency == pytest.approx(67.3733 * 8 / (5.1637 * 512), rel=1e-3)
