"""Evidence for slow nodes and links: repeats, pairs with known-good nodes, and groups.

Slow groups are bisected until the slow part is located.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, log2
from statistics import median
from typing import Literal

import numpy as np

from paceline.compare.significance import student_t
from paceline.core.node_groups import GroupThroughput, by_size
from paceline.core.stats import NORMAL_MAD
from paceline.scaling.analysis.slow_nodes import MIN_LOSS, WORST_Z, NodeVerdict, SlowNodeReport

MIN_TYPICAL_GROUPS = 3
"""Minimum number of groups of one size for a median that counts as typical."""
Group = tuple[str, ...]


@dataclass(frozen=True)
class SlowGroup:
    """A group that is slower than its slowest member and its size explain."""

    hosts: Group
    loss: float
    is_slow_again: bool | None = None
    """True if its second measurement is slow too, False if that one is not; None without one."""


@dataclass(frozen=True)
class Bisection:
    """State of the search in one slow group; without `ask` and `sides`, it was slow only once."""

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
        size: [median(values) for _, values in _by_hosts(groups, base, minimum)]
        for size, groups in groups_by_size.items()
    }
    threshold = max(-log(1 - MIN_LOSS), -WORST_Z * _variation(all_residuals))
    slow: list[SlowGroup] = []
    for size, groups in by_size(measured, planned=False).items():
        typical = _typical(size, residuals) if size > 1 else None
        for hosts, values in _by_hosts(groups, base, minimum) if typical is not None else ():
            log_loss = (typical or 0.0) - median(values)
            if log_loss > threshold:
                # The median of two values would hide that one of them is not slow.
                is_again = (typical or 0.0) - max(values) > threshold or len(values) > 2
                slow.append(
                    SlowGroup(hosts, 1 - exp(-log_loss), is_again if len(values) > 1 else None)
                )
    return slow


def bisect(
    group: SlowGroup, is_slow: Callable[[Group], bool | None], known_good: Sequence[str]
) -> Bisection:
    """Return the next step in a slow group.

    `is_slow` returns whether a group is slow, or None if it was not measured. Halves are measured
    until no half alone is slow. The loss is then between the halves, or it was there only once: a
    group without a slow half is measured again. Each half is combined with as many `known_good`
    hosts from outside: the half that is slow there too has the slow uplink.
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


def with_switch(search: Bisection, fast_groups: Sequence[set[str]]) -> Bisection:
    """Return the search with the hosts that share the slow uplink of a single host.

    A host that is fast in a group with others is not slow itself, nor is its cable: only the way
    out of that group can be. The largest such group without the other hosts of the slow one counts.
    """
    if len(search.sides) != 1 or len(search.sides[0]) != 1:
        return search
    (host,) = search.sides[0]
    others = {*search.group.hosts} - {host}
    behind = max(
        (hosts for hosts in fast_groups if host in hosts and hosts.isdisjoint(others)),
        key=len,
        default={host},
    )
    return replace(search, sides=(tuple(sorted(behind)),))


def _between(
    group: SlowGroup,
    halves: tuple[Group, Group],
    is_slow: Callable[[Group], bool | None],
    known_good: Sequence[str],
) -> Bisection:
    is_whole = sum(map(len, halves)) == len(group.hosts)
    repeat = (group.hosts,) if is_whole and group.is_slow_again is None else ()
    outside = [host for host in known_good if host not in group.hosts]
    mixed = [(*half, *outside[: len(half)]) for half in halves]
    if len(outside) < max(map(len, halves)):
        mixed = []
    is_mixed_slow = [is_slow(hosts) for hosts in mixed]
    unknown = [hosts for hosts, slow in zip(mixed, is_mixed_slow, strict=True) if slow is None]
    if repeat or unknown:
        return Bisection(group, (*repeat, *unknown))
    slow = [half for half, mixed_slow in zip(halves, is_mixed_slow, strict=False) if mixed_slow]
    if len(slow) == 1:
        return Bisection(group, (), tuple(slow))
    return Bisection(group, (), () if is_whole and group.is_slow_again is False else halves)


def _residual(group: GroupThroughput, base: float, minimum: Mapping[str, float]) -> float:
    slowest = min(minimum.get(host, 0.0) for host in group.hosts)
    return log((group.samples_per_s or 0.0) / (group.nodes * base)) - slowest


