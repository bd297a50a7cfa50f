"""Breakdown of a step of one rank: seconds by category, which add up to the step time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
from pydantic import NonNegativeFloat

from paceline.core.value import NonNegativeInt, Value

CATEGORIES: dict[str, str] = {
    "gemm": "matrix multiplications",
    "attention": "attention kernels, including the GEMMs inside them",
    "memory_bound": "elementwise operations, norms, reductions, copies on the device",
    "optimizer": "optimizer step, including gradient clipping",
    "communication_exposed": "communication that does not overlap with computation",
    "bubble": "waiting for another pipeline stage",
    "data_wait": "waiting for the next batch",
    "host_gap": "the device is idle because the CPU has not launched work",
    "other": "kernels of an unknown kind",
}
"""Parts of a step in report order, with their meaning; each moment belongs to one of them."""
OVERLAPPED = "communication_overlapped"
"""Communication that overlaps with computation; not part of the sum."""
TITLES: dict[str, str] = {
    "gemm": "GEMMs",
    "attention": "attention",
    "memory_bound": "memory-bound",
    "optimizer": "optimizer",
    "communication_exposed": "communication, exposed",
    "bubble": "pipeline bubble",
    "data_wait": "waiting for data",
    "host_gap": "CPU launch overhead",
    "other": "other",
    OVERLAPPED: "communication, overlapped",
}
"""Names of the parts in reports."""


class AxisTime(Value):
    """Communication of one axis of the layout (or `unknown`) in seconds."""

    exposed_s: NonNegativeFloat = 0.0
    overlapped_s: NonNegativeFloat = 0.0


class Breakdown(Value):
    """One step of one rank."""

    rank: NonNegativeInt
    step: NonNegativeInt
    step_time_s: NonNegativeFloat
    """Step time by the profiler's clock."""
    gemm: NonNegativeFloat = 0.0
    attention: NonNegativeFloat = 0.0
    memory_bound: NonNegativeFloat = 0.0
    optimizer: NonNegativeFloat = 0.0
    communication: dict[str, AxisTime] = {}
    """Communication by axis; simultaneous communication on two axes counts as exposed on one."""
    bubble: NonNegativeFloat = 0.0
    data_wait: NonNegativeFloat = 0.0
    host_gap: NonNegativeFloat = 0.0
    other: NonNegativeFloat = 0.0

    @property
    def communication_exposed(self) -> float:
        """Seconds of communication over all axes that do not overlap with computation."""
        return sum(axis.exposed_s for axis in self.communication.values())

    @property
    def communication_overlapped(self) -> float:
        """Seconds of communication over all axes that overlap with computation."""
        return sum(axis.overlapped_s for axis in self.communication.values())

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of every category, and of OVERLAPPED, which is not part of the sum."""
        return {name: getattr(self, name) for name in (*CATEGORIES, OVERLAPPED)}


class MeanBreakdown(Value):
    """Mean breakdown over steps and ranks."""

    step_time_s: NonNegativeFloat
    spread: NonNegativeFloat | None
    """Standard deviation of the steps over their mean; None with one step."""
    n: NonNegativeInt
    """Steps times ranks."""
    parts: dict[str, float]
    axes: dict[str, AxisTime]

    @classmethod
    def of(cls, breakdowns: Sequence[Breakdown]) -> Self:
        """Return the mean of at least one breakdown."""
        times = np.array([each.step_time_s for each in breakdowns])
        parts = {
            name: float(np.mean([getattr(each, name) for each in breakdowns]))
            for name in (*CATEGORIES, OVERLAPPED)
        }
        names = sorted({name for each in breakdowns for name in each.communication})
        return cls(
            step_time_s=float(times.mean()),
            spread=float(times.std(ddof=1) / times.mean()) if len(times) > 1 else None,
            n=len(times),
            parts=parts,
            axes={name: _mean_axis([e.communication for e in breakdowns], name) for name in names},
        )


def _mean_axis(sides: Sequence[Mapping[str, AxisTime]], name: str) -> AxisTime:
    times = [side.get(name, AxisTime()) for side in sides]
    return AxisTime(
        exposed_s=sum(time.exposed_s for time in times) / len(times),
        overlapped_s=sum(time.overlapped_s for time in times) / len(times),
    )
