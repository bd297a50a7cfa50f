"""Throughput of groups of nodes as it was measured, and which of it belongs together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Purpose = Literal["plan", "second pass", "bisection"]


@dataclass(frozen=True)
class Measured:
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


def main_series(measured: Sequence[Measured]) -> tuple[list[Measured], list[Measured]]:
    """The values of the series with the most hosts, and what was measured apart from it."""
    hosts: dict[str, set[str]] = {}
    for one in measured:
        hosts.setdefault(one.series, set()).update(one.hosts)
    main = max(hosts, key=lambda name: len(hosts[name]))
    kept = [one for one in measured if one.series == main]
    return kept, [one for one in measured if one.series != main]


def by_size(measured: Iterable[Measured], planned: bool = True) -> dict[int, list[Measured]]:
    """Successful groups by their number of nodes, in rising order; `planned` leaves out follow-ups."""
    sizes: dict[int, list[Measured]] = {}
    for one in measured:
        if one.samples_per_s is not None and (one.purpose == "plan" or not planned):
            sizes.setdefault(one.nodes, []).append(one)
    return dict(sorted(sizes.items()))
