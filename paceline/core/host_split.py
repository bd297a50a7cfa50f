"""Hosts split into sub-clusters of one size, in rounds in which each host meets other partners."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from paceline.core.errors import UserError
from paceline.core.units import counted

Split = Literal["contiguous", "pairs", "random", "topology"]
Group = tuple[str, ...]


@dataclass(frozen=True)
class Round:
    """Sub-clusters that can run at the same time."""

    groups: tuple[Group, ...]
    left_over: Group
    """Hosts that no group of this round has; a later one has them."""
    made_up: bool = False
    """A further round, for hosts that the others left over."""


def split_rounds(
    hosts: Sequence[str],
    size: int,
    how: Split = "contiguous",
    *,
    num_rounds: int = 1,
    seed: int = 0,
    topology: Mapping[str, str] | None = None,
) -> tuple[Round, ...]:
    """Rounds of sub-clusters of `size` hosts each; every host is in one of them at least.

    contiguous: neighbours in the list, the borders shifted from round to round. pairs: half groups
    meet other half groups, by the circle method of tournaments. random: shuffled afresh. topology:
    neighbours under the same switch first, by `topology` (host -> switch). Raises UserError for a
    size that the hosts do not have.
    """
    _check(hosts, size, how, num_rounds, topology)
    rounds: list[Round] = []
    for number in range(num_rounds):
        match how:
            case "contiguous":
                order = _rotated(hosts, number * max(1, size // num_rounds))
            case "pairs":
                order = _met(hosts, max(1, size // 2), number)
            case "random":
                order = random.Random(f"{seed} {size} {number}").sample(hosts, len(hosts))
            case "topology":
                rounds.append(_under_switches(hosts, size, number, topology or {}))
                continue
        rounds.append(_cut(order, size))
    return (*rounds, *_make_up(hosts, size, rounds))


def _check(
    hosts: Sequence[str], size: int, how: str, num_rounds: int, topology: Mapping[str, str] | None
) -> None:
    if how not in get_args(Split):
        raise UserError(f"split {how}", "is unknown", allowed=", ".join(get_args(Split)))
    if not 1 <= size <= len(hosts):
        raise UserError(
            f"size {size}", "is no sub-cluster", allowed=f"1 to {counted(len(hosts), 'node')}"
        )
    if num_rounds < 1:
        raise UserError(f"{num_rounds} rounds", "is too few", allowed="1 and more")
    if len(set(hosts)) != len(hosts):
        twice = next(host for host in hosts if list(hosts).count(host) > 1)
        raise UserError("hosts", f"{twice} is named twice", remedy="name every host once")
    missing = [host for host in hosts if host not in (topology or {})]
    if how == "topology" and missing:
        raise UserError("split topology", f"the switch of {missing[0]} is not known")


def _cut(order: Sequence[str], size: int) -> Round:
    end = len(order) // size * size
    groups = tuple(tuple(order[at : at + size]) for at in range(0, end, size))
    return Round(groups, tuple(order[end:]))


def _rotated(items: Sequence[str], by: int) -> list[str]:
    by %= len(items)
    return [*items[by:], *items[:by]]


def _met(hosts: Sequence[str], unit: int, number: int) -> list[str]:
    """Hosts in an order in which units stand beside the partner that they meet in this round.

    The first unit stays and the others move around it (circle method): in as many rounds as there
    are units, less one, each meets each.
    """
    units = [tuple(hosts[at : at + unit]) for at in range(0, len(hosts), unit)]
    whole = [members for members in units if len(members) == unit]
    rest = [host for members in units if len(members) < unit for host in members]
    odd: list[tuple[str, ...]] = [()] if len(whole) % 2 else []
    circle = whole + odd
    turn = number % max(1, len(circle) - 1)
    moved = [circle[0], *circle[1:][turn:], *circle[1:][:turn]]
    half = len(moved) // 2
    couples = list(zip(moved[:half], reversed(moved[half:]), strict=True))
    # The unit without a partner goes last, where it is left over.
    couples.sort(key=lambda couple: () in couple)
    return [host for couple in couples for members in couple for host in members] + rest


def _under_switches(
    hosts: Sequence[str], size: int, number: int, topology: Mapping[str, str]
) -> Round:
    """Groups inside one switch as long as it has hosts, then groups of what the switches leave."""
    inside: list[Group] = []
    remaining: list[str] = []
    for switch in dict.fromkeys(topology[host] for host in hosts):
        under = [host for host in hosts if topology[host] == switch]
        cut = _cut(_rotated(under, number * max(1, size // 2)), size)
        inside += cut.groups
        remaining += cut.left_over
    across = _cut(remaining, size)
    return Round((*inside, *across.groups), across.left_over)


def _make_up(hosts: Sequence[str], size: int, rounds: Sequence[Round]) -> list[Round]:
    """Further rounds for the hosts that no round has, filled up with hosts that were there."""
    met = {host for finished in rounds for group in finished.groups for host in group}
    never = [host for host in hosts if host not in met]
    if not never:
        return []
    partners = [host for host in hosts if host in met][: -len(never) % size]
    groups = _cut([*never, *partners], size).groups
    inside = {host for group in groups for host in group}
    return [Round(groups, tuple(host for host in hosts if host not in inside), made_up=True)]
