"""Nodes ranked by how slow they are, which of them are flagged, and what replacing them gains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from statistics import NormalDist
from typing import Literal

import numpy as np

from paceline.scaling.analysis.node_speeds import NodeSpeeds, common_scatter
from paceline.scaling.analysis.reliability import Lasting

JudgedBy = Literal["the other nodes", "the reference", "its own history", "nothing"]
WORST_Z = -4.0
SUSPECT_Z = -3.0
"""Below it a node is slow enough for a second pass, and flagged only by that."""
MOST_SUSPECTED = 0.1
"""Nodes below the bound in a healthy cluster, on average: of many nodes some are slow by chance."""
LEAST_LOSS = 0.01
FEWEST_JUDGED = 8
"""With fewer nodes their median and spread say too little of any of them."""
FEWEST_EARLIER = 3
POWER_Z = 1.2816
"""90 % quantile of the normal distribution."""
LEAST_SCALE = 1e-6
"""Relative; identical values do not make the smallest difference infinite."""
DRAWS = 1000
COUNTS_REPLACED = (1, 2, 4, 8)


@dataclass(frozen=True)
class HealthySpeed:
    """What a healthy node reaches, from elsewhere."""

    samples_per_s: float
    spread: float = 0.0
    """Relative standard deviation between healthy nodes; 0 when it is not known."""


@dataclass(frozen=True)
class Judged:
    """One node against its measure."""

    host: str
    value: float
    z: float | None
    """None where nothing judges it, or only the margin does."""
    loss: float
    """1 - value / measure; below 0 for a node that is faster."""
    flagged: bool
    by: JudgedBy
    repeats: int
    suspected: bool = False
    """Not flagged, but slow enough for a second pass."""


@dataclass(frozen=True)
class Gain:
    """What replacing the slowest nodes by ones as fast as the next slowest gives."""

    hosts: tuple[str, ...]
    value: float
    """Relative gain of a group of all nodes."""
    low: float
    high: float


@dataclass(frozen=True)
class Blame:
    """Every node judged, slowest first."""

    nodes: tuple[Judged, ...]
    smallest_fault: float | None
    """The loss that would have been found with 90 % power; None when nothing is judged."""

    @property
    def flagged(self) -> tuple[Judged, ...]:
        return tuple(node for node in self.nodes if node.flagged)

    @property
    def suspected(self) -> tuple[Judged, ...]:
        """Nodes that only a second pass can flag."""
        return tuple(node for node in self.nodes if node.suspected)


def judge_nodes(
    speeds: NodeSpeeds,
    resolution: float = 0.0,
    reference: HealthySpeed | None = None,
    history: Mapping[str, Sequence[float]] | None = None,
) -> Blame:
    """Each node by its own history, else, from eight on, the other nodes, else the reference.

    Flagged is z < -4 and more than 1 % below the measure, z = (value - measure) / scale. The scale
    is the largest of 1.4826 x MAD of what it is judged by, the error by repeats, and `resolution`:
    the step of the printed values in samples/s. Suspected is, among enough other nodes, z < -3 and
    as much below them; of more than 74 nodes the z that a tenth of a node has by chance.
    """
    earlier = {host: list(v) for host, v in (history or {}).items() if len(v) >= FEWEST_EARLIER}
    measures = _measures(speeds, reference, earlier)
    rows = [_judged(speeds, at, measures[host], resolution) for at, host in enumerate(speeds.hosts)]
    scales = [scale for _, scale in rows if scale is not None]
    by_others = any(node.by == "the other nodes" for node, _ in rows)
    n = len(rows) if by_others else None
    smallest = findable(float(np.median(scales)), n) if scales else None
    nodes = sorted((node for node, _ in rows), key=lambda node: node.value)
    return Blame(tuple(nodes), smallest)


@dataclass(frozen=True)
class _Measure:
    """What a node is judged by."""

    value: float
    spread: float
    by: JudgedBy


def _measures(
    speeds: NodeSpeeds, reference: HealthySpeed | None, earlier: Mapping[str, Sequence[float]]
) -> dict[str, _Measure]:
    """Each host's measure: its history, else enough other nodes, the reference, or nothing."""
    past_spread = common_scatter(earlier) or 0.0
    if len(speeds.hosts) >= FEWEST_JUDGED:
        usual = _Measure(speeds.base, speeds.spread, "the other nodes")
    elif reference is not None:
        usual = _Measure(reference.samples_per_s, reference.spread, "the reference")
    else:
        usual = _Measure(speeds.base, speeds.spread, "nothing")
    return {
        host: _Measure(float(np.median(earlier[host])), past_spread, "its own history")
        if host in earlier
        else usual
        for host in speeds.hosts
    }


