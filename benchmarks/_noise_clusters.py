"""Clusters whose nodes differ as real ones do, and tables of what was measured on them.

Written apart from the package and its constants: nothing of Paceline is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
Draw = np.random.Generator
NODE = 83.7
"""Samples/s of a usual node."""
NODES_PER_SWITCH = 8
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Row:
    """One measured group: its members by number, and samples/s."""

    members: tuple[int, ...]
    samples_per_s: float


@dataclass
class Cluster:
    """Persistent speeds of the nodes, and what a single measurement adds."""

    speeds: Values
    luck: Callable[[Draw, int], Values]
    """Logarithms that are added to each member's speed in one measurement."""
    rng: Draw
    slow_pair: tuple[int, int] | None = None
    """Two nodes whose link to each other loses 5%; each is fast with all others."""
    slow_switch: int | None = None
    """A switch whose way to the others loses 4%."""
    decimals: int = 4
    """Number of decimals of the printed samples/s."""
    earlier: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """Each node's values of other days."""
    reference: float | None = None
    """Samples/s of a healthy node, from elsewhere."""

    @property
    def slow_nodes(self) -> set[int]:
        """Nodes that are truly more than 1% slower than the usual one, or than the reference."""
        usual = self.reference or float(np.median(self.speeds))
        return {int(node) for node in np.flatnonzero(self.speeds < 0.99 * usual)}

    def measured(self, members: Sequence[int]) -> Row:
        """One training of a group: its slowest member of the moment, less communication."""
        at = np.array(members)
        speeds = self.speeds[at] * np.exp(self.luck(self.rng, len(at)))
        total = float(speeds.min()) * len(at) * (1 - 0.002 * np.log2(len(at)))
        behind = at // NODES_PER_SWITCH == self.slow_switch
        if behind.any() and not behind.all():
            total *= 0.96
        if self.slow_pair is not None and set(self.slow_pair) <= set(members):
            total *= 0.95
        return Row(tuple(members), round(total, self.decimals))

    def table(self, repeats: int) -> list[Row]:
        """Return every size in contiguous groups, each repeated `repeats` times."""
        n = len(self.speeds)
        sizes = [size for size in SIZES if size <= n]
        return [
            self.measured(range(first, first + size))
            for _ in range(repeats)
            for size in sizes
            for first in range(0, n - size + 1, size)
        ]


@dataclass(frozen=True)
class ClusterNoise:
    """One kind of cluster; what its nodes differ by is as they came."""

    name: str
    make: Callable[[Draw, int], Cluster]
    loss: float = 0.05
    """Loss of a slowed node with which the power is measured."""

    def cluster(self, rng: Draw, nodes: int, loss: float = 0.0) -> Cluster:
        """A cluster whose node 3 is slower by `slowed`."""
        cluster = self.make(rng, nodes)
        cluster.speeds[3] *= 1 - loss
        return cluster


def _normal_luck(deviation: float) -> Callable[[Draw, int], Values]:
    return lambda rng, n: rng.normal(0, deviation, n)


def _speeds(rng: Draw, n: int, deviation: float = 0.003) -> Values:
    return NODE * np.exp(rng.normal(0, deviation, n))


def _normal(rng: Draw, n: int) -> Cluster:
    return Cluster(_speeds(rng, n), _normal_luck(0.0015), rng)


def _lucky(rng: Draw, n: int) -> Cluster:
    return Cluster(_speeds(rng, n), _normal_luck(0.008), rng)


def _alike(rng: Draw, n: int) -> Cluster:
    return Cluster(np.full(n, NODE), _normal_luck(0.003), rng)


def _fat_tails(rng: Draw, n: int) -> Cluster:
    logs = 0.003 * rng.standard_t(4, n) / 2**0.5
    return Cluster(NODE * np.exp(logs), _normal_luck(0.0015), rng)


def _lottery(rng: Draw, n: int) -> Cluster:
    """Chips that are mostly alike, and some of which are worse."""
    return Cluster(NODE * np.exp(-0.003 * rng.exponential(1.0, n)), _normal_luck(0.0015), rng)