def _by_hosts(
    groups: Sequence[GroupThroughput], base: float, minimum: Mapping[str, float]
) -> list[tuple[Group, list[float]]]:
    """Return each group with the remainders of its repeats, which do not show what others do."""
    repeats: dict[frozenset[str], list[GroupThroughput]] = {}
    for group in groups:
        repeats.setdefault(frozenset(group.hosts), []).append(group)
    return [
        (same[0].hosts, [_residual(group, base, minimum) for group in same])
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


PARTNERS = 2
"""Number of known-good nodes that a slow one is paired with, so that no partner is to blame."""
CONTROLS = 4
"""Number of pairs of known-good nodes measured at the same time."""
KNOWN_GOOD_Z = -2.0
MIN_LOSS_SHARE = 0.5
"""Share of a slow node's own loss that each of its pairs must show."""
MIN_CONTROL_DISTANCE = 5.0
"""Minimum distance of a suspected node's pairs from the controls, in standard deviations."""
CONTROL_CHANCE = 0.005
"""Probability of that distance by chance, for few controls with an uncertain deviation."""
MIN_CONTROLS = 3
"""Minimum number of different control pairs for an estimate of their variation."""

Pair = tuple[str, str]


@dataclass(frozen=True)
class Confirmation:
    """Result of a slow node's pairs."""

    host: str
    confirmed: bool | None
    """None without enough pairs for a decision."""
    loss: float | None
    """Mean loss of its pairs compared with pairs of known-good nodes."""


@dataclass(frozen=True)
class _Controls:
    """Pairs of nodes that are not slow."""

    centre: float
    """Median samples/s."""
    chance_loss: float | None
    """Loss that a pair exceeds by chance with probability CHANCE; None with too few controls."""


def known_good_hosts(verdicts: SlowNodeReport) -> list[str]:
    """Return known-good hosts, those closest to the typical speed first."""
    good = [n for n in verdicts.nodes if not n.flagged and n.z is not None and n.z > KNOWN_GOOD_Z]
    return [node.host for node in sorted(good, key=lambda node: abs(node.z or 0.0))]


def second_pass(verdicts: SlowNodeReport) -> list[list[Pair]]:
    """Return rounds of pairs: each flagged or suspected node with a new known-good node per round.

    Up to four pairs of known-good nodes run at the same time as controls: those closest to the
    typical speed, or nodes of all speeds when some node is only suspected. Suspected nodes come
    after the flagged ones, as long as there are known-good nodes for them. The result is empty when
    no node is slow, or when there are too few known-good nodes for all flagged ones.
    """
    known_good = known_good_hosts(verdicts)
    slow = [node.host for node in (*verdicts.flagged_nodes, *verdicts.suspect_nodes)][
        : len(known_good)
    ]
    if not slow or len(slow) < len(verdicts.flagged_nodes):
        return []
    rounds: list[list[Pair]] = []
    for number in range(PARTNERS):
        offset = number * len(slow) % len(known_good)
        order = [*known_good[offset:], *known_good[:offset]]
        partners, others = order[: len(slow)], order[len(slow) :]
        if verdicts.suspect_nodes:
            # The controls' variation matters too, and typical nodes alone would understate it.
            others = others[:: max(1, len(others) // (2 * CONTROLS))]
        others = others[: 2 * CONTROLS]
        controls = list(zip(others[::2], others[1::2], strict=False))
        rounds.append([*zip(slow, partners, strict=True), *controls])
    return rounds


def confirmations(
    verdicts: SlowNodeReport, measured: Sequence[GroupThroughput]
) -> list[Confirmation]:
    """Confirm or refute every flagged or suspected node by its pairs.

    A flagged node is confirmed when each pair shows more than half of its loss alone. Pairs cannot
    judge a node whose own history says that it should be faster than the controls. A suspected node
    needs all its pairs, and each must also be slower than the controls by five of their standard
    deviations. Controls are all pairs without a flagged or suspected node.
    """
    slow = {node.host for node in (*verdicts.flagged_nodes, *verdicts.suspect_nodes)}
    pairs = [group for group in measured if group.nodes == 2 and group.samples_per_s is not None]
    # Halves of a slow group are not pairs of known-good nodes.
    planned_pairs = [group for group in pairs if group.purpose != "bisection"]
    controls = _controls([group for group in planned_pairs if not slow & set(group.hosts)])
    base = float(np.median([node.value for node in verdicts.nodes])) if verdicts.nodes else 0.0
    return [
        _confirmation(node, base, pairs, slow, controls)
        for node in (*verdicts.flagged_nodes, *verdicts.suspect_nodes)
    ]


def _controls(pairs: Sequence[GroupThroughput]) -> _Controls | None:
    """Return the controls' median, and the loss that another pair of such nodes hardly ever has."""
    values = [group.samples_per_s for group in pairs if group.samples_per_s]
    if not values:
        return None
    # Repeats of one pair do not show how pairs differ.
    by_pair: dict[frozenset[str], list[float]] = {}
    for group in pairs:
        by_pair.setdefault(frozenset(group.hosts), []).append(group.samples_per_s or 0.0)
    n = len(by_pair)
    centre = float(np.median(values))
    if n < MIN_CONTROLS:
        return _Controls(centre, None)
    logs = np.log([float(np.median(repeats)) for repeats in by_pair.values()])
    distance = max(MIN_CONTROL_DISTANCE, student_t(1 - CONTROL_CHANCE, n - 1) * (1 + 1 / n) ** 0.5)
    half_width = distance * float(np.std(logs, ddof=1))
    return _Controls(centre, 1 - float(np.exp(-half_width)))


def _confirmation(
    node: NodeVerdict,
    base: float,
    pairs: Sequence[GroupThroughput],
    slow: set[str],
    controls: _Controls | None,
) -> Confirmation:
    values = [
        group.samples_per_s or 0.0
        for group in pairs
        if group.purpose == "second pass" and slow & set(group.hosts) == {node.host}
    ]
    if not values or controls is None:
        return Confirmation(node.host, None, None)
    losses = [1 - value / controls.centre for value in values]
    reference = node.value / (1 - node.loss) if node.by == "its own history" else base
    min_loss = 1 - (MIN_LOSS_SHARE * node.value + (1 - MIN_LOSS_SHARE) * reference) / base
    if min_loss <= 0:
        return Confirmation(node.host, None, float(np.mean(losses)))
    is_confirmed = min(losses) > min_loss
    if node.suspected and is_confirmed:
        is_judged = controls.chance_loss is not None and len(values) >= PARTNERS
        is_confirmed = (
            min(losses) > controls.chance_loss
            if is_judged and controls.chance_loss is not None
            else None
        )
    return Confirmation(node.host, is_confirmed, float(np.mean(losses)))


EvidenceVerdict = Literal["confirmed", "refuted", "alone"]
"""Verdict on a node that is slow by its own value; "alone" means without independent evidence."""
MIN_GROUP_DISTANCE = 3.0
"""Minimum loss of groups with a slow node, in standard deviations of groups without one."""


@dataclass(frozen=True)
class NodeEvidence:
    """Evidence that confirms or refutes that one node is slow."""

    node: NodeVerdict
    verdict: EvidenceVerdict
    by: Literal["its pairs", "its repeats", "its groups", "nothing"]
    group_loss: float | None = None
    """Median loss of its groups compared with groups without a slow node; None without such
    groups."""


def evidence(
    verdicts: SlowNodeReport,
    pair_results: Sequence[Confirmation],
    measured: Sequence[GroupThroughput],
) -> list[NodeEvidence]:
    """Return the evidence for every node that its own values flag, slowest first."""
    by_host = {confirmation.host: confirmation.confirmed for confirmation in pair_results}
    losses = group_losses({node.host for node in verdicts.flagged_nodes}, measured)
    base = float(np.median([node.value for node in verdicts.nodes])) if verdicts.nodes else 1.0
    return [
        _node_evidence(node, base, by_host.get(node.host), losses.get(node.host))
        for node in verdicts.flagged_nodes
    ]


def group_losses(
    slow: set[str], measured: Sequence[GroupThroughput]
) -> dict[str, tuple[float, float]]:
    """Return, by host of `slow`, the median loss of its groups and the loss expected by chance.

    A group counts if it has exactly one of these hosts and its size has at least three planned
    groups without any. It is compared with the median of these groups. The loss by chance is three
    of their standard deviations.
    """
    by_host: dict[str, list[tuple[float, float]]] = {}
    for size, groups in by_size(measured).items():
        typical = [g.samples_per_s or 0.0 for g in groups if not slow & {*g.hosts}]
        if size < 2 or len(typical) < MIN_TYPICAL_GROUPS:
            continue
        centre = float(np.median(typical))
        chance_loss = (
            MIN_GROUP_DISTANCE
            * NORMAL_MAD
            * float(np.median(np.abs(np.array(typical) - centre)))
            / centre
        )
        for group in groups:
            members = slow & {*group.hosts}
            if len(members) == 1:
                loss = 1 - (group.samples_per_s or 0.0) / centre
                by_host.setdefault(members.pop(), []).append((loss, chance_loss))
    return {
        host: (
            float(np.median([loss for loss, _ in pairs])),
            max(chance_loss for _, chance_loss in pairs),
        )
        for host, pairs in by_host.items()
    }


def _node_evidence(
    node: NodeVerdict, base: float, by_pairs: bool | None, by_groups: tuple[float, float] | None
) -> NodeEvidence:
    loss = by_groups[0] if by_groups else None
    if by_pairs is not None:
        return NodeEvidence(node, "confirmed" if by_pairs else "refuted", "its pairs", loss)
    if node.repeated:
        return NodeEvidence(node, "confirmed", "its repeats", loss)
    if by_groups is None:
        return NodeEvidence(node, "alone", "nothing")
    # A healthy node that is expected to be below the others slows its groups by as much.
    expected_loss = max(0.0, 1 - node.value / (1 - node.loss) / base)
    excess, chance = by_groups[0] - expected_loss, by_groups[1]
    if excess > max(MIN_LOSS_SHARE * node.loss, chance, MIN_LOSS):
        return NodeEvidence(node, "confirmed", "its groups", loss)
    return NodeEvidence(node, "refuted" if excess < MIN_LOSS else "alone", "its groups", loss)


def refuted_hosts(node_evidence: Sequence[NodeEvidence]) -> frozenset[str]:
    """Return hosts whose own value was disturbed: values measured with them show another speed."""
    return frozenset(e.node.host for e in node_evidence if e.verdict == "refuted")
