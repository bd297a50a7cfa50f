"""Scaling efficiency of each size = straggler efficiency x communication efficiency.

Communication efficiency includes synchronisation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, hypot, log

import numpy as np

from paceline.compare.significance import student_t
from paceline.core.node_groups import GroupThroughput
from paceline.scaling.analysis.node_speeds import (
    MAD_EFFICIENCY,
    MEDIAN_ERROR,
    NodeSpeeds,
    NotSeparable,
    PersistentComponent,
)


@dataclass(frozen=True)
class Factor:
    """A share of the ideal, with its 95% interval if known."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of_log(cls, value: float, half_width: float | None) -> Factor:
        """Return the factor whose logarithm is `value`, plus or minus `half_width`."""
        if half_width is None:
            return cls(exp(value))
        return cls(exp(value), exp(value - half_width), exp(value + half_width))


@dataclass(frozen=True)
class SizeFactors:
    """Combined result of all groups of one size."""

    nodes: int
    n: int
    samples_per_s: float
    """Geometric mean of the groups' values, in samples/s."""
    variation: float | None
    """Relative standard deviation between the groups; None for one."""
    efficiency: Factor
    naive_straggler: float | None
    naive_communication: float | None
    straggler: Factor | None
    communication: Factor | None


def size_factors(
    sizes: Mapping[int, Sequence[GroupThroughput]],
    base_nodes: int,
    base: float,
    speeds: NodeSpeeds | None,
    component: PersistentComponent | NotSeparable,
) -> list[SizeFactors]:
    """Return the factors of every size; `base` is the samples/s of one node that counts as ideal.

    Means are geometric, so that the product of a size's two factors is exactly its efficiency. The
    base size itself is reported with the value of the base. The naive factors are: straggler =
    slowest member / base, communication = group / (nodes x slowest member).
    """
    measured: dict[str, float] = {}
    corrected: tuple[Mapping[str, float], ...] = ()
    error = node_error = 0.0
    if speeds is not None:
        measured = dict(zip(speeds.hosts, speeds.logs.tolist(), strict=True))
        # The base is a median of n nodes, and their spread is estimated from a MAD.
        error = MEDIAN_ERROR * speeds.spread / len(speeds.hosts) ** 0.5
        error *= student_t(0.975, MAD_EFFICIENCY * max(1, len(speeds.hosts) - 1))
    if speeds is not None and isinstance(component, PersistentComponent):
        shares = (component.reliability, component.low, component.high)
        corrected = tuple(corrected_logs(speeds, component, share) for share in shares)
        node_error = student_t(0.975, component.degrees) * component.noise
    pooled = pooled_variation(sizes, corrected[0] if corrected else {})
    baseline = _Baseline(
        base_nodes=base_nodes,
        base=base,
        base_error=error,
        measured=measured,
        corrected=corrected,
        node_error=node_error,
        pooled=pooled,
    )
    return [_of_size(nodes, groups, baseline) for nodes, groups in sizes.items()]


def corrected_logs(
    speeds: NodeSpeeds, component: PersistentComponent, reliability: float | None = None
) -> dict[str, float]:
    """Return log(speed / base) of each node, shrunk to 0 by the root of the reliability.

    `reliability` replaces the estimated reliability. The root keeps the spread of the persistent
    speeds, and with it their minimum, unbiased (Louis, J. Amer. Statist. Assoc. 79 (1984) 393). The
    reliability itself, the best estimate for one node, would shrink the slowest of many nodes too
    much. An outlying node is not from the healthy population and stays as measured. A node with a
    disturbed value counts as a median node.
    """
    share = component.reliability if reliability is None else reliability
    weights = np.where(speeds.is_outlier, 1.0, share**0.5) * ~speeds.is_refuted
    return dict(zip(speeds.hosts, (speeds.logs * weights).tolist(), strict=True))