def _switch_groups(rng: Draw, n: int) -> Cluster:
    """Nodes under one switch, or in one rack, are alike."""
    shared = rng.normal(0, 0.004, -(-n // NODES_PER_SWITCH))
    logs = np.repeat(shared, NODES_PER_SWITCH)[:n] + rng.normal(0, 0.002, n)
    return Cluster(NODE * np.exp(logs), _normal_luck(0.0015), rng)


def _two_deliveries(rng: Draw, n: int) -> Cluster:
    """A third of the nodes came later and is 1.5% slower."""
    logs = rng.normal(0, 0.002, n) - 0.015 * (rng.random(n) < 1 / 3)
    return Cluster(NODE * np.exp(logs), _normal_luck(0.0015), rng)


def _with_disturbance(share: float) -> Callable[[Draw, int], Cluster]:
    """Some measurements are 2 to 8% slower, whatever the node."""

    def luck(rng: Draw, n: int) -> Values:
        hit = rng.random() < share
        return rng.normal(0, 0.0015, n) - hit * rng.uniform(0.02, 0.08)

    return lambda rng, n: Cluster(_speeds(rng, n), luck, rng)


def _whole_numbers(rng: Draw, n: int) -> Cluster:
    return Cluster(_speeds(rng, n) / 2, _normal_luck(0.0015), rng, decimals=0)


def _slow_uplink(rng: Draw, n: int) -> Cluster:
    """No node is slow, the way out of one switch is."""
    switches = -(-n // NODES_PER_SWITCH)
    switch = int(rng.integers(switches)) if switches > 1 else None
    return Cluster(_speeds(rng, n), _normal_luck(0.0015), rng, slow_switch=switch)


def _slow_pair(rng: Draw, n: int) -> Cluster:
    """No node is slow, the link between two neighbors is."""
    first = int(rng.integers(n - 1))
    return Cluster(_speeds(rng, n), _normal_luck(0.0015), rng, slow_pair=(first, first + 1))


def _intermittent(rng: Draw, n: int) -> Cluster:
    """Nodes that are 3 to 10% slow now and then: one of the cluster in a tenth of its runs."""
    cluster = Cluster(_speeds(rng, n), _normal_luck(0.0015), rng)

    def luck(draw: Draw, members: int) -> Values:
        logs = draw.normal(0, 0.0015, members)
        if draw.random() < 0.1 * members / n:
            logs[draw.integers(members)] -= draw.uniform(0.03, 0.1)
        return logs

    cluster.luck = luck
    return cluster


def _all_slower_today(rng: Draw, n: int) -> Cluster:
    """Earlier values are of a day on which all nodes were 1 to 2% faster."""
    cluster = _normal(rng, n)
    before = cluster.speeds * (1 + rng.uniform(0.01, 0.02))
    cluster.earlier = {
        node: [float(v) for v in before[node] * np.exp(rng.normal(0, 0.0015, 4))]
        for node in range(n)
    }
    return cluster


def _against_a_reference(rng: Draw, n: int) -> Cluster:
    """Four nodes against a figure from elsewhere; single measurements scatter by 0.5%."""
    cluster = Cluster(_speeds(rng, 4), _normal_luck(0.005), rng)
    cluster.reference = NODE
    return cluster


CLUSTER_NOISES: tuple[ClusterNoise, ...] = (
    ClusterNoise("normal", _normal),
    ClusterNoise("luck of 0.8% a run", _lucky, loss=0.1),
    ClusterNoise("all alike", _alike),
    ClusterNoise("fat-tailed nodes", _fat_tails),
    ClusterNoise("lottery of chips", _lottery),
    ClusterNoise("switch groups", _switch_groups),
    ClusterNoise("two deliveries", _two_deliveries, loss=0.1),
    ClusterNoise("2% of measurements disturbed", _with_disturbance(0.02)),
    ClusterNoise("10% of measurements disturbed", _with_disturbance(0.1)),
    ClusterNoise("printed in whole samples/s", _whole_numbers, loss=0.1),
    ClusterNoise("a slow uplink", _slow_uplink),
    ClusterNoise("a slow link of two nodes", _slow_pair),
    ClusterNoise("nodes slow now and then", _intermittent),
    ClusterNoise("all slower than in the history", _all_slower_today),
    ClusterNoise("four nodes against a reference", _against_a_reference),
)
