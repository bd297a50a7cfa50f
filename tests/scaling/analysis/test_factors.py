"""Efficiency as a product: published values reproduced, the corrected minimum unbiased."""

from __future__ import annotations

from math import exp, log
from pathlib import Path

import numpy as np
import pytest

from benchmarks._simulated_cluster import SimulatedCluster, simulate
from paceline.scaling.analysis.analysis import AnalysisContext, analyse
from paceline.scaling.analysis.factors import SizeFactors
from tests.scaling.analysis.lambda_values import alone, group, published


def factors_of(reference_data: Path, model: str, nodes: int) -> SizeFactors:
    analysis = analyse(published(reference_data, model).measured)
    return next(size for size in analysis.sizes if size.nodes == nodes)


@pytest.mark.parametrize(
    ("model", "nodes", "efficiency", "straggler", "communication"),
    [
        ("opt-13b", 64, 98.58, 99.04, 99.53),
        ("opt-13b", 16, 99.00, 99.26, 99.74),
        ("opt-350m", 64, 98.20, 99.50, 98.70),
    ],
)
def test_the_naive_split_of_the_published_values(
    reference_data: Path,
    model: str,
    nodes: int,
    efficiency: float,
    straggler: float,
    communication: float,
):
    factors = factors_of(reference_data, model, nodes)
    assert factors.naive_straggler is not None and factors.naive_communication is not None
    assert round(100 * factors.efficiency.value, 2) == efficiency
    assert round(100 * factors.naive_straggler, 2) == straggler
    assert round(100 * factors.naive_communication, 2) == communication


def test_the_factors_give_the_efficiency_exactly(reference_data: Path):
    analysis = analyse(published(reference_data, "opt-13b").measured)
    for size in analysis.sizes[1:]:
        assert size.straggler and size.communication
        assert size.straggler.value * size.communication.value == pytest.approx(
            size.efficiency.value
        )
        naive = (size.naive_straggler or 0) * (size.naive_communication or 0)
        assert naive == pytest.approx(size.efficiency.value)


def test_the_correction_takes_the_slowest_of_many_nearer_to_the_median(reference_data: Path):
    factors = factors_of(reference_data, "opt-13b", 64)
    assert factors.straggler and factors.straggler.low and factors.straggler.high
    assert factors.naive_straggler is not None
    assert factors.naive_straggler < factors.straggler.value < 0.992
    assert factors.straggler.low < factors.naive_straggler
    assert factors.efficiency.low and factors.efficiency.high
    assert 0.98 < factors.efficiency.low < factors.efficiency.value < factors.efficiency.high < 0.99


def test_the_base_is_the_median_node_and_a_value_apart_is_not_mixed_in(reference_data: Path):
    analysis = analyse(published(reference_data, "opt-13b").measured)
    assert analysis.base == pytest.approx(72.7018) and len(analysis.excluded) == 1
    assert analysis.sizes[0].efficiency.value == 1.0
    assert analysis.sizes[0].samples_per_s == pytest.approx(72.7018)


def test_the_slowest_measured_value_is_too_slow_and_the_corrected_one_is_not():
    naive, corrected, covered = [], [], []
    for seed in range(40):
        cluster = SimulatedCluster(64, node_spread=0.002, run_noise=0.002, seed=seed)
        largest = simulate(cluster, [1, 2, 4, 8, 64], num_rounds=2).largest
        truth = float(cluster.true_speeds.min() / np.median(cluster.true_speeds))
        if largest.straggler is None or largest.naive_straggler is None:
            continue
        naive.append(log(largest.naive_straggler / truth))
        corrected.append(log(largest.straggler.value / truth))
        covered.append((largest.straggler.low or 0) <= truth <= (largest.straggler.high or 0))
    assert len(corrected) >= 36
    assert np.mean(naive) < -0.0007
    assert abs(np.mean(corrected)) < 0.0004
    assert np.mean(covered) >= 0.9


def test_without_single_nodes_the_smallest_size_is_the_base():
    measured = [group("n1 n2", 200), group("n3 n4", 190), group("n1 n2 n3 n4", 370)]
    analysis = analyse(measured, AnalysisContext(scaling="strong"))
    assert (analysis.base_nodes, analysis.base) == (2, 97.5)
    (pairs, four) = analysis.sizes
    assert pairs.efficiency.value == 1 and four.efficiency.value == pytest.approx(370 / 390)
    assert four.naive_straggler is None and four.straggler is None


def test_one_group_of_a_size_has_no_spread_and_one_alone_no_interval():
    analysis = analyse([*alone([100.0, 98.0]), group("n1 n2", 190.0)])
    pair = analysis.largest
    assert pair.variation is None and pair.efficiency.low is None
    assert pair.naive_straggler == pytest.approx(98 / 99)
    assert pair.samples_per_s == pytest.approx(exp(log(190.0)))
