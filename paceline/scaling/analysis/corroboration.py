"""Who bears out that a node is slow: one value alone is one witness, and names nobody.

The second is the node's own repeats, pairs with proven nodes (`second_pass`), or the groups of the
same table that the node was part of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from paceline.core.node_groups import GroupThroughput, by_size
from paceline.core.stats import NORMAL_MAD
from paceline.scaling.analysis.bisection import FEWEST_ALIKE
from paceline.scaling.analysis.second_pass import SHOWN, Confirmation
from paceline.scaling.analysis.slow_nodes import LEAST_LOSS, NodeVerdict, SlowNodeReport

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
