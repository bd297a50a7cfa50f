"""Throughput of groups of nodes as it was measured, and which of it belongs together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Purpose = Literal["plan", "second pass", "bisection"]
"""Why a group is trained: a size of the plan, or a suspicion followed up."""
ScalingKind = Literal["weak", "strong"]
"""What stays the same as nodes are added: the batch of each node (weak), or of all (strong)."""


@dataclass(frozen=True)
class GroupThroughput:
    """One training of one group of nodes."""

    hosts: tuple[str, ...]
    samples_per_s: float | None
    """Of the whole group; None when it failed."""
    series: str = ""
    """The hostfile group: values of different series are not held against each other."""
    purpose: Purpose = "plan"
    """What was measured to follow a suspicion up is no fair sample of its size."""

    @property
    def nodes(self) -> int:
        """Size of the group."""
        return len(self.hosts)


def main_series(
    measured: Sequence[GroupThroughput],
) -> tuple[list[GroupThroughput], list[GroupThroughput]]:
    """The values of the series with the most hosts, and what was measured apart from it."""
    hosts: dict[str, set[str]] = {}
    for group in measured:
        hosts.setdefault(group.series, set()).update(group.hosts)
    main = max(hosts, key=lambda name: len(hosts[name]))
    kept = [group for group in measured if group.series == main]
    return kept, [group for group in measured if group.series != main]


def by_size(
    measured: Iterable[GroupThroughput], planned: bool = True
) -> dict[int, list[GroupThroughput]]:
    """Successful groups by their number of nodes, rising; `planned` leaves out follow-ups."""
    sizes: dict[int, list[GroupThroughput]] = {}
    for group in measured:
        if group.samples_per_s is not None and (group.purpose == "plan" or not planned):
            sizes.setdefault(group.nodes, []).append(group)
    return dict(sorted(sizes.items()))
