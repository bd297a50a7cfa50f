"""Who is flagged, by what, how small a fault is findable, and what replacing gains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from paceline.core.node_groups import GroupThroughput
from paceline.scaling.analysis.analysis import analyse
from paceline.scaling.analysis.node_speeds import NodeSpeeds, PersistentComponent, node_speeds
from paceline.scaling.analysis.slow_nodes import (
    HealthySpeed,
    SlowNodeReport,
    detectable_loss,
    gains,
    judge_nodes,
)
from tests.scaling.analysis.lambda_values import alone, published


def speeds_of(values: Sequence[float] | Sequence[GroupThroughput]) -> NodeSpeeds:
    speeds = node_speeds(
        [
            v if isinstance(v, GroupThroughput) else alone(values)[at]  # type: ignore[arg-type]
            for at, v in enumerate(values)
        ]
    )
    assert speeds is not None
    return speeds


def healthy(n: int, seed: int = 0, spread: float = 0.004) -> list[float]:
    return (100 * np.exp(np.random.default_rng(seed).normal(0, spread, n))).tolist()


def hosts_of(blame: SlowNodeReport) -> list[str]:
    return [node.host for node in blame.flagged_nodes]


@pytest.mark.parametrize("model", ["opt-13b", "opt-350m"])
def test_no_healthy_published_node_is_flagged(reference_data: Path, model: str):
    assert analyse(published(reference_data, model).measured).verdicts.flagged_nodes == ()


@pytest.mark.parametrize(("loss", "least_found"), [(0.02, 0.85), (0.03, 1.0), (0.05, 1.0)])
def test_a_slowed_node_among_the_published_ones_is_found(
    reference_data: Path, loss: float, least_found: float
):
    singles = [
        m
        for m in published(reference_data, "opt-13b").measured
        if m.nodes == 1 and m.series == "allnodes"
    ]
    num_found = 0
    for victim in range(64):
        values = [
            (m.samples_per_s or 0) * (1 - loss * (at == victim)) for at, m in enumerate(singles)
        ]
        flagged = hosts_of(judge_nodes(speeds_of(values)))
        assert set(flagged) <= {f"n{victim + 1}"}
        num_found += len(flagged)
    assert num_found / 64 >= least_found


def test_six_slow_nodes_do_not_hide_each_other():
    values = healthy(64)
    for at in range(6):
        values[at] *= 0.96
    assert sorted(hosts_of(judge_nodes(speeds_of(values)))) == [f"n{at}" for at in range(1, 7)]


def test_both_significance_and_size_are_asked_for():
    quiet = [100 + 0.01 * at for at in range(20)]
    assert hosts_of(judge_nodes(speeds_of([*quiet, 99.5]))) == []
    loud = healthy(40, spread=0.02)
    assert hosts_of(judge_nodes(speeds_of([*loud, 95.0]))) == []
    assert hosts_of(judge_nodes(speeds_of([*quiet, 98.5]))) == ["n21"]


@pytest.mark.parametrize("median", [1.0, 3.0, 7.0, 100.0, 123.4])
def test_a_node_at_the_margin_is_neither_flagged_nor_suspected(median: float):
    single = judge_nodes(speeds_of([median * 0.99]), reference=HealthySpeed(median))
    assert not single.flagged_nodes and not single.suspect_nodes
    quiet = [median * (1 + 1e-5 * at) for at in range(-10, 11)]
    assert not judge_nodes(speeds_of([*quiet, median * 1.5, median * 0.99])).flagged_nodes
    assert hosts_of(judge_nodes(speeds_of([*quiet, median * 1.5, median * 0.9899]))) == ["n23"]


def test_a_coarse_print_is_no_evidence():
    values = [9.0] * 30 + [8.0]
    assert hosts_of(judge_nodes(speeds_of(values), resolution=1.0)) == []
    # The same values in a print that could have told more:
    fine = [9.0 + 0.001 * (at % 3) for at in range(30)] + [8.0]
    assert hosts_of(judge_nodes(speeds_of(fine), resolution=0.001)) == ["n31"]


def test_fewer_than_eight_nodes_are_not_judged_by_each_other():
    few = [100.0, 100.1, 99.9, 100.2, 99.8, 100.0, 60.0]
    blame = judge_nodes(speeds_of(few))
    assert blame.flagged_nodes == () and blame.smallest_fault is None
    assert all(node.z is None and node.by == "nothing" for node in blame.nodes)
    assert hosts_of(judge_nodes(speeds_of([*few, 100.0]))) == ["n7"]


def test_a_reference_judges_few_nodes():
    blame = judge_nodes(speeds_of([99.8, 94.0]), reference=HealthySpeed(100.0, 0.003))
    assert hosts_of(blame) == ["n2"]
    assert blame.nodes[0].z == pytest.approx(-20) and blame.nodes[0].loss == pytest.approx(0.06)
    assert blame.smallest_fault == pytest.approx(detectable_loss(0.003))


def test_without_any_spread_the_margin_only_suspects():
    blame = judge_nodes(speeds_of([99.5, 98.5]), reference=HealthySpeed(100.0))
    assert hosts_of(blame) == [] and [node.host for node in blame.suspect_nodes] == ["n2"]
    assert blame.nodes[0].z is None and blame.smallest_fault is None


def test_a_nodes_own_history_judges_it():
    history = {"n1": [100.0, 100.3, 99.8, 100.1], "n2": [90.0, 90.2, 89.9, 90.1], "n3": [80.0]}
    blame = judge_nodes(speeds_of([100.0, 86.0, 70.0]), history=history)
    assert hosts_of(blame) == ["n2"]
    assert {node.host: node.by for node in blame.nodes} == {
        "n1": "its own history",
        "n2": "its own history",
        "n3": "nothing",
    }


def test_a_node_is_no_faster_to_flag_than_its_own_repeats_allow():
    values = healthy(20, spread=0.001)
    rounds = [alone(values), alone(values), alone(values)]
    shaky = [(0.93, 1.0, 0.95)[number] * values[3] for number in range(3)]
    measured = [
        GroupThroughput(group.hosts, shaky[number])
        if group.hosts == ("n4",)
        else GroupThroughput(group.hosts, (group.samples_per_s or 0) * (1 + 1e-4 * number))
        for number, round_ in enumerate(rounds)
        for group in round_
    ]
    speeds = speeds_of(measured)
    assert speeds.noisy_hosts == {"n4"}
    assert hosts_of(judge_nodes(speeds)) == []


@pytest.mark.parametrize("n", [8, 16, 64])
def test_the_smallest_findable_fault_is_found_in_nine_of_ten_cases(n: int):
    rng = np.random.default_rng(n)
    num_found = 0
    for seed in range(250):
        values = healthy(n, 1000 + seed, spread=0.006)
        fault = judge_nodes(speeds_of(values)).smallest_fault or 0.0
        victim = int(rng.integers(n))
        values[victim] *= 1 - fault
        num_found += f"n{victim + 1}" in hosts_of(judge_nodes(speeds_of(values)))
    assert 0.84 <= num_found / 250 <= 0.97


@pytest.mark.parametrize(("nodes", "repeats"), [(2, 2), (4, 3)])
def test_few_repeats_against_a_reference_find_what_they_say(nodes: int, repeats: int):
    rng, reference, hits = np.random.default_rng(4), HealthySpeed(100.0), 0
    for _ in range(300):
        values = 100 * np.exp(rng.normal(0, 0.004, (repeats, nodes)))
        fault = _judged_by(values, reference).smallest_fault or 0.0
        values[:, 0] *= 1 - fault
        hits += "n1" in hosts_of(_judged_by(values, reference))
    assert 0.88 <= hits / 300 <= 0.98


def _judged_by(
    rounds: np.ndarray[tuple[int, ...], np.dtype[np.float64]], reference: HealthySpeed
) -> SlowNodeReport:
    """Nodes measured once in each round, compared with a reference."""
    measured = [group for values in rounds for group in alone(values.tolist())]
    return judge_nodes(speeds_of(measured), reference=reference)


def test_gains_are_the_next_slowest_over_the_slowest():
    values = [94.0, 97.0, *([100.0] * 4 + [100.5, 99.5]) * 5]
    exact = PersistentComponent(1.0, 1.0, 1.0, 0.0, 9.0, "exactly known")
    first, two, *_ = gains(speeds_of(values), exact)
    assert first.hosts == ("n1",) and first.value == pytest.approx(97 / 94 - 1)
    assert (first.low, first.high) == (pytest.approx(first.value), pytest.approx(first.value))
    assert two.hosts == ("n1", "n2") and two.value == pytest.approx(99.5 / 94 - 1)


def test_gains_know_of_the_luck_of_the_measurement():
    half = PersistentComponent(0.5, 0.3, 0.7, 0.003, 9.0, "half luck")
    lucky = gains(speeds_of(healthy(64)), half, num_flagged=3)
    assert [len(gain.hosts) for gain in lucky] == [1, 2, 3, 4, 8]
    assert all(0 <= gain.low <= gain.value <= gain.high for gain in lucky)
    exact = gains(speeds_of(healthy(64)), PersistentComponent(1.0, 1.0, 1.0, 0.0, 9.0, ""))
    assert all(a.value < b.value for a, b in zip(lucky[:2], exact, strict=False))


def test_replacing_node_020_alone_gives_next_to_nothing(reference_data: Path):
    analysis = analyse(published(reference_data, "opt-13b").measured)
    first = analysis.gains[0]
    assert first.hosts == ("ml-512-node-020",)
    assert round(100 * first.value, 2) == 0.04
    assert analysis.largest.straggler is not None
    assert 1 - analysis.largest.straggler.value == pytest.approx(0.01, abs=0.0015)


def test_where_no_straggler_is_known_no_gain_is_promised(reference_data: Path):
    analysis = analyse(published(reference_data, "opt-350m").measured)
    assert analysis.gains == () and analysis.largest.straggler is None
