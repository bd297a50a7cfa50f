"""Measured throughput of groups of nodes, by series and size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

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
