"""The whole procedure on made-up clusters: what is wrong is named, what is not stays unblamed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks._simulated_cluster import Fault, SimulatedCluster, simulate
from benchmarks.blame_power import HARD, SETTINGS, ClusterKind, label, missed, rates, with_tables
from paceline.core.node_groups import Split
from paceline.scaling.analysis.result import scale_result, sentences

ROOT = Path(__file__).parents[3]
BEHIND = tuple(f"node-{at:04d}" for at in range(17, 33))
"""The hosts of the second switch."""
SIZES = [1, 2, 4, 8, 16, 32, 64]


def sentences_on(cluster: SimulatedCluster, how: Split = "contiguous", rounds: int = 1) -> str:
    sizes = [size for size in SIZES if size <= cluster.num_nodes]
    return "\n".join(scale_result(simulate(cluster, sizes, how, rounds)).sentences)


@pytest.mark.parametrize("how", ["contiguous", "pairs", "random", "topology"])
def test_a_slow_node_is_named_confirmed_and_priced(how: Split):
    analysis = simulate(SimulatedCluster(64, (Fault("slow", 17, 0.05),)), SIZES, how)
    assert [node.host for node in analysis.flagged_nodes] == ["node-0017"]
    assert analysis.confirmations[0].confirmed
    assert analysis.gains[0].hosts == ("node-0017",)
    assert analysis.gains[0].value == pytest.approx(0.046, abs=0.006)


def test_a_healthy_cluster_blames_nobody_and_asks_for_nothing_more():
    analysis = simulate(SimulatedCluster(64), SIZES)
    assert analysis.flagged_nodes == () and analysis.searches == ()
    assert all(group.purpose == "plan" for group in analysis.measured)


@pytest.mark.parametrize("how", ["contiguous", "topology"])
def test_a_slow_uplink_is_found_by_bisection(how: Split):
    analysis = simulate(SimulatedCluster(64, (Fault("link", 2, 0.04),)), SIZES, how)
    assert analysis.flagged_nodes == ()
    assert [search.sides for search in analysis.searches] == [(BEHIND,)]


@pytest.mark.parametrize("size", [0.05, 0.1])
def test_a_slow_uplink_in_shifted_rounds_is_not_laid_on_the_hosts_at_its_border(size: float):
    """The pair across the border of two switches is slow; node-0032 is fast next to its own."""
    for seed in range(4):
        cluster = SimulatedCluster(64, (Fault("link", 2, size),), seed=seed)
        analysis = simulate(cluster, [1, 2, 4, 8, 16, 32, 64], "contiguous", 3)
        words = " ".join(sentences(analysis))
        assert analysis.searches and "causes the loss" not in words
        assert "the loss is on the links from node-" in words
        for search in analysis.searches:
            assert all(set(side) <= set(BEHIND) or len(search.sides) == 2 for side in search.sides)


def test_a_group_that_is_slow_only_once_is_measured_again_before_a_link_is_blamed():
    words = [
        sentences_on(
            SimulatedCluster(8, (Fault("intermittent", 3 + seed % 5, 0.05, 0.1),), seed=seed)
        )
        for seed in range(40)
    ]
    blamed = sum("so the loss is between" in each for each in words)
    assert blamed <= 5, "a single slow measurement was laid on a link in 8 of 40 cases"
    assert sum("measured again, they are as fast as expected" in each for each in words) >= 3


@pytest.mark.parametrize("seed", range(4))
def test_a_slow_link_of_two_nodes_is_located(seed: int):
    number = 3 + 7 * seed
    cluster = SimulatedCluster(64, (Fault("pair", number, 0.05),), seed=seed)
    words = sentences_on(cluster, rounds=3)
    pair = f"the loss is between node-{number:04d} and node-{number + 1:04d}"
    assert pair in words and "measured again" not in words


def test_a_noisy_node_is_called_noisy():
    words = sentences_on(SimulatedCluster(64, (Fault("noisy", 9, 0.1),), seed=3), rounds=4)
    assert "node-0009 is noisy: its repeats vary by" in words
    assert "the loss of noisy nodes varies from run to run: node-0009" in words


def test_what_was_slow_alone_by_luck_is_cleared_by_the_second_pass():
    cleared = []
    for seed in range(60):
        cluster = SimulatedCluster(64, node_spread=0.0005, run_noise=0.004, seed=seed)
        analysis = simulate(cluster, [1, 2])
        assert not analysis.flagged_nodes
        cleared += [e.node.host for e in analysis.evidence if e.verdict == "refuted"]
    assert cleared


def test_a_cluster_of_4096_nodes_is_simulated():
    analysis = simulate(SimulatedCluster(4096, (Fault("slow", 4000, 0.04),)), [1, 8, 512, 4096])
    assert [node.host for node in analysis.flagged_nodes] == ["node-4000"]


def test_of_4096_nodes_none_is_only_suspected():
    flagged: list[str] = []
    for seed in range(4):
        cluster = SimulatedCluster(4096, (Fault("slow", 4000, 0.04),), seed=seed)
        analysis = simulate(cluster, [1, 8, 512, 4096])
        assert analysis.flagged_nodes[0].host == "node-4000" and not analysis.verdicts.suspect_nodes
        flagged += [node.host for node in analysis.flagged_nodes[1:]]
    # One in 30,000 healthy nodes lies below z -4 for good: half of such a node in 16,384.
    assert len(flagged) <= 2


def test_the_same_seed_gives_the_same_luck_and_another_one_another():
    groups = [("node-0001",), ("node-0002", "node-0003")]
    assert SimulatedCluster(4).measure(groups, 3) == SimulatedCluster(4).measure(groups, 3)
    assert SimulatedCluster(4).measure(groups, 3) != SimulatedCluster(4).measure(groups, 4)
    assert SimulatedCluster(4).measure(groups, 3) != SimulatedCluster(4, seed=1).measure(groups, 3)


def test_made_up_speeds_are_as_ordered():
    cluster = SimulatedCluster(
        4096, (Fault("slow", 1, 0.5),), node_spread=0.003, communication=0.01
    )
    assert np.std(np.log(cluster.true_speeds[1:])) == pytest.approx(0.003, rel=0.05)
    assert cluster.true_speeds[0] == pytest.approx(50, rel=0.02)
    exact = SimulatedCluster(4, node_spread=0.0, run_noise=0.0, communication=0.01)
    (four,) = exact.measure([exact.hosts], 0)
    assert four.samples_per_s == pytest.approx(4 * 100 * 0.98)


@pytest.mark.parametrize(
    "setting", [ClusterKind(16), ClusterKind(64, rounds=2)], ids=lambda s: s.name
)
def test_the_short_form_of_the_benchmark_keeps_its_targets(setting: ClusterKind):
    rows = {"none": rates(setting, 0.0, 20), "3%": rates(setting, 0.03, 20)}
    assert missed({setting.name: rows}, 20) == []


def test_the_tables_in_the_docs_are_the_committed_result():
    result = json.loads((ROOT / "benchmarks" / "results" / "blame_power.json").read_text())
    trials = result.pop("trials")
    assert trials == 1000 and result.pop("benchmark") == "blame_power"
    text = (ROOT / "docs" / "dev" / "evidence" / "slow-nodes.md").read_text()
    assert with_tables(text, result) == text
    assert missed(result, trials) == []
    for setting in (*SETTINGS, *HARD):
        rows = result[setting.name]
        assert set(rows) == {label(fault) for fault in setting.faults}
        assert all((row["found"] or 0) >= (row["found at once"] or 0) for row in rows.values())
