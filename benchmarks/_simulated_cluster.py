"""A simulated cluster with known faults, measured and analysed as `paceline scale` does.

Several benchmarks and the tests of the analysis use it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log2
from pathlib import Path
from typing import Literal

import numpy as np

from paceline.core.node_groups import GroupThroughput, Purpose, Split, split_rounds
from paceline.core.steps import FloatColumn, IntColumn
from paceline.scaling.analysis.analysis import Analysis, AnalysisContext, analyse, next_groups

MAX_FOLLOW_UPS = 40
"""A bisection takes two steps per doubling of the nodes at most."""
FaultKind = Literal["slow", "noisy", "intermittent", "link", "pair", "cable"]


@dataclass(frozen=True)
class Fault:
    """Something wrong with one node, or with one switch's way to the others; numbers begin at 1.

    slow: the node is slower by `size`. noisy: each run costs it a random part, on average 0.8 of
    `size`. intermittent: `share` of its runs lose `size`. link: groups with hosts on both sides of
    the switch's uplink lose `size`. pair: groups with this node and the next one lose it. cable:
    all groups with this node lose it, but the node alone does not.
    """

    kind: FaultKind
    number: int
    size: float
    """Fraction, 0 to 1."""
    share: float = 1.0
    """Share of the runs in which an intermittent node is slow."""


@dataclass(frozen=True)
class SimulatedCluster:
    """Parameters of a synthetic cluster."""

    num_nodes: int
    faults: tuple[Fault, ...] = ()
    samples_per_s: float = 100.0
    """Step time of the median node."""
    node_spread: float = 0.003
    """Standard deviation of the nodes' lasting speeds, relative."""
    run_noise: float = 0.0015
    """Run-to-run variation of one node."""
    communication: float = 0.001
    """Loss per doubling of the nodes."""
    nodes_per_switch: int = 16
    seed: int = 0

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
        """Persistent samples/s of each node, faults included."""
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
        wait_share = len(hosts) * (1 - self.communication * log2(len(hosts)))
        for fault in self.faults:
            is_node = at == fault.number - 1
            match fault.kind:
                case "noisy" if is_node.any():
                    speeds[is_node] *= np.exp(-abs(rng.normal(0, fault.size)))
                case "intermittent" if is_node.any() and rng.random() < fault.share:
                    speeds[is_node] *= 1 - fault.size
                case "link" | "pair" | "cable" if self._crosses(fault, at):
                    wait_share *= 1 - fault.size
                case _:
                    pass
        return float(speeds.min()) * wait_share

    def _crosses(self, fault: Fault, at: IntColumn) -> bool:
        """Return whether a group of the hosts `at` uses the faulty link."""
        if fault.kind == "link":
            behind = at // self.nodes_per_switch == fault.number - 1
        else:
            behind = at == fault.number - 1
            if fault.kind == "pair":
                return bool(behind.any() and (at == fault.number).any())
        return bool(behind.any() and not behind.all())

    @cached_property
    def _places(self) -> Mapping[str, int]:
        return {host: at for at, host in enumerate(self.hosts)}


def simulate(
    cluster: SimulatedCluster,
    sizes: Sequence[int],
    how: Split = "contiguous",
    num_rounds: int = 1,
    context: AnalysisContext | None = None,
) -> Analysis:
    """Measure every size in rounds, then whatever the suspicions ask for, and analyse it."""
    rounds = [
        round_
        for size in sorted(set(sizes))
        for round_ in split_rounds(
            cluster.hosts,
            size,
            how,
            num_rounds=num_rounds,
            seed=cluster.seed,
            topology=cluster.topology,
        )
    ]
    measured: list[GroupThroughput] = []
    for number, round_ in enumerate(rounds):
        measured += cluster.measure(round_.groups, number)
    number = len(rounds)
    for _ in range(MAX_FOLLOW_UPS):
        analysis = analyse(measured, context)
        step = next_groups(analysis)
        if step is None:
            return analysis
        purpose, follow_ups = step
        for groups in follow_ups:
            measured += cluster.measure(groups, number, purpose)
            number += 1
    return analyse(measured, context)


def write_table(path: Path, analysis: Analysis) -> Path:
    """Write the sub-clusters of an analysis as a table that `paceline scale --from` reads."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["hosts", "samples_per_s", "purpose"])
        for group in analysis.measured:
            writer.writerow([" ".join(group.hosts), f"{group.samples_per_s:.6f}", group.purpose])
    return path
