"""Speed of each node alone, with its uncertainty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import numpy as np

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
