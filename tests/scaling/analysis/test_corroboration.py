"""A node is named when two independent measurements call it slow; one alone asks for a repeat."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.node_groups import GroupThroughput
from paceline.scaling.analysis.analysis import Analysis, AnalysisContext, analyse, next_groups
from paceline.scaling.analysis.corroboration import confirmations, known_good_hosts, second_pass
from paceline.scaling.analysis.node_speeds import node_speeds
from paceline.scaling.analysis.result import scale_result
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

    A share of the runs is `disturbed`: 2 to 8% slower for once.
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
    return {node.host for node in analysis.flagged_nodes}


def text_of(analysis: Analysis) -> str:
    return "\n".join(scale_result(analysis).sentences)


@pytest.mark.parametrize(("n", "trials"), [(8, 60), (16, 60), (64, 40), (256, 8)])
def test_one_disturbed_run_names_nobody(n: int, trials: int):
    rng = np.random.default_rng(n)
    named = sum(bool(analyse(table(rng, n, disturbed=0.02)).flagged_nodes) for _ in range(trials))
    assert named <= 0.05 * trials


def test_a_disturbed_value_is_told_and_to_be_repeated():
    measured = alone([100 + 0.1 * (at % 5) for at in range(15)] + [94.0])
    words = text_of(analyse(measured))
    assert "No node is flagged" in words
    assert "n16 was 6.19% below the median node" in words and "repeat before draining" in words
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
    assert not analyse([g for round_ in rounds for g in round_]).flagged_nodes


def test_a_disturbed_value_does_not_take_the_straggler_away():
    rng = np.random.default_rng(7)
    measured = table(rng, 64)
    at = next(i for i, g in enumerate(measured) if g.hosts == ("n9",))
    measured[at] = GroupThroughput(("n9",), 92.0)
    analysis = analyse(measured)
    refuted = [e.node.host for e in analysis.evidence if e.verdict == "refuted"]
    assert refuted == ["n9"] and not analysis.flagged_nodes
    assert analysis.largest.straggler is not None
    assert analysis.largest.straggler.value > 0.985
    assert "its groups are not slow" in text_of(analysis)


def test_a_text_that_suspects_a_node_does_not_say_that_nobody_is_held_to_account():
    values = [100 + 0.1 * (at % 5) for at in range(15)] + [94.0]
    words = text_of(analyse([*alone(values), group("n1 n2 n3 n4", 380.0)]))
    assert "cannot be separated" in words and "not attributed" not in words


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
    assert [node.host for node in analysis.verdicts.flagged_nodes] == ["n6"]
    assert "The median node is 1.49% slower" in text_of(analysis)
    assert "slower than its own history. This change of the whole cluster" in text_of(analysis)


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
        blamed += bool(
            analyse(measured, AnalysisContext(reference=HealthySpeed(100.0))).flagged_nodes
        )
    assert blamed <= 5


def judged_in_whole_numbers(values: list[float]) -> SlowNodeReport:
    speeds = node_speeds(alone([float(round(value)) for value in values]))
    assert speeds is not None
    return judge_nodes(speeds, resolution=1.0)


def test_a_slow_node_shows_through_whole_numbers_and_a_rounded_one_does_not():
    rng = np.random.default_rng(10)
    for _ in range(40):
        healthy = (rng.uniform(39.6, 40.4) * np.exp(rng.normal(0, 0.003, 16))).tolist()
        assert judged_in_whole_numbers(healthy).flagged_nodes == ()
    slow = [40.0 * 0.95, *(40.0 * np.exp(rng.normal(0, 0.003, 15))).tolist()]
    assert [node.host for node in judged_in_whole_numbers(slow).flagged_nodes] == ["n1"]


def test_what_one_way_of_splitting_cannot_see_is_said():
    rng = np.random.default_rng(11)
    nested = table(rng, 16)
    assert "Not all links were tested: the groups are nested" in text_of(analyse(nested))
    crossing = [
        group(" ".join(f"n{(at + k) % 16}" for k in range(4)), 399.0) for at in range(2, 18, 4)
    ]
    both = [*nested, *crossing]
    assert "not tested" not in text_of(analyse(both))
    pairs = text_of(analyse(both, AnalysisContext(split="pairs")))
    assert "Uplinks of switches were not tested" in pairs
    assert "Use --split topology, or --split contiguous with more --rounds." in pairs


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


VALUES = [95.0, 94.0, *(100 + 0.1 * (at % 5) for at in range(14))]


def blame_of(values: list[float] = VALUES) -> SlowNodeReport:
    speeds = node_speeds(alone(values))
    assert speeds is not None
    return judge_nodes(speeds)


def test_each_suspect_meets_two_proven_nodes_and_controls_run_beside_it():
    blame = blame_of()
    proven = set(known_good_hosts(blame))
    first, second = second_pass(blame)
    for round_ in (first, second):
        used = [host for pair in round_ for host in pair]
        assert len(used) == len(set(used))
        assert [pair[0] for pair in round_[:2]] == ["n2", "n1"]
        assert {host for pair in round_ for host in pair} - proven == {"n1", "n2"}
        assert len(round_) == 6
    assert {pair[1] for pair in first[:2]}.isdisjoint({pair[1] for pair in second[:2]})


def test_there_is_no_second_pass_without_suspects_or_without_proven_nodes():
    assert second_pass(blame_of([100 + 0.1 * (at % 5) for at in range(16)])) == []
    assert second_pass(SlowNodeReport(blame_of().flagged_nodes, None)) == []


def pairs(first: float, second: float) -> list[GroupThroughput]:
    controls = [group(f"n{at} n{at + 1}", 200.0) for at in range(5, 13, 2)]
    suspects = [group("n2 n3", first, "second pass"), group("n2 n4", second, "second pass")]
    return [*controls, *suspects]


def test_a_suspect_is_confirmed_when_it_slows_every_partner():
    confirmed, unknown = confirmations(blame_of(), pairs(189.0, 188.0))
    assert confirmed.host == "n2" and confirmed.confirmed
    assert confirmed.loss is not None and round(confirmed.loss, 4) == 0.0575
    assert unknown.host == "n1" and unknown.confirmed is None


def test_it_is_cleared_when_one_partner_is_not_slowed():
    assert confirmations(blame_of(), pairs(189.0, 198.0))[0].confirmed is False


def test_planned_pairs_do_not_confirm_but_serve_as_controls():
    planned = [group("n2 n3", 189.0), group("n5 n6", 200.0)]
    unjudged = confirmations(blame_of(), planned)
    assert [confirmation.confirmed for confirmation in unjudged] == [None, None]


MISSED = [62.2, 111.7, 111.4, 111.2, 100.6, 99.4, 97.8, 97.2]
"""Three fast nodes of eight widen the spread: n1, 38% below the median, has z -3.6."""


def with_pairs(
    suspect_losses: list[float], controls: list[float], values: list[float] = MISSED
) -> Analysis:
    """The second pass of n1 with these losses of its pairs and of the controls."""
    first = analyse(alone(values))
    step = next_groups(first)
    assert step is not None and step[0] == "second pass"
    losses = iter(controls)
    measured = list(first.measured)
    for loss, round_ in zip(suspect_losses, step[1], strict=False):
        assert round_[0][0] == "n1"
        measured += [group(" ".join(round_[0]), 200 * (1 - loss), "second pass")]
        measured += [
            group(" ".join(pair), 200 * (1 - next(losses)), "second pass") for pair in round_[1:]
        ]
    return analyse(measured)


CONTROLS = [0.01, -0.02, 0.0, 0.02, -0.01, 0.0]


def test_a_node_that_a_wide_spread_hides_is_suspected_and_its_pairs_flag_it():
    first = analyse(alone(MISSED))
    assert (first.flagged_nodes, [node.host for node in first.suspect_nodes]) == ((), ["n1"])
    assert -4 < (first.suspect_nodes[0].z or 0) < -3

    analysis = with_pairs([0.36, 0.38], CONTROLS)
    assert [node.host for node in analysis.flagged_nodes] == ["n1"] and analysis.suspect_nodes == ()
    result = scale_result(analysis)
    assert result.flagged == ("n1",)
    assert [(suspect.host, suspect.confirmed) for suspect in result.suspects] == [("n1", True)]
    assert result.suspects[0].pair_loss == pytest.approx(0.37)
    words = "\n".join(result.sentences)
    assert "n1 is 37.80% below the median node (z -3.6, one value), and its pairs" in words
    assert "37.0% slower: confirmed." in words


@pytest.mark.parametrize(
    ("own", "controls", "confirmed", "words"),
    [
        ([0.38, 0.10], CONTROLS, False, "24.0% slower than others, which does not confirm it"),
        ([0.00, -0.02], CONTROLS, False, "1.0% faster than others, which does not confirm it"),
        ([0.36, 0.38], [8 * at for at in CONTROLS], False, "37.0% slower than others, which does"),
        ([0.38], CONTROLS, None, "38.0% slower than others, but there are too few to confirm it"),
        ([0.36, 0.38], [], None, "no second measurement confirms it; repeat before draining"),
    ],
    ids=["one pair", "no pair", "controls scatter as much", "a pair is missing", "no controls"],
)
def test_a_suspected_node_is_not_flagged_when(
    own: list[float], controls: list[float], confirmed: bool | None, words: str
):
    if controls:
        analysis = with_pairs(own, controls)
    else:
        pairs = [group(f"n1 n{at}", 125.0, "second pass") for at in (5, 6)]
        analysis = analyse([*alone(MISSED), *pairs])
    assert analysis.flagged_nodes == () and [node.host for node in analysis.suspect_nodes] == ["n1"]
    result = scale_result(analysis)
    assert result.flagged == () and result.suspects[0].confirmed is confirmed
    text = "\n".join(result.sentences)
    assert words in text and text.count("n1 was 37.80% below the median node") == 1


def test_flagged_nodes_go_first_where_there_are_too_few_proven_ones_for_all():
    values = [54.0, 61.0, 110.0, 109.0, 101.0, 100.5, 100.0, 99.5, 99.0, 92.0, 91.0]
    blame = blame_of(values)
    assert [node.host for node in blame.flagged_nodes] == ["n1"]
    assert [node.host for node in blame.suspect_nodes] == ["n2"]
    assert [pair[0] for pair in second_pass(blame)[0][:2]] == ["n1", "n2"]
    few = SlowNodeReport((*blame.flagged_nodes, *blame.suspect_nodes, blame.nodes[5]), None)
    assert [[pair[0] for pair in round_] for round_ in second_pass(few)] == [["n1"], ["n1"]]


def test_nobody_is_suspected_by_a_reference_or_for_less_than_one_per_cent():
    speeds = node_speeds([*alone([100.0, 97.0]), *alone([100.1, 97.1])])
    assert speeds is not None
    assert judge_nodes(speeds, reference=HealthySpeed(100.0, 0.0085)).suspect_nodes == ()
    quiet = [100 + 0.1 * (at % 5) for at in range(15)]
    assert blame_of([*quiet, 99.5]).suspect_nodes == ()


def test_of_many_nodes_a_slower_one_is_needed_for_a_suspicion():
    values = [100 + at for at in (-2.0, -1.0, 0.0, 1.0, 2.0)]
    near = 100 * (1 - 3.3 * 0.014826)
    assert blame_of([*values * 4, near]).suspect_nodes
    assert blame_of([*values * 200, near]).suspect_nodes == ()


def test_what_the_second_pass_lacks_is_asked_for_and_what_failed_is_not_asked_again():
    first = analyse(alone(VALUES))
    step = next_groups(first)
    assert step is not None
    first_round, second_round = step[1]
    done = [group(" ".join(pair), 200.0, "second pass") for pair in first_round]
    again = next_groups(analyse([*first.measured, *done]))
    assert again == ("second pass", [second_round])
    failed = [group(" ".join(pair), None, "second pass") for pair in second_round]
    assert next_groups(analyse([*first.measured, *done, *failed])) is None
    assert next_groups(first, {*first_round, *second_round}) is None


def test_pairs_do_not_clear_a_node_that_its_own_history_says_should_be_faster():
    values = [100 + 0.1 * (at % 5) for at in range(10)]
    history = {"n1": [120.0, 120.2, 119.9], "n2": [90.0, 90.1, 89.9]}
    speeds = node_speeds(alone([105.0, 86.0, *values]))
    assert speeds is not None
    blame = judge_nodes(speeds, history=history)
    assert {node.host for node in blame.flagged_nodes} == {"n1", "n2"}

    def confirmed(slower: float) -> dict[str, bool | None]:
        suspects = [group(f"n1 n{at}", 200.0, "second pass") for at in (3, 4)]
        suspects += [group(f"n2 n{at}", slower, "second pass") for at in (4, 3)]
        controls = [group(f"n{at} n{at + 1}", 200.0) for at in (5, 7, 9)]
        return {
            confirmation.host: confirmation.confirmed
            for confirmation in confirmations(blame, [*suspects, *controls])
        }

    assert confirmed(2 * 86.0) == {"n1": None, "n2": True}
    assert confirmed(2 * 90.0) == {"n1": None, "n2": False}


def test_halves_of_a_slow_group_are_no_controls():
    halves = [group(f"n{at} n{at + 1}", 150.0, "bisection") for at in range(5, 17, 2)]
    confirmation = confirmations(blame_of(), [*halves, *pairs(189.0, 188.0)])[0]
    assert confirmation.confirmed and round(confirmation.loss or 0.0, 4) == 0.0575
