"""A made-up cluster with known faults, which is measured as a real one would be."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import log2
from typing import Literal

import numpy as np

from paceline.core.errors import UserError
from paceline.core.node_groups import GroupThroughput, Purpose
from paceline.core.steps import FloatColumn

MOST_NODES = 4096
FaultKind = Literal["slow", "noisy", "link"]
_FAULT = re.compile(r"(slow|noisy|link)=(\d+):(\d+(?:\.\d+)?)\s*%?")


@dataclass(frozen=True)
class Fault:
    """Something wrong with one node, or with one switch's way to the others; numbers begin at 1.

    slow: the node is slower by `size`. noisy: each run costs it a random part, on average 0.8 of
    `size`. link: groups with hosts on both sides of the switch's uplink lose `size`.
    """

    kind: FaultKind
    number: int
    size: float
    """Fraction, 0 to 1."""


@dataclass(frozen=True)
class SimulatedCluster:
    """What a synthetic cluster is made of."""

    num_nodes: int
    faults: tuple[Fault, ...] = ()
    samples_per_s: float = 100.0
    """Of the median node."""
    node_spread: float = 0.003
    """Standard deviation of the nodes' lasting speeds, relative."""
    run_noise: float = 0.0015
    """Of one node from run to run."""
    communication: float = 0.001
    """Loss per doubling of the nodes."""
    nodes_per_switch: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_nodes <= MOST_NODES:
            raise UserError(
                f"{self.num_nodes} nodes", "cannot be simulated", allowed=f"1 to {MOST_NODES}"
            )
        for fault in self.faults:
            what = "switch" if fault.kind == "link" else "node"
            most = -(-self.num_nodes // self.nodes_per_switch)
            most = most if fault.kind == "link" else self.num_nodes
            if not 1 <= fault.number <= most or not 0 < fault.size < 1:
                raise UserError(
                    f"fault {fault.kind}={fault.number}:{100 * fault.size:g}%",
                    f"there is no such {what} or share",
                    allowed=f"{what} 1 to {most}, more than 0 % and less than 100 %",
                )

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """node-0001 and so on."""
        return tuple(f"node-{number:04d}" for number in range(1, self.num_nodes + 1))

    @property
    def topology(self) -> dict[str, str]:
        """The switch of each host."""
        return {
            host: f"switch-{at // self.nodes_per_switch + 1}" for at, host in enumerate(self.hosts)
        }

    @cached_property
    def true_speeds(self) -> FloatColumn:
        """Lasting samples/s of each node, faults included."""
        rng = np.random.default_rng([self.seed, 0])
        speeds = self.samples_per_s * np.exp(rng.normal(0, self.node_spread, self.num_nodes))
        for fault in self.faults:
            if fault.kind == "slow":
                speeds[fault.number - 1] *= 1 - fault.size
        return speeds

    def measure(
        self, groups: Iterable[tuple[str, ...]], number: int, purpose: Purpose = "plan"
    ) -> list[GroupThroughput]:
        """Each group once: its slowest member of the moment, less communication.

        `number` tells one occasion from another: the same number gives the same luck.
        """
        rng = np.random.default_rng([self.seed, 1, number])
        return [GroupThroughput(hosts, self._run(hosts, rng), purpose=purpose) for hosts in groups]

    def _run(self, hosts: tuple[str, ...], rng: np.random.Generator) -> float:
        at = np.array([self._places[host] for host in hosts])
        speeds = self.true_speeds[at] * np.exp(rng.normal(0, self.run_noise, len(at)))
        lost = len(hosts) * (1 - self.communication * log2(len(hosts)))
        for fault in self.faults:
            if fault.kind == "noisy" and (noisy := np.flatnonzero(at == fault.number - 1)).size:
                speeds[noisy] *= np.exp(-abs(rng.normal(0, fault.size)))
            elif fault.kind == "link":
                behind = at // self.nodes_per_switch == fault.number - 1
                lost *= 1 - fault.size if behind.any() and not behind.all() else 1
        return float(speeds.min()) * lost

    @cached_property
    def _places(self) -> Mapping[str, int]:
        return {host: at for at, host in enumerate(self.hosts)}


def parse_fault(text: str) -> Fault:
    """A fault written as `slow=17:5%`, `noisy=9:3%` or `link=2:4%`."""
    match = _FAULT.fullmatch(text.strip().lower())
    if match is None:
        raise UserError(
            f"fault {text!r}",
            "cannot be read",
            allowed="slow=NODE:5%, noisy=NODE:3%, link=SWITCH:4%",
        )
    kind, number, size = match.groups()
    kinds: dict[str, FaultKind] = {"slow": "slow", "noisy": "noisy", "link": "link"}
    return Fault(kinds[kind], int(number), float(size) / 100)