def pooled_variation(
    sizes: Mapping[int, Sequence[GroupThroughput]], minimum: Mapping[str, float]
) -> tuple[float, int] | None:
    """Return the relative standard deviation between groups of a size, and its degrees of freedom.

    Sizes above 1 are pooled. The part that `minimum` (host -> log speed) explains by the groups'
    slowest members is subtracted first.
    """
    logs = [
        np.array([_log_value(group) - _slowest(group, minimum) for group in groups])
        for size, groups in sizes.items()
        if size > 1 and len(groups) > 1
    ]
    degrees = sum(len(values) - 1 for values in logs)
    if not degrees:
        return None
    return float(np.sqrt(sum(float(((v - v.mean()) ** 2).sum()) for v in logs) / degrees)), degrees


@dataclass(frozen=True)
class _Baseline:
    """Reference values that are the same for all sizes."""

    base_nodes: int
    base: float
    base_error: float
    """Half-width of the 95% interval of the logarithm of the base."""
    measured: Mapping[str, float]
    """log(speed / base) of each node, as measured."""
    corrected: tuple[Mapping[str, float], ...]
    """Corrected log(speed / base) of each node: at the reliability, and at both ends of its
    interval."""
    node_error: float
    """Half-width of the 95% interval of one node's persistent speed."""
    pooled: tuple[float, int] | None


def _of_size(nodes: int, groups: Sequence[GroupThroughput], baseline: _Baseline) -> SizeFactors:
    logs = np.array([_log_value(group) for group in groups])
    is_base = nodes == baseline.base_nodes
    value = log(nodes * baseline.base) if is_base else float(np.mean(logs))
    efficiency = value - log(nodes * baseline.base)
    mean_error = None if is_base else _mean_error(len(logs), baseline.pooled)
    naive = None if is_base else _mean_minimum(groups, baseline.measured)
    straggler = communication = None
    minima = [_mean_minimum(groups, logs) for logs in baseline.corrected]
    complete = [] if is_base else [mean for mean in minima if mean is not None]
    if complete:
        minimum = complete[0]
        reliability_error = (max(complete) - min(complete)) / 2
        straggler_error = hypot(
            baseline.node_error / _num_slowest(groups, baseline.measured) ** 0.5,
            reliability_error,
            baseline.base_error,
        )
        straggler = Factor.of_log(minimum, straggler_error)
        communication_error = None if mean_error is None else hypot(mean_error, straggler_error)
        communication = Factor.of_log(efficiency - minimum, communication_error)
    return SizeFactors(
        nodes=nodes,
        n=len(groups),
        samples_per_s=exp(value),
        variation=float(np.std(logs, ddof=1)) if len(groups) > 1 else None,
        efficiency=Factor.of_log(
            efficiency, None if mean_error is None else hypot(mean_error, baseline.base_error)
        ),
        naive_straggler=None if naive is None else exp(naive),
        naive_communication=None if naive is None else exp(efficiency - naive),
        straggler=straggler,
        communication=communication,
    )


def _log_value(group: GroupThroughput) -> float:
    assert group.samples_per_s is not None, "by_size leaves failed groups out"
    return log(group.samples_per_s)


def _slowest(group: GroupThroughput, logs: Mapping[str, float]) -> float:
    return min(logs.get(host, 0.0) for host in group.hosts)


def _num_slowest(groups: Sequence[GroupThroughput], logs: Mapping[str, float]) -> int:
    """Return how many different nodes are the slowest of their groups: their noise averages out."""
    return len({min(group.hosts, key=logs.__getitem__) for group in groups})


def _mean_minimum(groups: Sequence[GroupThroughput], logs: Mapping[str, float]) -> float | None:
    """Return the mean log speed of the groups' slowest members.

    Returns None when a member was not measured alone.
    """
    if any(host not in logs for group in groups for host in group.hosts):
        return None
    return float(np.mean([_slowest(group, logs) for group in groups]))


def _mean_error(n: int, pooled: tuple[float, int] | None) -> float | None:
    """Return the 95% half-width of the mean of n groups, by the variation over all sizes."""
    if pooled is None:
        return None
    variation, degrees = pooled
    return student_t(0.975, degrees) * variation / n**0.5
