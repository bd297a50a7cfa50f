"""Is there evidence that nodes differ for good, and do groups follow their slowest member?"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks._simulated_cluster import Fault, SimulatedCluster, simulate
from paceline.core.node_groups import GroupThroughput, by_size
from paceline.scaling.analysis.node_speeds import (
    NotSeparable,
    PersistentComponent,
    group_slope,
    node_speeds,
    persistent_component,
)
from tests.scaling.analysis.lambda_values import alone

SIZES = [1, 2, 4, 8, 16, 32, 64]
TAU, SIGMA = 0.003, 0.0015
RELIABILITY = TAU**2 / (TAU**2 + SIGMA**2)


def verdict(cluster: SimulatedCluster, rounds: int = 1) -> PersistentComponent | NotSeparable:
    return simulate(cluster, SIZES, num_rounds=rounds).component


def verdicts_of_seeds(rounds: int, n: int = 12) -> list[PersistentComponent]:
    verdicts = [
        verdict(SimulatedCluster(64, node_spread=TAU, run_noise=SIGMA, seed=seed), rounds)
        for seed in range(n)
    ]
    return [verdict_ for verdict_ in verdicts if isinstance(verdict_, PersistentComponent)]


def test_the_slope_on_the_slowest_member_tells_the_reliability_without_repeats():
    estimates = verdicts_of_seeds(rounds=1, n=30)
    assert len(estimates) >= 25
    # Groups meet fresh luck, which flattens the slope a little.
    mean = float(np.mean([lasting.reliability for lasting in estimates]))
    assert RELIABILITY - 0.15 < mean < RELIABILITY + 0.05
    assert np.mean([lasting.low <= RELIABILITY <= lasting.high for lasting in estimates]) >= 0.85
    assert all("slope" in lasting.source for lasting in estimates)


def test_repeats_tell_it_more_closely():
    estimates = verdicts_of_seeds(rounds=4)
    assert len(estimates) == 12
    # Four repeats, of which the median counts: the error of that is 0.63 of one measurement's.
    expected = TAU**2 / (TAU**2 + (1.2533 * SIGMA / 2) ** 2)
    assert np.mean([lasting.reliability for lasting in estimates]) == pytest.approx(
        expected, abs=0.05
    )
    assert all("single-node values of 64 nodes" in lasting.source for lasting in estimates)


def test_nodes_that_differ_by_luck_alone_have_no_straggler():
    claims = [
        verdict(SimulatedCluster(64, node_spread=0.0, seed=seed), rounds=2) for seed in range(20)
    ]
    assert sum(isinstance(claim, PersistentComponent) for claim in claims) <= 1
    assert isinstance(claims[0], NotSeparable) and "repeats of one node" in claims[0].why


def test_groups_that_do_not_follow_their_slowest_member_are_named():
    rng = np.random.default_rng(3)
    singles = alone((100 * np.exp(rng.normal(0, TAU, 64))).tolist())
    pairs = [
        GroupThroughput((f"n{at}", f"n{at + 1}"), 199.0 * float(np.exp(rng.normal(0, 0.001))))
        for at in range(1, 65, 2)
    ]
    speeds = node_speeds(singles)
    assert speeds is not None
    verdict_ = persistent_component(speeds, by_size([*singles, *pairs]))
    assert (
        isinstance(verdict_, NotSeparable) and "do not follow their slowest member" in verdict_.why
    )
    # Repeats that prove lasting differences do not make the groups wait for anybody.
    repeated = node_speeds(
        [
            *singles,
            *(
                replace(group, samples_per_s=(group.samples_per_s or 0) * 1.0001)
                for group in singles
            ),
        ]
    )
    assert repeated is not None
    again = persistent_component(repeated, by_size([*singles, *pairs]))
    assert isinstance(again, NotSeparable) and "do not follow" in again.why


def test_a_single_slow_node_is_evidence_but_does_not_vouch_for_the_others():
    cluster = SimulatedCluster(64, (Fault("slow", 9, 0.1),), node_spread=0.001, run_noise=0.003)
    analysis = simulate(cluster, SIZES)
    assert isinstance(analysis.component, PersistentComponent) and analysis.speeds is not None
    everybody = group_slope(analysis.speeds, by_size(analysis.measured))
    assert everybody is not None and everybody.value > 0.9
    assert analysis.component.reliability < 0.6


@pytest.mark.parametrize(
    ("measured", "why"),
    [
        (alone([100.0] * 3 + [95.0] * 4), "fewer than 8 nodes"),
        (alone([100.0, 101.0, 99.0] * 4), "measured alone only once, and no size has 8 groups"),
    ],
)
def test_too_little_is_said_to_be_too_little(measured: list[GroupThroughput], why: str):
    speeds = node_speeds(measured)
    assert speeds is not None
    verdict_ = persistent_component(speeds, by_size(measured))
    assert isinstance(verdict_, NotSeparable) and why in verdict_.why
