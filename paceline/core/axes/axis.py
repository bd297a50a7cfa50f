"""Declaration of a parallel axis, and the types of its rules and traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from paceline.core.layout import MODEL_AXES
from paceline.core.parallel_run import ParallelRun

Collective = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "send",
    "recv",
]


@dataclass(frozen=True)
class AxisTraffic:
    """Bytes that one rank exchanges in one step over one axis for one purpose."""

    axis: str
    collective: Collective
    num_bytes: int
    purpose: str


@dataclass(frozen=True)
class Rule:
    """A combination of features that is refused.

    The rule applies to a run that has all of `features`.
    """

    features: frozenset[str]
    reason: str
    """One sentence: what is refused, why, and what to do instead."""
    native: bool = False
    """True if only the native trainer refuses the combination."""


def refuse(*features: str, why: str, native: bool = False) -> Rule:
    """Return a rule that refuses the combination of `features`."""
    return Rule(frozenset(features), why, native)


SizeRule = Callable[[ParallelRun], str | None]
"""Function that returns why the sizes of a run are invalid, or None if they are valid.

The first line of its docstring states the condition; the reference page of layout rules prints it.
"""
Traffic = Callable[[ParallelRun], Iterator[AxisTraffic]]
"""Function that yields the traffic of one rank in one step. Terms may have 0 bytes."""


@dataclass(frozen=True)
class Axis:
    """One way to distribute training over devices."""

    name: str
    """Name of the field of `Layout` that holds the size. Data parallelism has no field; its name is
    `dp`."""
    long_name: str
    size_name: str
    """Noun for the size, as in `tensor-parallel ranks`."""
    shards: str
    """Data that is split over the ranks of the axis."""
    sweep_help: str
    """Help text of the `sweep` option that takes a list of sizes."""
    mesh_position: int | None = None
    """Position among the dimensions of the trainer's mesh, 0 outermost; None if the mesh has no
    such dimension."""
    rules: tuple[Rule, ...] = ()
    """Refused combinations with other features of a run."""
    size_rules: tuple[SizeRule, ...] = ()
    """Conditions on sizes that apply to every engine."""
    native_size_rules: tuple[SizeRule, ...] = ()
    """Additional conditions on sizes that apply to the native trainer."""
    traffic: Traffic | None = None

    @property
    def splits_model(self) -> bool:
        """True if the size multiplies the number of devices of one replica."""
        return self.name in MODEL_AXES

    def size(self, x: ParallelRun) -> int:
        """Return the size of the axis in a run."""
        return x.dp if self.name == "dp" else getattr(x.layout, self.name)
