"""Nodes ranked by speed, flagged slow nodes, and the gain from replacing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf
from statistics import NormalDist
from typing import Literal

import numpy as np

from paceline.compare.significance import student_t
from paceline.scaling.analysis.node_speeds import (
    MEDIAN_ERROR,
    NodeSpeeds,
    PersistentComponent,
    common_variation,
)

JudgedBy = Literal["the other nodes", "the reference", "its own history", "nothing"]
WORST_Z = -4.0
SUSPECT_Z = -3.0
"""Z-score below which a node is slow enough for a second pass, which alone can flag it."""
EXPECTED_SUSPECTS = 0.1
"""Expected number of suspected nodes in a healthy cluster: of many nodes some are slow by
chance."""
MIN_LOSS = 0.01
FLOAT_ERROR = 1e-12
"""Tolerance of a loss: 1 - 99 / 100 is slightly above 0.01 in floating point."""
MIN_COMPARED_NODES = 8
"""Minimum number of nodes for a comparison with their median and spread."""
MIN_HISTORY = 3
MIN_COMMON_NODES = 3
"""Minimum number of nodes with a history for an estimate of the change that all have in common."""
ROUNDING = 12**-0.5
"""Standard deviation of a rounded value, in rounding steps."""
FLAG_QUANTILE = 0.999
"""Quantile of Student's t that replaces WORST_Z where the scale comes from few repeats."""
POWER = 0.9
"""Probability with which the smallest fault is detected."""
MIN_SCALE = 1e-6
"""Lower bound of the relative scale, so that identical values do not give an infinite z-score."""
DRAWS = 1000
COUNTS_REPLACED = (1, 2, 4, 8)


@dataclass(frozen=True)
class HealthySpeed:
    """Speed of a healthy node, known from another source."""

    samples_per_s: float
    spread: float = 0.0
    """Relative standard deviation between healthy nodes; 0 if unknown."""


@dataclass(frozen=True)
class NodeVerdict:
    """One node compared with its reference value."""

    host: str
    value: float
    z: float | None
    """Z-score; None where there is no reference, or only the margin applies."""
    loss: float
    """1 - value / reference; below 0 for a node that is faster."""
    flagged: bool
    by: JudgedBy
    repeats: int
    suspected: bool = False
    """True if not flagged, but slow enough for a second pass."""
    repeated: bool = False
    """True if flagged, and if its second-slowest value alone would be too: two independent
    measurements."""


@dataclass(frozen=True)
class ReplacementGain:
    """Gain from replacing the slowest nodes by nodes as fast as the next slowest."""

    hosts: tuple[str, ...]
    value: float
    """Relative gain of a group of all nodes."""
    low: float
    high: float


@dataclass(frozen=True)
class SlowNodeReport:
    """Verdicts on all nodes, slowest first."""

    nodes: tuple[NodeVerdict, ...]
    smallest_fault: float | None
    """Loss that a node's own value would have shown with 90% power; None when no node is judged. It
    does not include the power of the confirming evidence."""
    common_change: float = 1.0
    """Median ratio of all nodes to their own history, by which the history was multiplied."""

    @property
    def flagged_nodes(self) -> tuple[NodeVerdict, ...]:
        """Nodes that their own values show to be slow, the slowest first."""
        return tuple(node for node in self.nodes if node.flagged)

    @property
    def suspect_nodes(self) -> tuple[NodeVerdict, ...]:
        """Nodes that only a second pass can flag."""
        return tuple(node for node in self.nodes if node.suspected)