def _judged(
    speeds: NodeSpeeds, at: int, measure: _Measure, resolution: float
) -> tuple[Judged, float | None]:
    """The node and the relative scale that it was judged on; None where nothing tells one."""
    value, error = float(speeds.values[at]), float(speeds.errors[at])
    loss = 1 - value / measure.value
    scale = None
    if measure.by == "the other nodes" or (measure.by != "nothing" and measure.spread + error > 0):
        scale = max(measure.spread, error, resolution / measure.value, LEAST_SCALE)
    z = None if scale is None else -loss / scale
    # A single value against a reference without a spread: only the margin can judge.
    significant = measure.by != "nothing" if z is None else z < WORST_Z
    flagged = significant and loss > LEAST_LOSS
    near = z is not None and z < suspect_z(len(speeds.hosts)) and measure.by == "the other nodes"
    suspected = near and loss > LEAST_LOSS and not flagged
    repeats = int(speeds.repeats[at])
    return Judged(speeds.hosts[at], value, z, loss, flagged, measure.by, repeats, suspected), scale


def suspect_z(num_nodes: int) -> float:
    """The z below which one of so many nodes is suspected: fewer of more nodes are so by chance."""
    return min(SUSPECT_Z, NormalDist().inv_cdf(MOST_SUSPECTED / num_nodes))


def findable(scale: float, num_nodes: int | None = None) -> float:
    """The smallest loss of a node that is flagged in 9 of 10 cases, at this relative scale.

    max((4 + 130 / n^2) x scale, 1 %) + (1.28 + 3.2 / n) x scale: the threshold, and what the luck
    of the node hides of its loss. n nodes tell the scale themselves; the terms in n, fitted to
    simulated normal values, pay for that. Without `num_nodes` the scale is known from elsewhere.
    """
    few, fewer = (130 / num_nodes**2, 3.2 / num_nodes) if num_nodes else (0.0, 0.0)
    return max((few - WORST_Z) * scale, LEAST_LOSS) + (POWER_Z + fewer) * scale


def gains(speeds: NodeSpeeds, lasting: Lasting, num_flagged: int = 0, seed: int = 0) -> list[Gain]:
    """The gain of replacing the k slowest nodes: the (k+1)-th slowest over the slowest.

    k is 1, 2, 4, 8 and the number of flagged nodes, as far as there are more nodes than that.

    Speeds are best guesses: pulled to the median by the reliability, outlying ones as measured. The
    interval comes from draws of the lasting speeds around them.
    """
    shrunk = speeds.logs * np.where(speeds.is_outlying, 1.0, lasting.reliability)
    order: list[int] = np.argsort(speeds.logs, kind="stable").tolist()
    error = lasting.noise * np.where(speeds.is_outlying, 1.0, lasting.reliability**0.5)
    rng = np.random.default_rng(seed)
    drawn = shrunk + error * rng.standard_normal((DRAWS, len(shrunk)))
    by_count: list[Gain] = []
    for k in sorted({*COUNTS_REPLACED, num_flagged} - {0}):
        if k >= len(shrunk):
            break
        # The new ones are no slower than the slowest of the others, so they do not count.
        value = float(shrunk[order[k:]].min() - shrunk[order].min())
        changes = drawn[:, order[k:]].min(axis=1) - drawn.min(axis=1)
        low, high = (float(np.quantile(changes, q)) for q in (0.025, 0.975))
        by_count.append(
            Gain(
                tuple(speeds.hosts[at] for at in order[:k]),
                exp(value) - 1,
                exp(min(low, value)) - 1,
                exp(max(high, value)) - 1,
            )
        )
    return by_count
