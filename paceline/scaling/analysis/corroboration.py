"""What bears a slow node's value out: its repeats, pairs with known-good nodes, its groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from paceline.compare.significance import student_t
from paceline.core.node_groups import GroupThroughput, by_size
from paceline.core.stats import NORMAL_MAD
from paceline.scaling.analysis.bisection import FEWEST_ALIKE
from paceline.scaling.analysis.slow_nodes import LEAST_LOSS, NodeVerdict, SlowNodeReport

PARTNERS = 2
"""Proven nodes that a slow one is paired with, so that no partner can be its excuse."""
CONTROLS = 4
"""Pairs of proven nodes measured at the same time."""
PROVEN_Z = -2.0
SHOWN = 0.5
"""Share of its loss alone that every pair of a slow node must show."""
REACH = 5.0
"""Scatters of the controls that each pair of a suspected node must be slower by."""
CHANCE = 0.005
"""How often chance may give that, where few controls tell their scatter badly."""
FEWEST_CONTROLS = 3
"""Different control pairs that tell their scatter."""

Pair = tuple[str, str]


@dataclass(frozen=True)
class Confirmation:
    """What a slow node's pairs say."""

    host: str
    confirmed: bool | None
    """None without enough pairs to tell."""
    loss: float | None
    """Mean loss of its pairs against pairs of proven nodes."""


@dataclass(frozen=True)
class _Controls:
    """Pairs of nodes that are not slow."""

    centre: float
    """Median samples/s."""
    reach: float | None
    """Loss that a pair has by chance in so few cases; None with too few controls."""


def proven_hosts(blame: SlowNodeReport) -> list[str]:
    """Hosts that are surely not slow, the most ordinary first."""
    sound = [n for n in blame.nodes if not n.flagged and n.z is not None and n.z > PROVEN_Z]
    return [node.host for node in sorted(sound, key=lambda node: abs(node.z or 0.0))]