def judge_nodes(
    speeds: NodeSpeeds,
    resolution: float = 0.0,
    reference: HealthySpeed | None = None,
    history: Mapping[str, Sequence[float]] | None = None,
) -> SlowNodeReport:
    """Compare each node with its history, or else with at least eight nodes, or else a reference.

    A node is flagged if z = (value - reference value) / scale is below -4 and the value is more
    than 1% below the reference value. The scale is the largest of three: 1.4826 x MAD of the values
    that the node is compared with; the error by repeats; and `resolution` (the rounding step of the
    printed values in samples/s) / sqrt(12), the standard deviation of a rounded value. Where the
    scale comes from few repeats, the 99.9% quantile of Student's t replaces 4.

    A node is suspected if it is compared with enough other nodes, z < -3, and it is as far below
    them. With more than 74 nodes, the limit is the z that a tenth of a node has by chance. A value
    that is compared by the margin alone can only be suspected. If at least three nodes have a
    history, their common change is removed first.
    """
    earlier = {host: list(v) for host, v in (history or {}).items() if len(v) >= MIN_HISTORY}
    change = common_change(speeds, earlier)
    measures = _measures(speeds, reference, earlier, change)
    rows = [
        _verdict(speeds, at, measures[host], resolution) for at, host in enumerate(speeds.hosts)
    ]
    scales = [scale for _, scale in rows if scale is not None]
    by_others = any(node.by == "the other nodes" for node, _ in rows)
    n = len(rows) if by_others else None
    degrees = min((m.degrees for m in measures.values() if m.by != "nothing"), default=inf)
    smallest = detectable_loss(float(np.median(scales)), n, degrees) if scales else None
    nodes = sorted((node for node, _ in rows), key=lambda node: node.value)
    return SlowNodeReport(tuple(nodes), smallest, change)


def common_change(speeds: NodeSpeeds, earlier: Mapping[str, Sequence[float]]) -> float:
    """Return the median of value / earlier median over the nodes with a history.

    Returns 1 with fewer than three such nodes.
    """
    ratios = [
        float(value) / float(np.median(earlier[host]))
        for host, value in zip(speeds.hosts, speeds.values, strict=True)
        if host in earlier
    ]
    return float(np.median(ratios)) if len(ratios) >= MIN_COMMON_NODES else 1.0


@dataclass(frozen=True)
class _Measure:
    """Reference value that a node is compared with."""

    value: float
    spread: float
    by: JudgedBy
    degrees: float = inf
    """Degrees of freedom of the spread, if it comes from repeats."""


def _measures(
    speeds: NodeSpeeds,
    reference: HealthySpeed | None,
    earlier: Mapping[str, Sequence[float]],
    change: float,
) -> dict[str, _Measure]:
    """Return what each host is compared with: its history, other nodes, a reference, or nothing."""
    past_spread = common_variation(earlier) or 0.0
    if len(speeds.hosts) >= MIN_COMPARED_NODES:
        common_measure = _Measure(speeds.base, speeds.spread, "the other nodes")
    elif reference is not None:
        degrees = inf if reference.spread else speeds.degrees
        common_measure = _Measure(
            reference.samples_per_s, reference.spread, "the reference", degrees
        )
    else:
        common_measure = _Measure(speeds.base, speeds.spread, "nothing")
    degrees = speeds.degrees + sum(len(values) - 1 for values in earlier.values())

    def own_history(values: Sequence[float]) -> _Measure:
        # A new value and the median of n earlier ones both have noise.
        wide = past_spread * (1 + MEDIAN_ERROR**2 / len(values)) ** 0.5
        return _Measure(change * float(np.median(values)), wide, "its own history", degrees)

    return {
        host: own_history(earlier[host]) if host in earlier else common_measure
        for host in speeds.hosts
    }


