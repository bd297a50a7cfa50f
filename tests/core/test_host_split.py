"""Hosts in rounds of sub-clusters: nobody is lost, nobody is twice in a round, partners change."""

from __future__ import annotations

from itertools import combinations
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import UserError
from paceline.core.node_groups import Split, split_rounds


def hosts_of(n: int) -> list[str]:
    return [f"n{at}" for at in range(1, n + 1)]


def under_switches(hosts: list[str], each: int) -> dict[str, str]:
    return {host: f"s{at // each}" for at, host in enumerate(hosts)}


@given(
    n=st.integers(1, 40),
    size=st.integers(1, 40),
    num_rounds=st.integers(1, 5),
    how=st.sampled_from(get_args(Split)),
    seed=st.integers(0, 3),
)
def test_every_host_is_measured_and_every_round_accounts_for_all_of_them(
    n: int, size: int, num_rounds: int, how: Split, seed: int
):
    hosts = hosts_of(n)
    size = min(size, n)
    rounds = split_rounds(
        hosts, size, how, num_rounds=num_rounds, seed=seed, topology=under_switches(hosts, 5)
    )
    assert len(rounds) - sum(round_.made_up for round_ in rounds) == num_rounds
    for round_ in rounds:
        placed = [host for group in round_.groups for host in group]
        assert all(len(group) == size for group in round_.groups)
        assert sorted([*placed, *round_.left_over]) == sorted(hosts)
    assert {host for round_ in rounds for group in round_.groups for host in group} == set(hosts)


def test_a_host_that_is_left_over_gets_a_round_of_its_own():
    first, second = split_rounds(hosts_of(5), 2)
    assert first.left_over == ("n5",) and not first.made_up
    assert second.groups == (("n5", "n1"),) and second.made_up
    assert second.left_over == ("n2", "n3", "n4")


def test_contiguous_borders_move_from_round_to_round():
    first, second = split_rounds(hosts_of(8), 4, num_rounds=2)
    assert first.groups == (("n1", "n2", "n3", "n4"), ("n5", "n6", "n7", "n8"))
    assert second.groups == (("n3", "n4", "n5", "n6"), ("n7", "n8", "n1", "n2"))


def partners(rounds: tuple[object, ...], size: int) -> list[frozenset[str]]:
    groups = [group for round_ in rounds for group in round_.groups]  # type: ignore[attr-defined]
    return [frozenset(pair) for group in groups for pair in combinations(group, 2)]


@pytest.mark.parametrize("n", [6, 7, 8])
def test_in_a_tournament_of_pairs_everybody_meets_everybody_once(n: int):
    rounds = split_rounds(hosts_of(n), 2, "pairs", num_rounds=n - 1 if n % 2 == 0 else n)
    met = partners(rounds, 2)
    assert len(met) == len(set(met)) == n * (n - 1) // 2


def test_larger_groups_are_pairs_of_half_groups_that_change():
    rounds = split_rounds(hosts_of(16), 4, "pairs", num_rounds=7)
    halves = [frozenset(group) for round_ in rounds for group in round_.groups]
    assert len(set(halves)) == len(halves) == 28


def test_random_groups_repeat_with_their_seed_and_change_with_the_round():
    first = split_rounds(hosts_of(20), 4, "random", num_rounds=2, seed=7)
    assert first == split_rounds(hosts_of(20), 4, "random", num_rounds=2, seed=7)
    assert first != split_rounds(hosts_of(20), 4, "random", num_rounds=2, seed=8)
    assert first[0].groups != first[1].groups


def test_groups_stay_under_their_switch_as_long_as_they_can():
    hosts = hosts_of(12)
    switches = under_switches(hosts, 6)
    (only,) = split_rounds(hosts, 4, "topology", topology=switches)
    spread = [len({switches[host] for host in group}) for group in only.groups]
    assert spread == [1, 1, 2] and only.left_over == ()


@pytest.mark.parametrize(
    ("size", "arguments", "fault"),
    [
        (0, {}, "size 0: is not a valid sub-cluster size; allowed: 1 to 4 nodes"),
        (5, {}, "size 5: is not a valid sub-cluster size"),
        (2, {"num_rounds": 0}, "0 rounds: is too few"),
        (2, {"how": "halves"}, "split halves: is unknown; allowed: contiguous, pairs"),
        (2, {"how": "topology", "topology": {"n1": "s"}}, "the switch of n2 is not known"),
    ],
)
def test_what_cannot_be_split_is_refused(size: int, arguments: dict[str, object], fault: str):
    with pytest.raises(UserError, match=fault):
        split_rounds(hosts_of(4), size, **arguments)  # type: ignore[arg-type]


def test_a_host_named_twice_is_refused():
    with pytest.raises(UserError, match="n1 is listed twice"):
        split_rounds(["n1", "n2", "n1"], 2)
