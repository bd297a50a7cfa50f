"""Nodes ranked by how slow they are, which of them are flagged, and what replacing them gains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf
from statistics import NormalDist
from typing import Literal

import numpy as np

from paceline.compare.significance import student_t
from paceline.scaling.analysis.node_speeds import MEDIAN_ERROR, NodeSpeeds, common_scatter
from paceline.scaling.analysis.reliability import PersistentComponent

JudgedBy = Literal["the other nodes", "the reference", "its own history", "nothing"]
WORST_Z = -4.0
SUSPECT_Z = -3.0
"""Below it a node is slow enough for a second pass, and flagged only by that."""
MOST_SUSPECTED = 0.1
"""Nodes below the bound in a healthy cluster, on average: of many nodes some are slow by chance."""
LEAST_LOSS = 0.01
FLOAT_ERROR = 1e-12
"""Of a loss: 1 - 99 / 100 is a little more than 0.01 in floating point."""
FEWEST_JUDGED = 8
"""With fewer nodes their median and spread say too little of any of them."""
FEWEST_EARLIER = 3
FEWEST_IN_COMMON = 3
"""Nodes with a history, from which on their median tells what the cluster changed in common."""
ROUNDING = 12**-0.5
"""Deviation of what was rounded, over the step of the print."""
SURE = 0.999
"""Quantile of Student's t that takes the place of WORST_Z where few repeats tell the scale."""
POWER = 0.9
"""Share of the cases in which the smallest fault is seen."""
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
class NodeVerdict:
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
    repeated: bool = False
    """Flagged, and so would its second-slowest value alone be: two independent measurements."""


@dataclass(frozen=True)
class ReplacementGain:
    """What replacing the slowest nodes by ones as fast as the next slowest gives."""

    hosts: tuple[str, ...]
    value: float
    """Relative gain of a group of all nodes."""
    low: float
    high: float


@dataclass(frozen=True)
class SlowNodeReport:
    """Every node judged, slowest first."""

    nodes: tuple[NodeVerdict, ...]
    smallest_fault: float | None
    """The loss that a node's own value would have shown with 90 % power; None when nothing is
    judged. What bears a value out is another matter."""
    common_change: float = 1.0
    """The median ratio of all nodes to their own history, by which that was multiplied."""

    @property
    def flagged(self) -> tuple[NodeVerdict, ...]:
        return tuple(node for node in self.nodes if node.flagged)

    @property
    def suspected(self) -> tuple[NodeVerdict, ...]:
        """Nodes that only a second pass can flag."""
        return tuple(node for node in self.nodes if node.suspected)


def judge_nodes(
    speeds: NodeSpeeds,
    resolution: float = 0.0,
    reference: HealthySpeed | None = None,
    history: Mapping[str, Sequence[float]] | None = None,
) -> SlowNodeReport:
    """Each node by its own history, else, from eight on, the other nodes, else the reference.

    Flagged is z < -4 and more than 1 % below the measure, z = (value - measure) / scale. The scale
    is the largest of 1.4826 x MAD of what it is judged by, the error by repeats, and `resolution`
    (the step of the printed values in samples/s) / sqrt(12), the deviation of what was rounded.
    Where few repeats tell the scale, it takes the t of 99.9 % instead of 4. Suspected is, among
    enough other nodes, z < -3 and as much below them; of more than 74 nodes the z that a tenth of a
    node has by chance. A value that nothing but the margin judges is suspected too. Where three
    nodes have a history, what all of them changed in common is taken from it.
    """
    earlier = {host: list(v) for host, v in (history or {}).items() if len(v) >= FEWEST_EARLIER}
    change = common_change(speeds, earlier)
    measures = _measures(speeds, reference, earlier, change)
    rows = [_judged(speeds, at, measures[host], resolution) for at, host in enumerate(speeds.hosts)]
    scales = [scale for _, scale in rows if scale is not None]
    by_others = any(node.by == "the other nodes" for node, _ in rows)
    n = len(rows) if by_others else None
    degrees = min((m.degrees for m in measures.values() if m.by != "nothing"), default=inf)
    smallest = findable(float(np.median(scales)), n, degrees) if scales else None
    nodes = sorted((node for node, _ in rows), key=lambda node: node.value)
    return SlowNodeReport(tuple(nodes), smallest, change)


def common_change(speeds: NodeSpeeds, earlier: Mapping[str, Sequence[float]]) -> float:
    """The median of value / earlier median over the nodes with a history; 1 below three of them."""
    ratios = [
        float(value) / float(np.median(earlier[host]))
        for host, value in zip(speeds.hosts, speeds.values, strict=True)
        if host in earlier
    ]
    return float(np.median(ratios)) if len(ratios) >= FEWEST_IN_COMMON else 1.0


@dataclass(frozen=True)
class _Measure:
    """What a node is judged by."""

    value: float
    spread: float
    by: JudgedBy
    degrees: float = inf
    """Degrees of freedom of the spread, where repeats tell it."""