def second_pass(blame: SlowNodeReport) -> list[list[Pair]]:
    """Rounds of pairs: every flagged or suspected node with a proven one, another in each round.

    Four pairs of proven nodes run beside them, as far as there are any: the most ordinary, or of
    all sorts where a node is only suspected. Suspected nodes come after the flagged ones, as far as
    there are proven nodes for them. Empty where nobody is slow, or without proven nodes for all
    flagged ones.
    """
    proven = proven_hosts(blame)
    slow = [node.host for node in (*blame.flagged, *blame.suspected)][: len(proven)]
    if not slow or len(slow) < len(blame.flagged):
        return []
    rounds: list[list[Pair]] = []
    for number in range(PARTNERS):
        turn = number * len(slow) % len(proven)
        order = [*proven[turn:], *proven[:turn]]
        partners, rest = order[: len(slow)], order[len(slow) :]
        if blame.suspected:
            # Held against the controls' scatter too, which is less among the most ordinary nodes.
            rest = rest[:: max(1, len(rest) // (2 * CONTROLS))]
        rest = rest[: 2 * CONTROLS]
        controls = list(zip(rest[::2], rest[1::2], strict=False))
        rounds.append([*zip(slow, partners, strict=True), *controls])
    return rounds


def confirmations(blame: SlowNodeReport, measured: Sequence[GroupThroughput]) -> list[Confirmation]:
    """Every flagged or suspected node by its pairs.

    A flagged one is confirmed when each pair shows more than half of its loss alone; whose own
    history says that it should be faster than the controls, is not told by pairs. A suspected one
    must have all its pairs, and each must also be five standard deviations of the controls slower
    than they are. Controls are all pairs without a flagged or suspected node.
    """
    slow = {node.host for node in (*blame.flagged, *blame.suspected)}
    pairs = [group for group in measured if group.nodes == 2 and group.samples_per_s is not None]
    # Halves of a slow group are no pairs of proven nodes.
    usual = [group for group in pairs if group.purpose != "bisection"]
    controls = _controls([group for group in usual if not slow & set(group.hosts)])
    base = float(np.median([node.value for node in blame.nodes])) if blame.nodes else 0.0
    return [
        _confirmation(node, base, pairs, slow, controls)
        for node in (*blame.flagged, *blame.suspected)
    ]


def _controls(pairs: Sequence[GroupThroughput]) -> _Controls | None:
    """The controls' median, and the loss that a further pair of such nodes hardly ever has."""
    values = [group.samples_per_s for group in pairs if group.samples_per_s]
    if not values:
        return None
    # Repeats of one pair say nothing of how pairs differ.
    by_pair: dict[frozenset[str], list[float]] = {}
    for group in pairs:
        by_pair.setdefault(frozenset(group.hosts), []).append(group.samples_per_s or 0.0)
    n = len(by_pair)
    centre = float(np.median(values))
    if n < FEWEST_CONTROLS:
        return _Controls(centre, None)
    logs = np.log([float(np.median(repeats)) for repeats in by_pair.values()])
    times = max(REACH, student_t(1 - CHANCE, n - 1) * (1 + 1 / n) ** 0.5)
    wide = times * float(np.std(logs, ddof=1))
    return _Controls(centre, 1 - float(np.exp(-wide)))


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
    measure = node.value / (1 - node.loss) if node.by == "its own history" else base
    least = 1 - (SHOWN * node.value + (1 - SHOWN) * measure) / base
    if least <= 0:
        return Confirmation(node.host, None, float(np.mean(losses)))
    shown = min(losses) > least
    if node.suspected and shown:
        is_judged = controls.reach is not None and len(values) >= PARTNERS
        shown = min(losses) > controls.reach if is_judged and controls.reach is not None else None
    return Confirmation(node.host, shown, float(np.mean(losses)))


Standing = Literal["confirmed", "refuted", "alone"]
"""Of a node that its own value calls slow: by a second witness, or without one."""
SCATTERS = 3.0
"""Scatters of groups without it that groups with a slow node must lose."""


@dataclass(frozen=True)
class NodeEvidence:
    """What bears out, or refutes, that one node is slow."""

    node: NodeVerdict
    standing: Standing
    by: Literal["its pairs", "its repeats", "its groups", "nothing"]
    group_loss: float | None = None
    """Median loss of its groups against groups without a slow node; None where none tell."""


def evidence(
    blame: SlowNodeReport, confirmed: Sequence[Confirmation], measured: Sequence[GroupThroughput]
) -> list[NodeEvidence]:
    """The standing of every node that its own values flag, slowest first."""
    by_host = {confirmation.host: confirmation.confirmed for confirmation in confirmed}
    losses = group_losses({node.host for node in blame.flagged}, measured)
    base = float(np.median([node.value for node in blame.nodes])) if blame.nodes else 1.0
    return [
        _of(node, base, by_host.get(node.host), losses.get(node.host)) for node in blame.flagged
    ]


def group_losses(
    slow: set[str], measured: Sequence[GroupThroughput]
) -> dict[str, tuple[float, float]]:
    """By host of `slow`: the median loss of its groups, and what such groups lose by chance.

    A group counts that has one of them and whose size has at least three planned groups without
    any; it is held against their median, and chance is three of their scatters.
    """
    by_host: dict[str, list[tuple[float, float]]] = {}
    for size, groups in by_size(measured).items():
        usual = [g.samples_per_s or 0.0 for g in groups if not slow & {*g.hosts}]
        if size < 2 or len(usual) < FEWEST_ALIKE:
            continue
        centre = float(np.median(usual))
        chance = SCATTERS * NORMAL_MAD * float(np.median(np.abs(np.array(usual) - centre))) / centre
        for group in groups:
            members = slow & {*group.hosts}
            if len(members) == 1:
                loss = 1 - (group.samples_per_s or 0.0) / centre
                by_host.setdefault(members.pop(), []).append((loss, chance))
    return {
        host: (float(np.median([loss for loss, _ in pairs])), max(chance for _, chance in pairs))
        for host, pairs in by_host.items()
    }


def _of(
    node: NodeVerdict, base: float, by_pairs: bool | None, by_groups: tuple[float, float] | None
) -> NodeEvidence:
    loss = by_groups[0] if by_groups else None
    if by_pairs is not None:
        return NodeEvidence(node, "confirmed" if by_pairs else "refuted", "its pairs", loss)
    if node.repeated:
        return NodeEvidence(node, "confirmed", "its repeats", loss)
    if by_groups is None:
        return NodeEvidence(node, "alone", "nothing")
    # What its measure lies below the other nodes, its groups lose in good health as well.
    usual = max(0.0, 1 - node.value / (1 - node.loss) / base)
    beyond, chance = by_groups[0] - usual, by_groups[1]
    if beyond > max(SHOWN * node.loss, chance, LEAST_LOSS):
        return NodeEvidence(node, "confirmed", "its groups", loss)
    return NodeEvidence(node, "refuted" if beyond < LEAST_LOSS else "alone", "its groups", loss)


def disturbed_hosts(witnessed: Sequence[NodeEvidence]) -> frozenset[str]:
    """Hosts whose own value was a disturbance: what was measured with them tells another speed."""
    return frozenset(e.node.host for e in witnessed if e.standing == "refuted")
