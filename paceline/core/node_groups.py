"""Groups of nodes: splits of hosts into sub-clusters, and their measured throughput."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from paceline.core.errors import UserError
from paceline.core.units import pluralize

Purpose = Literal["plan", "second pass", "bisection"]
"""Reason for training a group: a size of the plan, or a follow-up of a suspicion."""
ScalingKind = Literal["weak", "strong"]
"""Fixed quantity as nodes are added: batch per node (weak) or global batch (strong)."""


@dataclass(frozen=True)
class GroupThroughput:
    """One training run of one group of nodes."""

    hosts: tuple[str, ...]
    samples_per_s: float | None
    """Throughput of the whole group; None if the run failed."""
    series: str = ""
    """Group of the hostfile. Values of different series are not compared with each other."""
    purpose: Purpose = "plan"
    """Reason for the run. Follow-ups of a suspicion are not an unbiased sample of their size."""

    @property
    def nodes(self) -> int:
        """Number of nodes in the group."""
        return len(self.hosts)


def main_series(
    measured: Sequence[GroupThroughput],
) -> tuple[list[GroupThroughput], list[GroupThroughput]]:
    """Return the values of the series with the most hosts, and all other values."""
    hosts: dict[str, set[str]] = {}
    for group in measured:
        hosts.setdefault(group.series, set()).update(group.hosts)
    main = max(hosts, key=lambda name: len(hosts[name]))
    main_groups = [group for group in measured if group.series == main]
    return main_groups, [group for group in measured if group.series != main]


def by_size(
    measured: Iterable[GroupThroughput], planned: bool = True
) -> dict[int, list[GroupThroughput]]:
    """Return successful groups by number of nodes, ascending.

    With `planned`, follow-up runs are excluded.
    """
    sizes: dict[int, list[GroupThroughput]] = {}
    for group in measured:
        if group.samples_per_s is not None and (group.purpose == "plan" or not planned):
            sizes.setdefault(group.nodes, []).append(group)
    return dict(sorted(sizes.items()))


Split = Literal["contiguous", "pairs", "random", "topology"]
Group = tuple[str, ...]


@dataclass(frozen=True)
class Round:
    """Sub-clusters that can run at the same time."""

    groups: tuple[Group, ...]
    left_over: Group
    """Hosts without a group in this round. A later round includes them."""
    made_up: bool = False
    """True for an additional round for hosts that the other rounds left out."""


def split_rounds(
    hosts: Sequence[str],
    size: int,
    how: Split = "contiguous",
    *,
    num_rounds: int = 1,
    seed: int = 0,
    topology: Mapping[str, str] | None = None,
) -> tuple[Round, ...]:
    """Return rounds of sub-clusters of `size` hosts; every host is in at least one of them.

    `how` selects the method. contiguous: neighbors in the list, with borders shifted in every
    round. pairs: half-size groups meet other half-size groups, by the circle method of tournaments.
    random: a new shuffle in every round. topology: hosts of the same switch first, by `topology`
    (host -> switch). Raises UserError for a size that is not possible with these hosts.
    """
    _check(hosts, size, how, num_rounds, topology)
    rounds: list[Round] = []
    for number in range(num_rounds):
        match how:
            case "contiguous":
                order = _rotate(hosts, number * max(1, size // num_rounds))
            case "pairs":
                order = _pair_order(hosts, max(1, size // 2), number)
            case "random":
                order = random.Random(f"{seed} {size} {number}").sample(hosts, len(hosts))
            case "topology":
                rounds.append(_switch_groups(hosts, size, number, topology or {}))
                continue
        rounds.append(_split_into_groups(order, size))
    return (*rounds, *_make_up_rounds(hosts, size, rounds))


def _check(
    hosts: Sequence[str], size: int, how: str, num_rounds: int, topology: Mapping[str, str] | None
) -> None:
    if how not in get_args(Split):
        raise UserError(f"split {how}", "is unknown", allowed=", ".join(get_args(Split)))
    if not 1 <= size <= len(hosts):
        raise UserError(
            f"size {size}",
            "is not a valid sub-cluster size",
            allowed=f"1 to {pluralize(len(hosts), 'node')}",
        )
    if num_rounds < 1:
        raise UserError(f"{num_rounds} rounds", "is too few", allowed="1 and more")
    if len(set(hosts)) != len(hosts):
        twice = next(host for host in hosts if list(hosts).count(host) > 1)
        raise UserError("hosts", f"{twice} is listed twice", remedy="list every host once")
    missing = [host for host in hosts if host not in (topology or {})]
    if how == "topology" and missing:
        raise UserError("split topology", f"the switch of {missing[0]} is not known")


def _split_into_groups(order: Sequence[str], size: int) -> Round:
    end = len(order) // size * size
    groups = tuple(tuple(order[at : at + size]) for at in range(0, end, size))
    return Round(groups, tuple(order[end:]))


def _rotate(items: Sequence[str], by: int) -> list[str]:
    by %= len(items)
    return [*items[by:], *items[:by]]


def _pair_order(hosts: Sequence[str], unit: int, number: int) -> list[str]:
    """Return the hosts in an order that puts each unit next to its partner of this round.

    The circle method keeps the first unit in place and rotates the others around it. In as many
    rounds as there are units, less one, each unit meets each other unit.
    """
    units = [tuple(hosts[at : at + unit]) for at in range(0, len(hosts), unit)]
    whole = [members for members in units if len(members) == unit]
    leftover = [host for members in units if len(members) < unit for host in members]
    odd: list[tuple[str, ...]] = [()] if len(whole) % 2 else []
    circle = whole + odd
    turn = number % max(1, len(circle) - 1)
    rotation = [circle[0], *circle[1:][turn:], *circle[1:][:turn]]
    half = len(rotation) // 2
    couples = list(zip(rotation[:half], reversed(rotation[half:]), strict=True))
    # The unit without a partner goes last, so that it becomes the left-over group.
    couples.sort(key=lambda couple: () in couple)
    return [host for couple in couples for members in couple for host in members] + leftover


def _switch_groups(
    hosts: Sequence[str], size: int, number: int, topology: Mapping[str, str]
) -> Round:
    """Return groups within one switch, followed by groups of the hosts that remain."""
    inside: list[Group] = []
    remaining: list[str] = []
    for switch in dict.fromkeys(topology[host] for host in hosts):
        under = [host for host in hosts if topology[host] == switch]
        part = _split_into_groups(_rotate(under, number * max(1, size // 2)), size)
        inside += part.groups
        remaining += part.left_over
    across = _split_into_groups(remaining, size)
    return Round((*inside, *across.groups), across.left_over)


def _make_up_rounds(hosts: Sequence[str], size: int, rounds: Sequence[Round]) -> list[Round]:
    """Return additional rounds for hosts without a round.

    Hosts of other rounds fill up the groups.
    """
    grouped_hosts = {host for finished in rounds for group in finished.groups for host in group}
    hosts_to_place = [host for host in hosts if host not in grouped_hosts]
    if not hosts_to_place:
        return []
    partners = [host for host in hosts if host in grouped_hosts][: -len(hosts_to_place) % size]
    groups = _split_into_groups([*hosts_to_place, *partners], size).groups
    inside = {host for group in groups for host in group}
    return [Round(groups, tuple(host for host in hosts if host not in inside), made_up=True)]
