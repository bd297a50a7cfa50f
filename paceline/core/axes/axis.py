"""What is declared of a parallel axis, and the forms of its rules and traffic."""

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
    """A combination that is refused wherever all of its features are present."""

    features: frozenset[str]
    reason: str
    """One sentence: what is refused, why, and what to do instead."""
    native: bool = False
    """True where only the native trainer refuses it."""


def refuse(*features: str, why: str, native: bool = False) -> Rule:
    """Return a rule that refuses the combination of `features`."""
    return Rule(frozenset(features), why, native)


SizeRule = Callable[[ParallelRun], str | None]
"""Why sizes do not fit together, None when they do; the first docstring line is the condition."""
Traffic = Callable[[ParallelRun], Iterator[AxisTraffic]]
"""The terms of one rank's step; they may be of 0 bytes."""


@dataclass(frozen=True)
class Axis:
    """One way to spread a training over devices."""

    name: str
    """The field of `Layout`; of data parallelism, which is what remains of the world, `dp`."""
    long_name: str
    size_name: str
    """What its size counts, as in `tensor-parallel ranks`."""
    shards: str
    """What each of its ranks holds a part of."""
    sweep_help: str
    """Help of the option of `sweep` that takes a list of its sizes."""
    mesh_position: int | None = None
    """Its place among the dimensions of the trainer's mesh, 0 outermost; None without one."""
    rules: tuple[Rule, ...] = ()
    """Combinations with other features of a run that are refused."""
    size_rules: tuple[SizeRule, ...] = ()
    """What sizes must satisfy in any engine."""
    native_size_rules: tuple[SizeRule, ...] = ()
    """What they must satisfy in the native trainer besides."""
    traffic: Traffic | None = None

    @property
    def splits_model(self) -> bool:
        """Whether it multiplies into the devices of one replica."""
        return self.name in MODEL_AXES

    def size(self, x: ParallelRun) -> int:
        """Return the number of its ranks in a run."""
        return x.dp if self.name == "dp" else getattr(x.layout, self.name)