def _measures(
    speeds: NodeSpeeds,
    reference: HealthySpeed | None,
    earlier: Mapping[str, Sequence[float]],
    change: float,
) -> dict[str, _Measure]:
    """Each host's measure: its history, else enough other nodes, the reference, or nothing."""
    past_spread = common_scatter(earlier) or 0.0
    if len(speeds.hosts) >= FEWEST_JUDGED:
        usual = _Measure(speeds.base, speeds.spread, "the other nodes")
    elif reference is not None:
        degrees = inf if reference.spread else speeds.degrees
        usual = _Measure(reference.samples_per_s, reference.spread, "the reference", degrees)
    else:
        usual = _Measure(speeds.base, speeds.spread, "nothing")
    degrees = speeds.degrees + sum(len(values) - 1 for values in earlier.values())

    def own(values: Sequence[float]) -> _Measure:
        # A new value and the median of n earlier ones are both off by luck.
        wide = past_spread * (1 + MEDIAN_ERROR**2 / len(values)) ** 0.5
        return _Measure(change * float(np.median(values)), wide, "its own history", degrees)

    return {host: own(earlier[host]) if host in earlier else usual for host in speeds.hosts}


def _judged(
    speeds: NodeSpeeds, at: int, measure: _Measure, resolution: float
) -> tuple[NodeVerdict, float | None]:
    """The node and the relative scale that it was judged on; None where nothing tells one."""
    value, error = float(speeds.values[at]), float(speeds.errors[at])
    loss = 1 - value / measure.value
    scale = None
    if measure.by == "the other nodes" or (measure.by != "nothing" and measure.spread + error > 0):
        scale = max(measure.spread, error, ROUNDING * resolution / measure.value, LEAST_SCALE)
    z = None if scale is None else -loss / scale
    flagged = z is not None and z < -least_z(measure.degrees) and is_loss(loss)
    # A single value against a reference without a spread: the margin alone raises a suspicion.
    near = z is None or (z < suspect_z(len(speeds.hosts)) and measure.by == "the other nodes")
    suspected = near and measure.by != "nothing" and is_loss(loss) and not flagged
    again = 1 - float(speeds.next_slowest[at]) / measure.value
    judged = NodeVerdict(
        host=speeds.hosts[at],
        value=value,
        z=z,
        loss=loss,
        flagged=flagged,
        by=measure.by,
        repeats=int(speeds.repeats[at]),
        suspected=suspected,
        repeated=flagged and is_loss(again) and again > loss / 2,
    )
    return judged, scale


def is_loss(loss: float) -> bool:
    """Whether a node loses more than the margin; one at it does not."""
    return loss > LEAST_LOSS + FLOAT_ERROR


def suspect_z(num_nodes: int) -> float:
    """The z below which one of so many nodes is suspected: fewer of more nodes are so by chance."""
    return min(SUSPECT_Z, NormalDist().inv_cdf(MOST_SUSPECTED / num_nodes))


def least_z(degrees: float) -> float:
    """The -z beyond which a node is flagged: 4, or Student's t where few repeats tell the scale."""
    return max(-WORST_Z, student_t(SURE, max(1.0, degrees)))


def findable(scale: float, num_nodes: int | None = None, degrees: float = inf) -> float:
    """The smallest loss that a node's own value shows in 9 of 10 cases, at this relative scale.

    max((z + 130 / n^2) x scale, 1 %) + (t + 3.2 / n) x scale: the threshold z of `least_z`, and
    what the luck of the node hides of its loss, t the 90 % quantile of Student's t. n nodes tell
    the scale themselves; the terms in n, fitted to simulated normal values, pay for that. Without
    `num_nodes` the scale is known from elsewhere, or from repeats with so many `degrees`.
    """
    few, fewer = (130 / num_nodes**2, 3.2 / num_nodes) if num_nodes else (0.0, 0.0)
    luck = student_t(POWER, max(1.0, degrees))
    return max((least_z(degrees) + few) * scale, LEAST_LOSS) + (luck + fewer) * scale


def gains(
    speeds: NodeSpeeds, lasting: PersistentComponent, num_flagged: int = 0, seed: int = 0
) -> list[ReplacementGain]:
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
    by_count: list[ReplacementGain] = []
    for k in sorted({*COUNTS_REPLACED, num_flagged} - {0}):
        if k >= len(shrunk):
            break
        # The new ones are no slower than the slowest of the others, so they do not count.
        value = float(shrunk[order[k:]].min() - shrunk[order].min())
        changes = drawn[:, order[k:]].min(axis=1) - drawn.min(axis=1)
        low, high = (float(np.quantile(changes, q)) for q in (0.025, 0.975))
        by_count.append(
            ReplacementGain(
                tuple(speeds.hosts[at] for at in order[:k]),
                exp(value) - 1,
                exp(min(low, value)) - 1,
                exp(max(high, value)) - 1,
            )
        )
    return by_count
