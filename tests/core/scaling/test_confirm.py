"""The second pass: suspects beside proven nodes."""

from __future__ import annotations

from paceline.core.scaling.blame import Blame, judge_nodes
from paceline.core.scaling.confirm import confirmations, proven_hosts, second_pass
from paceline.core.scaling.measured import Measured
from paceline.core.scaling.speeds import node_speeds
from tests.core.scaling.lambda_values import alone, group

VALUES = [95.0, 94.0, *(100 + 0.1 * (at % 5) for at in range(14))]


def blame_of(values: list[float] = VALUES) -> Blame:
    speeds = node_speeds(alone(values))
    assert speeds is not None
    return judge_nodes(speeds)


def test_each_suspect_meets_two_proven_nodes_and_controls_run_beside_it():
    blame = blame_of()
    proven = set(proven_hosts(blame))
    first, second = second_pass(blame)
    for one in (first, second):
        used = [host for pair in one for host in pair]
        assert len(used) == len(set(used))
        assert [pair[0] for pair in one[:2]] == ["n2", "n1"]
        assert {host for pair in one for host in pair} - proven == {"n1", "n2"}
        assert len(one) == 6
    assert {pair[1] for pair in first[:2]}.isdisjoint({pair[1] for pair in second[:2]})


def test_there_is_no_second_pass_without_suspects_or_without_proven_nodes():
    assert second_pass(blame_of([100 + 0.1 * (at % 5) for at in range(16)])) == []
    assert second_pass(Blame(blame_of().flagged, None)) == []


def pairs(first: float, second: float) -> list[Measured]:
    controls = [group(f"n{at} n{at + 1}", 200.0) for at in range(5, 13, 2)]
    own = [group("n2 n3", first, "second pass"), group("n2 n4", second, "second pass")]
    return [*controls, *own]


def test_a_suspect_is_confirmed_when_it_slows_every_partner():
    confirmed, unknown = confirmations(blame_of(), pairs(189.0, 188.0))
    assert confirmed.host == "n2" and confirmed.confirmed
    assert confirmed.loss is not None and round(confirmed.loss, 4) == 0.0575
    assert unknown.host == "n1" and unknown.confirmed is None


def test_it_is_cleared_when_one_partner_is_not_slowed():
    assert confirmations(blame_of(), pairs(189.0, 198.0))[0].confirmed is False


def test_planned_pairs_do_not_confirm_but_serve_as_controls():
    planned = [group("n2 n3", 189.0), group("n5 n6", 200.0)]
    assert [one.confirmed for one in confirmations(blame_of(), planned)] == [None, None]
