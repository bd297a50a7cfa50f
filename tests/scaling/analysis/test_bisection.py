"""When only large groups are slow, halving finds the place."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.core.node_groups import GroupThroughput
from paceline.scaling.analysis.analysis import analyse, next_groups
from paceline.scaling.analysis.corroboration import Bisection, Group, SlowGroup, bisect, slow_groups
from paceline.scaling.analysis.result import sentences
from tests.scaling.analysis.lambda_values import alone, group

HOSTS = tuple(f"n{at}" for at in range(1, 17))
OUTSIDE = [f"m{at}" for at in range(1, 17)]


def search(is_slow: Callable[[set[str]], bool], hosts: Group = HOSTS) -> tuple[Bisection, int]:
    """Follow the search to its end on a cluster of which `is_slow` knows the truth."""
    measured: dict[Group, bool] = {}
    for step in range(20):
        bisection = bisect(SlowGroup(hosts, 0.05, measured.get(hosts)), measured.get, OUTSIDE)
        if not bisection.ask:
            return bisection, step
        measured |= {group: is_slow(set(group)) for group in bisection.ask}
    raise AssertionError("it has no end")


@pytest.mark.parametrize("culprit", HOSTS)
def test_a_host_that_is_slow_only_in_company_is_found_in_log_steps(culprit: str):
    bisection, steps = search(lambda hosts: culprit in hosts and len(hosts) > 1)
    assert bisection.sides == ((culprit,),) and steps <= 5


def test_a_path_between_two_halves_is_named_by_both():
    first, second = set(HOSTS[:8]), set(HOSTS[8:])
    bisection, _ = search(lambda hosts: bool(hosts & first) and bool(hosts & second))
    assert bisection.sides == (HOSTS[:8], HOSTS[8:])


def test_a_slow_way_out_of_one_half_is_named_by_that_half():
    behind = set(HOSTS[8:])
    bisection, _ = search(lambda hosts: bool(hosts & behind) and not hosts <= behind)
    assert bisection.sides == (HOSTS[8:],)


def test_without_proven_hosts_outside_the_halves_stay_the_answer():
    measured = {HOSTS[:8]: False, HOSTS[8:]: False}
    slow_group = SlowGroup(HOSTS, 0.05, is_slow_again=True)
    assert bisect(slow_group, measured.get, []).sides == (HOSTS[:8], HOSTS[8:])


def test_a_group_without_a_slow_half_is_measured_again_first():
    measured = {HOSTS[:8]: False, HOSTS[8:]: False}
    assert bisect(SlowGroup(HOSTS, 0.05), measured.get, []).ask == (HOSTS,)
    once = bisect(SlowGroup(HOSTS, 0.05, is_slow_again=False), measured.get, [])
    assert once.ask == () == once.sides


def cluster(*extra: GroupThroughput) -> list[GroupThroughput]:
    pairs = [group(f"n{at} n{at + 1}", 199.0 + 0.05 * at) for at in range(1, 9, 2)]
    return [*alone([100.0] * 8), *pairs, *extra]


def test_a_group_is_slow_against_others_of_its_size():
    measured = cluster(group("n9 n10", 193.0))
    (slow_group,) = slow_groups(measured, 100.0, {})
    assert slow_group.hosts == ("n9", "n10") and slow_group.loss == pytest.approx(0.03, abs=0.003)


def test_a_slow_member_is_reason_enough():
    measured = cluster(group("n9 n10", 193.0))
    assert slow_groups(measured, 100.0, {"n9": -0.03}) == []


def test_a_single_large_group_is_held_against_the_smaller_sizes():
    usual = group(" ".join(HOSTS[:4]), 397.0)
    assert slow_groups(cluster(usual), 100.0, {}) == []
    slow = group(" ".join(HOSTS[:4]), 380.0)
    (slow_group,) = slow_groups(cluster(slow), 100.0, {})
    assert slow_group.hosts == HOSTS[:4] and slow_group.loss == pytest.approx(0.042, abs=0.003)


def test_a_size_without_anything_to_hold_it_against_is_not_judged():
    assert slow_groups([*alone([100.0] * 8), group("n1 n2", 150.0)], 100.0, {}) == []


def test_repeats_of_one_group_are_one_group_and_no_measure_of_themselves():
    whole = " ".join(HOSTS[:4])
    pairs = [pair for pair in cluster() if pair.nodes == 2]
    measured = [*cluster(), *pairs, *pairs, *(group(whole, 380.0 + at) for at in range(3))]
    (slow_group,) = slow_groups(measured, 100.0, {})
    assert slow_group.hosts == HOSTS[:4] and slow_group.loss == pytest.approx(0.04, abs=0.003)


def test_a_half_that_failed_is_not_taken_for_a_fast_one():
    whole = group(" ".join(HOSTS[:4]), 380.0)
    halves = analyse(cluster(whole)).searches[0].ask
    assert halves
    failed = [GroupThroughput(half, None, purpose="bisection") for half in halves]
    analysis = analyse(cluster(whole, *failed))
    assert analysis.searches[0].sides == () and next_groups(analysis) is None
    words = "\n".join(sentences(analysis))
    assert "the cause is unknown because" in words and "as fast as expected" not in words
