"""A node is named when two independent measurements call it slow; one alone asks for a repeat."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.node_groups import GroupThroughput
from paceline.scaling.analysis.analysis import Analysis, AnalysisContext, analyse
from paceline.scaling.analysis.answer import scale_result
from paceline.scaling.analysis.node_speeds import node_speeds
from paceline.scaling.analysis.slow_nodes import HealthySpeed, SlowNodeReport, judge_nodes
from tests.scaling.analysis.lambda_values import alone, group


def table(
    rng: np.random.Generator,
    n: int,
    slow: dict[int, float] | None = None,
    disturbed: float = 0.0,
    repeats: int = 1,
) -> list[GroupThroughput]:
    """Groups of 1, 2, 4, ... neighbours, each as fast as its slowest node of the moment.

    A share of the runs is `disturbed`: 2 to 8 % slower for once.
    """
    speeds = 100 * np.exp(rng.normal(0, 0.003, n))
    for node, loss in (slow or {}).items():
        speeds[node] *= 1 - loss
    measured: list[GroupThroughput] = []
    size = 1
    while size <= n:
        for begin in [b for b in range(0, n, size) for _ in range(repeats if size == 1 else 1)]:
            now = speeds[begin : begin + size] * np.exp(rng.normal(0, 0.0015, size))
            once = 1 - rng.uniform(0.02, 0.08) * (rng.random() < disturbed)
            hosts = tuple(f"n{at}" for at in range(begin, begin + size))
            measured.append(GroupThroughput(hosts, float(now.min()) * size * once))
        size *= 2
    return measured


def flagged(analysis: Analysis) -> set[str]:
    return {node.host for node in analysis.flagged}


def text_of(analysis: Analysis) -> str:
    return "\n".join(scale_result(analysis).sentences)


@pytest.mark.parametrize(("n", "trials"), [(8, 60), (16, 60), (64, 40), (256, 8)])
def test_one_disturbed_run_names_nobody(n: int, trials: int):
    rng = np.random.default_rng(n)
    named = sum(bool(analyse(table(rng, n, disturbed=0.02)).flagged) for _ in range(trials))
    assert named <= 0.05 * trials


def test_a_disturbed_value_is_told_and_to_be_repeated():
    measured = alone([100 + 0.1 * (at % 5) for at in range(15)] + [94.0])
    words = text_of(analyse(measured))
    assert "No node is flagged" in words
    assert "n16 was 6.19 % below the median node" in words and "repeat before draining" in words
    result = scale_result(analyse(measured))
    assert result.flagged == () and [suspect.host for suspect in result.suspects] == ["n16"]


@pytest.mark.parametrize("n", [16, 64])
def test_a_slow_node_is_named_by_its_groups(n: int):
    rng = np.random.default_rng(5)
    named = [flagged(analyse(table(rng, n, {3: 0.04}, disturbed=0.01))) for _ in range(25)]
    assert sum("n3" in hosts for hosts in named) >= 23
    assert sum(bool(hosts - {"n3"}) for hosts in named) <= 1
    assert "and its groups are" in text_of(analyse(table(rng, n, {3: 0.04})))


def test_repeats_are_a_second_witness_and_one_bad_of_three_is_none():
    rng = np.random.default_rng(6)
    assert flagged(analyse(table(rng, 8, {2: 0.04}, repeats=3))) == {"n2"}
    once = [100 + 0.1 * (at % 4) for at in range(10)]
    rounds = [alone(once), alone(once), alone([*once[:9], 90.0])]
    assert not analyse([g for round_ in rounds for g in round_]).flagged


def test_a_disturbed_value_does_not_take_the_straggler_away():
    rng = np.random.default_rng(7)
    measured = table(rng, 64)
    at = next(i for i, g in enumerate(measured) if g.hosts == ("n9",))
    measured[at] = GroupThroughput(("n9",), 92.0)
    analysis = analyse(measured)
    assert [node.host for node in analysis.cleared] == ["n9"] and not analysis.flagged
    assert analysis.largest.straggler is not None
    assert analysis.largest.straggler.value > 0.985
    assert "its groups are not slow" in text_of(analysis)


def test_a_text_that_suspects_a_node_does_not_say_that_nobody_is_held_to_account():
    values = [100 + 0.1 * (at % 5) for at in range(15)] + [94.0]
    words = text_of(analyse([*alone(values), group("n1 n2 n3 n4", 380.0)]))
    assert "not separable" in words and "held to account" not in words


def history_of(rng: np.random.Generator, n: int) -> tuple[list[float], dict[str, list[float]]]:
    speeds = 100 * np.exp(rng.normal(0, 0.003, n))
    past = speeds[:, None] * np.exp(rng.normal(0, 0.0015, (n, 6)))
    return speeds.tolist(), {f"n{at}": row.tolist() for at, row in enumerate(past, start=1)}


def test_a_change_of_the_whole_cluster_is_no_nodes_fault():
    rng = np.random.default_rng(8)
    speeds, history = history_of(rng, 64)
    today = np.array(speeds) * 0.985 * np.exp(rng.normal(0, 0.0015, 64))
    today[5] *= 0.96
    analysis = analyse(alone(today.tolist()), AnalysisContext(history=history))
    assert [node.host for node in analysis.blame.flagged] == ["n6"]
    assert "The median node is 1.49 % slower" in text_of(analysis)
    assert "slower than its own history: that is the cluster's change" in text_of(analysis)


@pytest.mark.parametrize("luck", [0.002, 0.005, 0.01])
@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_few_healthy_nodes_are_seldom_blamed_by_a_reference(luck: float, repeats: int):
    rng = np.random.default_rng(9)
    blamed = 0
    for _ in range(100):
        measured = [
            g
            for _ in range(repeats)
            for g in alone((100 * np.exp(rng.normal(0, luck, 4))).tolist())
        ]
        blamed += bool(analyse(measured, AnalysisContext(reference=HealthySpeed(100.0))).flagged)
    assert blamed <= 5


def judged_in_whole_numbers(values: list[float]) -> SlowNodeReport:
    speeds = node_speeds(alone([float(round(value)) for value in values]))
    assert speeds is not None
    return judge_nodes(speeds, resolution=1.0)


def test_a_slow_node_shows_through_whole_numbers_and_a_rounded_one_does_not():
    rng = np.random.default_rng(10)
    for _ in range(40):
        healthy = (rng.uniform(39.6, 40.4) * np.exp(rng.normal(0, 0.003, 16))).tolist()
        assert judged_in_whole_numbers(healthy).flagged == ()
    slow = [40.0 * 0.95, *(40.0 * np.exp(rng.normal(0, 0.003, 15))).tolist()]
    assert [node.host for node in judged_in_whole_numbers(slow).flagged] == ["n1"]


def test_what_one_way_of_splitting_cannot_see_is_said():
    rng = np.random.default_rng(11)
    nested = table(rng, 16)
    assert "Not tested: the hosts were split in one way only" in text_of(analyse(nested))
    crossing = [
        group(" ".join(f"n{(at + k) % 16}" for k in range(4)), 399.0) for at in range(2, 18, 4)
    ]
    assert "Not tested" not in text_of(analyse([*nested, *crossing]))


def test_groups_bear_out_what_a_node_lost_against_its_own_history():
    def judged(now: float, before: float, in_groups: float) -> set[str]:
        values = [now, *(100 + 0.1 * (at % 5) for at in range(15))]
        history = {f"n{at}": [100.0, 100.2, 99.9, 100.1] for at in range(2, 17)}
        history["n1"] = [before, 1.001 * before, 0.999 * before]
        pairs = [group(f"n{at} n{at + 1}", 200.0) for at in range(3, 17, 2)]
        pairs.append(group("n1 n2", 2 * in_groups))
        return flagged(analyse([*alone(values), *pairs], AnalysisContext(history=history)))

    assert judged(94.0, 100.0, in_groups=94.0) == {"n1"}
    assert judged(86.0, 90.0, in_groups=86.0) == {"n1"}
    # Its groups are as slow as it always was, and no slower.
    assert judged(86.0, 90.0, in_groups=90.0) == judged(90.0, 90.0, in_groups=90.0) == set()
