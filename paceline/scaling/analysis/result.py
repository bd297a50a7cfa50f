"""What a scaling analysis yields: `paceline scale --json` prints it."""

from __future__ import annotations

from paceline.core.node_groups import ScalingKind
from paceline.core.value import NonNegativeInt, PositiveInt, Value


class Base(Value):
    """What counts as 100 %."""

    nodes: PositiveInt
    value: float
    """Samples/s."""
    statistic: str


class NaiveFactors(Value):
    """The factors straight from the measured values: the slowest of many noisy ones is too slow."""

    straggler: float | None
    communication: float | None


class SizeResult(Value):
    """All sub-clusters of one size."""

    nodes: PositiveInt
    n: PositiveInt
    """Sub-clusters with a value."""
    value: float
    """Samples/s: the geometric mean of the sub-clusters."""
    spread: float | None
    """Relative standard deviation between the sub-clusters."""
    efficiency: float
    """value / (nodes x base per node)."""
    low: float | None
    high: float | None
    """95 % interval of the efficiency."""
    straggler: float | None
    """What waiting for the slowest node leaves; None where that cannot be told."""
    straggler_low: float | None
    straggler_high: float | None
    communication: float | None
    """What communication and synchronisation leave."""
    communication_low: float | None
    communication_high: float | None
    naive: NaiveFactors


class NodeResult(Value):
    """One node measured alone."""

    host: str
    value: float
    """Samples/s, the median of its repeats."""
    z: float | None
    """Robust z; None where too few nodes judge it."""
    loss: float
    """Fraction below the median node, or below what it is judged by."""
    n: PositiveInt


class SuspectResult(Value):
    """A node that one measurement calls slow: to be repeated before it is drained."""

    host: str
    confirmed: bool | None
    """What the second pass says; None where there was none, or too little of it."""
    pair_loss: float | None
    """Mean loss of its pairs with proven nodes against pairs of proven nodes."""
    group_loss: float | None = None
    """Median loss of its groups against groups of their size without a slow node."""


class GainResult(Value):
    """What replacing the slowest nodes would give a group of all nodes."""

    replaced: tuple[str, ...]
    gain: float
    low: float
    high: float


class ScaleResult(Value):
    """How a cluster scales, and which nodes cost how much."""

    base: Base
    scaling: ScalingKind
    sizes: tuple[SizeResult, ...]
    flagged: tuple[str, ...]
    """Hosts that two independent measurements call slow, the slowest first."""
    suspects: tuple[SuspectResult, ...] = ()
    """The slowest first."""
    nodes: tuple[NodeResult, ...]
    """The slowest first."""
    smallest_fault_found: float | None
    """Loss of a node that would have been found in 9 of 10 cases; None where nothing is judged."""
    gains: tuple[GainResult, ...]
    failed: NonNegativeInt
    """Sub-clusters without a value."""
    sentences: tuple[str, ...]
