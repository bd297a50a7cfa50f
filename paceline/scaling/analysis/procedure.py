"""The whole procedure: every size in rounds, then whatever the suspicions ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from paceline.core.host_split import Round, Split, split_rounds
from paceline.core.node_groups import GroupThroughput
from paceline.scaling.analysis.analysis import Analysis, Judging, analyse, next_groups
from paceline.scaling.analysis.simulation import SimulatedCluster

MOST_FOLLOW_UPS = 40
"""A bisection takes two steps per doubling of the nodes at most."""


def planned_rounds(
    hosts: Sequence[str],
    sizes: Sequence[int],
    how: Split = "contiguous",
    *,
    num_rounds: int = 1,
    seed: int = 0,
    topology: Mapping[str, str] | None = None,
) -> list[Round]:
    """The rounds of all sizes in rising order; a group of all hosts has one arrangement."""
    return [
        round_
        for size in sorted(set(sizes))
        for round_ in split_rounds(
            hosts, size, how, num_rounds=num_rounds, seed=seed, topology=topology
        )
    ]


def left_over_notes(rounds: Sequence[Round]) -> list[str]:
    """Which hosts a round could not use, and where they were measured instead."""
    notes: list[str] = []
    for size in sorted({len(round_.groups[0]) for round_ in rounds}):
        of_size = [round_ for round_ in rounds if len(round_.groups[0]) == size]
        left = sorted(
            {host for round_ in of_size for host in round_.left_over if not round_.made_up}
        )
        if left:
            names = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
            notes.append(
                f"Groups of {size} do not use up all hosts: {names} had no place in one round and "
                "were measured in another."
            )
    return notes


def simulate(
    cluster: SimulatedCluster,
    sizes: Sequence[int],
    how: Split = "contiguous",
    num_rounds: int = 1,
    judging: Judging | None = None,
    tell: Callable[[str], object] = str,
) -> tuple[Analysis, list[str]]:
    """The procedure on a synthetic cluster with its follow-ups, and notes on left-over hosts.

    `tell` hears of every analysis, which takes seconds with thousands of nodes.
    """
    rounds = planned_rounds(
        cluster.hosts,
        sizes,
        how,
        num_rounds=num_rounds,
        seed=cluster.seed,
        topology=cluster.topology,
    )
    measured: list[GroupThroughput] = []
    for number, round_ in enumerate(rounds):
        measured += cluster.measure(round_.groups, number)
    number = len(rounds)
    for _ in range(MOST_FOLLOW_UPS):
        tell(f"analysing {len(measured):,} sub-clusters, {number - len(rounds)} of them follow-ups")
        analysis = analyse(measured, judging)
        step = next_groups(analysis)
        if step is None:
            return analysis, left_over_notes(rounds)
        purpose, follow_ups = step
        for groups in follow_ups:
            measured += cluster.measure(groups, number, purpose)
            number += 1
    return analyse(measured, judging), left_over_notes(rounds)
