"""Speed of each node alone, and the persistent share of the differences between nodes.

A node's measured speed is its persistent speed plus measurement noise. The reliability is the
persistent share of the variance between nodes. It is estimated from repeats. Without repeats, it is
estimated from the slope of group speed on the slowest member, because groups follow the persistent
speed of a node, not the noise of another measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from statistics import median
from typing import Any

import numpy as np

from paceline.compare.significance import student_t, student_t_tail
from paceline.core.hosts import compress
from paceline.core.node_groups import GroupThroughput
from paceline.core.stats import NORMAL_MAD
from paceline.core.steps import FloatColumn, IntColumn

MEDIAN_ERROR = 1.2533
"""Standard error of a median relative to that of a mean, for many normal values: sqrt(pi / 2)."""
MAD_EFFICIENCY = 0.368
"""Efficiency of the median absolute deviation relative to the standard deviation as an estimate of
the deviation of normal values (Rousseeuw and Croux, J. Amer. Statist. Assoc. 88 (1993) 1273)."""
OUTLIER_Z = 4.0
"""Robust standard deviations beyond which a node is not part of the healthy population."""
NOISY_RATIO = 4.0
"""Ratio of a node's own variation to the common variation above which the node is noisy."""


@dataclass(frozen=True)
class NodeSpeeds:
    """Single-node values, one per host, in the order in which the hosts were first measured."""

    hosts: tuple[str, ...]
    values: FloatColumn
    """Samples/s: the median of the node's repeats."""
    mean_logs: FloatColumn
    """Mean of the logarithms of the repeats."""
    repeats: IntColumn
    common_variation: float | None
    """Relative standard deviation of a single measurement; None without repeats."""
    own_variation: FloatColumn
    """Relative standard deviation of each node's own repeats; 0 with a single one."""
    next_slowest: FloatColumn
    """Samples/s of each node's second-slowest repeat; NaN with a single one."""
    degrees: int
    """Degrees of freedom of the common variation."""
    refuted_hosts: frozenset[str] = frozenset()
    """Hosts whose own value was refuted by other evidence, so it does not show their persistent
    speed."""

    @cached_property
    def base(self) -> float:
        """Samples/s of the median node."""
        return float(np.median(self.values))

    @cached_property
    def logs(self) -> FloatColumn:
        """log(value / base) of each node."""
        return np.log(self.values / self.base)

    @cached_property
    def spread(self) -> float:
        """1.4826 x MAD of the nodes' values, divided by the median."""
        return NORMAL_MAD * float(np.median(np.abs(self.values - self.base))) / self.base

    @cached_property
    def errors(self) -> FloatColumn:
        """Relative standard error of each node's value by its repeats; 0 if unknown."""
        single = np.maximum(
            self.common_variation or 0.0, np.where(self.is_noisy, self.own_variation, 0)
        )
        return single * np.where(self.repeats > 2, MEDIAN_ERROR, 1.0) / np.sqrt(self.repeats)

    @cached_property
    def is_noisy(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """True for nodes whose own repeats vary far more than those of all nodes."""
        return self.own_variation > NOISY_RATIO * max(self.common_variation or np.inf, 1e-4)

    @property
    def noisy_hosts(self) -> set[str]:
        """Hosts that are noisy."""
        return {
            host for host, noisy in zip(self.hosts, self.is_noisy.tolist(), strict=True) if noisy
        }

    @cached_property
    def is_refuted(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """True for nodes whose own values were refuted."""
        return np.array([host in self.refuted_hosts for host in self.hosts], dtype=np.bool_)

    @cached_property
    def is_outlier(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """True for nodes that are too far from the median to belong to the healthy population."""
        return np.abs(self.logs) > OUTLIER_Z * np.maximum(self.spread, self.errors)


def node_speeds(measured: Sequence[GroupThroughput]) -> NodeSpeeds | None:
    """Return the speeds of all hosts that were measured alone, or None when none was."""
    values_by_host: dict[str, list[float]] = {}
    for group in measured:
        if group.nodes == 1 and group.samples_per_s is not None:
            values_by_host.setdefault(group.hosts[0], []).append(group.samples_per_s)
    if not values_by_host:
        return None
    return NodeSpeeds(
        hosts=tuple(values_by_host),
        values=np.array([median(values) for values in values_by_host.values()]),
        mean_logs=np.array([float(np.mean(np.log(values))) for values in values_by_host.values()]),
        repeats=np.array([len(values) for values in values_by_host.values()]),
        common_variation=common_variation(values_by_host),
        own_variation=np.array([_deviation(values) for values in values_by_host.values()]),
        next_slowest=np.array(
            [sorted(values)[1] if len(values) > 1 else np.nan for values in values_by_host.values()]
        ),
        degrees=sum(len(values) - 1 for values in values_by_host.values()),
    )


def common_variation(values_by_host: Mapping[str, Sequence[float]]) -> float | None:
    """Return 1.4826 x median |deviation from the node's mean| x sqrt(n / (n - 1)) of log values.

    The estimate is robust, so that one noisy node does not hide slow ones behind its own variation.
    """
    logs = [np.log(values) for values in values_by_host.values() if len(values) > 1]
    if not logs:
        return None
    deviations = [
        (repeats - repeats.mean()) * np.sqrt(len(repeats) / (len(repeats) - 1)) for repeats in logs
    ]
    return NORMAL_MAD * float(np.median(np.abs(np.concatenate(deviations))))


def _deviation(values: Sequence[float]) -> float:
    return float(np.std(np.log(values), ddof=1)) if len(values) > 1 else 0.0


MAX_P = 0.01
"""Maximum p-value that counts as evidence."""
MIN_GROUPS = 8
"""Minimum number of groups of one size for a slope."""
MIN_NODES = 8
MAX_NOISY_ERROR = 0.01
"""Standard error of a noisy node's value above which there is no straggler factor."""
MIN_SLOPE_SHARE = 0.5
"""Share of the expected slope below which groups do not follow their slowest member."""


@dataclass(frozen=True)
class Slope:
    """Slope of log group speed on the log speed of the slowest member, within sizes."""

    value: float
    error: float
    degrees: int
    variation: float
    """Relative standard deviation of the groups around the line."""

    @property
    def p(self) -> float:
        """Probability of such a slope, or a larger one, by chance alone."""
        return student_t_tail(self.value / max(self.error, 1e-12), self.degrees)

    @property
    def low(self) -> float:
        """Lower end of the 95% interval of the slope."""
        return self.value - student_t(0.975, self.degrees) * self.error

    @property
    def high(self) -> float:
        """Upper end of the 95% interval of the slope."""
        return self.value + student_t(0.975, self.degrees) * self.error


@dataclass(frozen=True)
class PersistentComponent:
    """Persistent part of the differences between nodes."""

    reliability: float
    """Persistent share of the variance between healthy nodes, 0 to 1."""
    low: float
    high: float
    noise: float
    """Relative standard deviation of a node's value from its persistent speed."""
    degrees: float
    """Degrees of freedom of the values that `noise` is estimated from."""
    source: str
    """Source of the estimate, in words."""


@dataclass(frozen=True)
class NotSeparable:
    """Reason why there is no straggler factor."""

    why: str


def persistent_component(
    speeds: NodeSpeeds, measured: Mapping[int, Sequence[GroupThroughput]]
) -> PersistentComponent | NotSeparable:
    """Estimate the reliability of single-node values, or return why that is not possible.

    `measured` holds the groups by size. Where enough groups exist, they must follow their slowest
    member, whatever the repeats show: a workload that is bound by the network does not wait for a
    GPU.
    """
    if len(speeds.hosts) < MIN_NODES:
        return NotSeparable(f"fewer than {MIN_NODES} nodes were measured alone")
    noisy = sorted(speeds.noisy_hosts)
    if noisy and float(speeds.errors[speeds.is_noisy].max()) > MAX_NOISY_ERROR:
        return NotSeparable(f"the loss of noisy nodes varies from run to run: {compress(noisy)}")
    slope = group_slope(speeds, measured)
    component = None if speeds.common_variation is None else _by_repeats(speeds)
    expected = (
        1.0
        if component is None
        else component.reliability
        if isinstance(component, PersistentComponent)
        else 0.0
    )
    if slope is not None and slope.p > MAX_P and slope.high < MIN_SLOPE_SHARE * expected:
        return NotSeparable(
            "groups do not follow their slowest member: slope of their speed on its speed "
            f"{slope.value:.2f} ({slope.low:.2f} to {slope.high:.2f}), expected 1"
        )
    if component is not None:
        return component
    if slope is None:
        return NotSeparable(
            f"every node was measured alone only once, and no size has {MIN_GROUPS} groups"
        )
    if slope.p > MAX_P:
        return NotSeparable(
            "it is uncertain whether groups follow their slowest member: slope "
            f"{slope.value:.2f} ({slope.low:.2f} to {slope.high:.2f})"
        )
    return _by_slope(speeds, slope, group_slope(speeds, measured, healthy=True))


def group_slope(
    speeds: NodeSpeeds, measured: Mapping[int, Sequence[GroupThroughput]], healthy: bool = False
) -> Slope | None:
    """Return the slope over all sizes with at least eight groups, each size centred on its means.

    `healthy` excludes groups with an outlying node, which would dominate the slope. Groups of
    different sizes share nodes, so the error is multiplied by the root of the number of sizes.
    Returns None with too few groups, or when the nodes do not differ.
    """
    logs = dict(zip(speeds.hosts, speeds.logs.tolist(), strict=True))
    outlying = {h for h, out in zip(speeds.hosts, speeds.is_outlier, strict=True) if out}
    excluded = speeds.refuted_hosts | (outlying if healthy else set[str]())
    by_size = (
        _minimum_and_speed(groups, logs, speeds.base, excluded)
        for size, groups in measured.items()
        if size > 1
    )
    sizes = [points for points in by_size if len(points) >= MIN_GROUPS]
    if not sizes:
        return None
    centred_points = np.concatenate([points - points.mean(axis=0) for points in sizes])
    x, y = centred_points.T
    power = float(x @ x)
    if power <= 0:
        return None
    # Least squares on centred values: slope = Sxy / Sxx, standard error s / sqrt(Sxx).
    value = float(x @ y) / power
    residual = y - value * x
    variance = float(residual @ residual) / max(1, len(x) - len(sizes) - 1)
    error = (variance / power * len(sizes)) ** 0.5
    return Slope(value, error, max(map(len, sizes)) - 2, variance**0.5)


def _minimum_and_speed(
    groups: Sequence[GroupThroughput],
    logs: Mapping[str, float],
    base: float,
    without: frozenset[str],
) -> FloatColumn:
    """Return rows of log slowest member and log group speed per node, both relative to the base."""
    rows = [
        (min(logs[host] for host in group.hosts), np.log(group.samples_per_s / group.nodes / base))
        for group in groups
        if group.samples_per_s is not None
        and all(host in logs for host in group.hosts)
        and not any(host in without for host in group.hosts)
    ]
    return np.array(rows).reshape(-1, 2)


def _by_repeats(speeds: NodeSpeeds) -> PersistentComponent | NotSeparable:
    """Return 1 - error^2 / spread^2 with its F interval, if an F test shows that nodes differ."""
    between, within = len(speeds.hosts) - 1, int((speeds.repeats - 1).sum())
    if _p_of_difference(speeds) > MAX_P:
        return NotSeparable("nodes do not differ more than repeats of one node")
    error = float(np.median(speeds.errors))
    ratio = (max(speeds.spread, 1e-12) / max(error, 1e-12)) ** 2
    # ratio x (1 - reliability) is distributed as F(between, within).
    low, high = (1 - float(_special().fdtri(between, within, q)) / ratio for q in (0.975, 0.025))
    source = f"{between + 1 + within} single-node values of {between + 1} nodes"
    return PersistentComponent(
        _clip(1 - 1 / ratio), _clip(low), _clip(high), error, MAD_EFFICIENCY * within, source
    )


def _p_of_difference(speeds: NodeSpeeds) -> float:
    """Return the p-value of a one-way F test of differences between nodes.

    Noisy nodes are excluded: they would hide the differences of the others.
    """
    is_steady = ~speeds.is_noisy
    repeats, variation = speeds.repeats[is_steady], speeds.own_variation[is_steady]
    within, between = int((repeats - 1).sum()), int(is_steady.sum()) - 1
    if within < 1 or between < 1:
        return 1.0
    means = speeds.mean_logs[is_steady]
    centre = float(np.average(means, weights=repeats))
    above = float((repeats * (means - centre) ** 2).sum()) / between
    below = float(((repeats - 1) * variation**2).sum()) / within
    return float(_special().fdtrc(between, within, above / max(below, 1e-24)))


def _by_slope(speeds: NodeSpeeds, all_groups: Slope, healthy: Slope | None) -> PersistentComponent:
    """Estimate by the slope of groups of healthy nodes.

    With too few of them, use the slope of all groups, with 0 as the lower end of the interval.
    """
    slope = healthy or all_groups
    reliability = _clip(slope.value)
    low = 0.0 if healthy is None else _clip(slope.low)
    # A slope of 1 by chance does not make the values exact, so allow for half of its interval.
    noise = (1 - (reliability + low) / 2) ** 0.5 * speeds.spread
    source = (
        f"the slope of group speed on the slowest member, {slope.value:.2f} +- {slope.error:.2f}"
    )
    degrees = MAD_EFFICIENCY * (len(speeds.hosts) - 1)
    return PersistentComponent(reliability, low, _clip(slope.high), noise, degrees, source)


def _special() -> Any:
    # Imported by name, because it has no type declarations.
    return import_module("scipy.special")


def _clip(value: float) -> float:
    return min(max(value, 0.0), 1.0)