def _verdict(
    speeds: NodeSpeeds, at: int, measure: _Measure, resolution: float
) -> tuple[NodeVerdict, float | None]:
    """Return the verdict and the relative scale of its z-score, or None without a scale."""
    value, error = float(speeds.values[at]), float(speeds.errors[at])
    loss = 1 - value / measure.value
    scale = None
    if measure.by == "the other nodes" or (measure.by != "nothing" and measure.spread + error > 0):
        scale = max(measure.spread, error, ROUNDING * resolution / measure.value, MIN_SCALE)
    z = None if scale is None else -loss / scale
    is_flagged = z is not None and z < -min_z(measure.degrees) and is_loss(loss)
    # A single value and a reference without a spread: the margin alone can only make a suspect.
    may_be_suspect = z is None or (
        z < suspect_z(len(speeds.hosts)) and measure.by == "the other nodes"
    )
    is_suspected = may_be_suspect and measure.by != "nothing" and is_loss(loss) and not is_flagged
    second_loss = 1 - float(speeds.next_slowest[at]) / measure.value
    verdict = NodeVerdict(
        host=speeds.hosts[at],
        value=value,
        z=z,
        loss=loss,
        flagged=is_flagged,
        by=measure.by,
        repeats=int(speeds.repeats[at]),
        suspected=is_suspected,
        repeated=is_flagged and is_loss(second_loss) and second_loss > loss / 2,
    )
    return verdict, scale


def is_loss(loss: float) -> bool:
    """Return whether a node loses more than the margin; a loss equal to it does not count."""
    return loss > MIN_LOSS + FLOAT_ERROR


def suspect_z(num_nodes: int) -> float:
    """Return the z below which one of this many nodes is suspected.

    With more nodes the limit is lower, because the slowest of many is slow by chance.
    """
    return min(SUSPECT_Z, NormalDist().inv_cdf(EXPECTED_SUSPECTS / num_nodes))


def min_z(degrees: float) -> float:
    """Return the -z above which a node is flagged: 4, or Student's t for few repeats."""
    return max(-WORST_Z, student_t(FLAG_QUANTILE, max(1.0, degrees)))


def detectable_loss(scale: float, num_nodes: int | None = None, degrees: float = inf) -> float:
    """Return the smallest loss that a node's own value shows in 9 of 10 cases at this scale.

    max((z + 130 / n^2) x scale, 1%) + (t + 3.2 / n) x scale, with the threshold z of `least_z`. The
    second term is the part of the loss that the node's noise hides, with the 90% quantile t of
    Student's t. If the scale is estimated from the n nodes themselves, the terms in n account for
    its uncertainty; they were fitted to simulated normal values. Without `num_nodes` the scale is
    known from elsewhere, or from repeats with this many `degrees` of freedom.
    """
    few, fewer = (130 / num_nodes**2, 3.2 / num_nodes) if num_nodes else (0.0, 0.0)
    quantile = student_t(POWER, max(1.0, degrees))
    return max((min_z(degrees) + few) * scale, MIN_LOSS) + (quantile + fewer) * scale


def gains(
    speeds: NodeSpeeds, component: PersistentComponent, num_flagged: int = 0, seed: int = 0
) -> list[ReplacementGain]:
    """Return the gain of replacing the k slowest nodes: the (k+1)-th slowest over the slowest.

    k is 1, 2, 4, 8 and the number of flagged nodes, as long as there are more nodes than that.

    Speeds are best estimates: shrunk to the median by the reliability, or as measured for outlying
    nodes. The interval comes from random draws of the persistent speeds around them.
    """
    shrunk = speeds.logs * np.where(speeds.is_outlier, 1.0, component.reliability)
    order: list[int] = np.argsort(speeds.logs, kind="stable").tolist()
    error = component.noise * np.where(speeds.is_outlier, 1.0, component.reliability**0.5)
    rng = np.random.default_rng(seed)
    draws = shrunk + error * rng.standard_normal((DRAWS, len(shrunk)))
    by_count: list[ReplacementGain] = []
    for k in sorted({*COUNTS_REPLACED, num_flagged} - {0}):
        if k >= len(shrunk):
            break
        # New nodes are at least as fast as the slowest other node, so they do not limit the group.
        value = float(shrunk[order[k:]].min() - shrunk[order].min())
        changes = draws[:, order[k:]].min(axis=1) - draws.min(axis=1)
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
