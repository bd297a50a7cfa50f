"""Single-node values: their median, their repeats, and who is noisy."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.node_groups import GroupThroughput, by_size, main_series
from paceline.scaling.analysis.node_speeds import common_variation, node_speeds
from tests.scaling.analysis.lambda_values import alone, group


def test_a_node_counts_with_the_median_of_its_repeats():
    speeds = node_speeds([*alone([100, 90, 110]), *alone([104, 92, 108]), *alone([102, 400, 109])])
    assert speeds is not None
    assert speeds.hosts == ("n1", "n2", "n3")
    assert speeds.values.tolist() == [102, 92, 109] and speeds.repeats.tolist() == [3, 3, 3]
    assert speeds.base == 102


def test_groups_and_failures_are_no_single_node_values():
    assert node_speeds([group("n1 n2", 200), group("n1", None)]) is None


def test_the_common_scatter_is_the_standard_deviation_of_one_measurement():
    rng = np.random.default_rng(1)
    for repeats in (2, 3, 5):
        values = {f"n{n}": list(100 * np.exp(rng.normal(0, 0.004, repeats))) for n in range(4000)}
        assert common_variation(values) == pytest.approx(0.004, rel=0.06)


def test_one_noisy_node_does_not_hide_slow_ones_behind_its_scatter():
    rng = np.random.default_rng(2)
    rounds = [100 * np.exp(rng.normal(0, 0.002, 20)) for _ in range(4)]
    for number, values in enumerate(rounds):
        values[7] *= (1.0, 0.9, 1.0, 0.92)[number]
    speeds = node_speeds([group for values in rounds for group in alone(values.tolist())])
    assert speeds is not None and speeds.common_variation is not None
    assert speeds.noisy_hosts == {"n8"}
    assert speeds.common_variation < 0.004
    assert speeds.errors[7] > 5 * np.median(speeds.errors)


def test_without_repeats_no_error_is_claimed():
    speeds = node_speeds(alone([100.0, 101.0, 99.0]))
    assert speeds is not None
    assert speeds.common_variation is None and not speeds.errors.any() and not speeds.noisy_hosts


def test_the_hostfile_with_the_most_hosts_counts_and_the_other_is_told():
    apart = [GroupThroughput(("n1",), 90.0, "1node")]
    kept, left = main_series(
        [*apart, *(GroupThroughput((f"n{at}",), 100.0, "all") for at in (1, 2, 3))]
    )
    assert [group.series for group in kept] == ["all"] * 3 and left == apart


def test_follow_ups_are_no_fair_sample_of_their_size():
    measured = [group("n1 n2", 200), group("n1 n3", 150, "second pass"), group("n3", None)]
    assert {size: len(groups) for size, groups in by_size(measured).items()} == {2: 1}
    assert {size: len(groups) for size, groups in by_size(measured, planned=False).items()} == {
        2: 2
    }
