"""Bisection of slow groups: the groups to measure next, until the slow part is located."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, log2
from statistics import median

import numpy as np

from paceline.core.node_groups import GroupThroughput, by_size
from paceline.core.stats import NORMAL_MAD
from paceline.scaling.analysis.slow_nodes import MIN_LOSS, WORST_Z

MIN_TYPICAL_GROUPS = 3
"""Minimum number of groups of one size for a median that counts as typical."""
Group = tuple[str, ...]


@dataclass(frozen=True)
class SlowGroup:
    """A group that is slower than its slowest member and its size explain."""

    hosts: Group
    loss: float


@dataclass(frozen=True)
class Bisection:
    """State of the search in one slow group."""

    group: SlowGroup
    ask: tuple[Group, ...]
    """Groups to measure next; empty when the search is complete."""
    sides: tuple[Group, ...] = ()
    """Hosts that cause the loss: within one entry, or between two."""


def slow_groups(
    measured: Sequence[GroupThroughput], base: float, minimum: Mapping[str, float]
) -> list[SlowGroup]:
    """Return groups more than 1%, and four times the common variation, below their typical value.

    The compared value is log(group / (nodes x base)) minus the slowest member's own loss
    (`minimum`: host -> log(speed / base)). The typical value is the median of a size with at least
    three groups, otherwise the line through the smaller sizes over log2(nodes).
    """
    groups_by_size = by_size(measured)
    all_residuals = {
        size: [_residual(group, base, minimum) for group in groups]
        for size, groups in groups_by_size.items()
    }
    residuals = {
        size: [value for _, value in _by_hosts(groups, base, minimum)]
        for size, groups in groups_by_size.items()
    }
    threshold = max(-log(1 - MIN_LOSS), -WORST_Z * _variation(all_residuals))
    slow: list[SlowGroup] = []
    for size, groups in by_size(measured, planned=False).items():
        typical = _typical(size, residuals) if size > 1 else None
        for hosts, value in _by_hosts(groups, base, minimum) if typical is not None else ():
            log_loss = (typical or 0.0) - value
            if log_loss > threshold:
                slow.append(SlowGroup(hosts, 1 - exp(-log_loss)))
    return slow


def bisect(
    group: SlowGroup, is_slow: Callable[[Group], bool | None], known_good: Sequence[str]
) -> Bisection:
    """Return the next step in a slow group.

    `is_slow` returns whether a group is slow, or None if it was not measured. Halves are measured
    until no half alone is slow. The loss is then between the halves. Each half is combined with as
    many `known_good` hosts from outside: the half that is slow there too has the slow uplink.
    """
    hosts = group.hosts
    while len(hosts) > 1:
        halves = (hosts[: len(hosts) // 2], hosts[len(hosts) // 2 :])
        half_is_slow = [is_slow(half) if len(half) > 1 else False for half in halves]
        unknown = tuple(h for h, slow in zip(halves, half_is_slow, strict=True) if slow is None)
        if unknown:
            return Bisection(group, unknown)
        if not any(half_is_slow):
            return _between(group, halves, is_slow, known_good)
        hosts = halves[half_is_slow.index(True)]
    return Bisection(group, (), (hosts,))


def _between(
    group: SlowGroup,
    halves: tuple[Group, Group],
    is_slow: Callable[[Group], bool | None],
    known_good: Sequence[str],
) -> Bisection:
    outside = [host for host in known_good if host not in group.hosts]
    mixed = [(*half, *outside[: len(half)]) for half in halves]
    if len(outside) < max(map(len, halves)) or len(halves[0]) == len(group.hosts):
        return Bisection(group, (), halves)
    is_mixed_slow = [is_slow(hosts) for hosts in mixed]
    unknown = tuple(hosts for hosts, slow in zip(mixed, is_mixed_slow, strict=True) if slow is None)
    if unknown:
        return Bisection(group, unknown)
    slow = [half for half, mixed_slow in zip(halves, is_mixed_slow, strict=True) if mixed_slow]
    return Bisection(group, (), tuple(slow) if len(slow) == 1 else halves)


def _residual(group: GroupThroughput, base: float, minimum: Mapping[str, float]) -> float:
    slowest = min(minimum.get(host, 0.0) for host in group.hosts)
    return log((group.samples_per_s or 0.0) / (group.nodes * base)) - slowest


def _by_hosts(
    groups: Sequence[GroupThroughput], base: float, minimum: Mapping[str, float]
) -> list[tuple[Group, float]]:
    """Return the remainder of each group once: its repeats do not show what other groups do."""
    repeats: dict[frozenset[str], list[GroupThroughput]] = {}
    for group in groups:
        repeats.setdefault(frozenset(group.hosts), []).append(group)
    return [
        (same[0].hosts, median(_residual(group, base, minimum) for group in same))
        for same in repeats.values()
    ]


def _typical(size: int, residuals: Mapping[int, Sequence[float]]) -> float | None:
    """Return the typical remainder of a group of this size after its slowest member, or None."""
    if len(residuals.get(size, ())) >= MIN_TYPICAL_GROUPS:
        return float(np.median(residuals[size]))
    smaller = [(log2(k), float(np.median(v))) for k, v in residuals.items() if k < size]
    if len(smaller) < 2:
        return None
    x, y = np.array(smaller).T
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    return float(y.mean() + slope * (log2(size) - x.mean()))


def _variation(residuals: Mapping[int, Sequence[float]]) -> float:
    """Return 1.4826 x the median distance of groups from the median of their size.

    Only sizes with at least three groups count.
    """
    # n / (n - 1): values are closer to a centre that was computed from themselves.
    distances = [
        abs(value - float(np.median(values))) * (len(values) / (len(values) - 1)) ** 0.5
        for size, values in residuals.items()
        if size > 1 and len(values) >= MIN_TYPICAL_GROUPS
        for value in values
    ]
    return NORMAL_MAD * float(np.median(distances)) if distances else 0.0
