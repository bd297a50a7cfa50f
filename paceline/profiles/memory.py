"""Memory of a rank over a step, and its peak by part."""

from __future__ import annotations

from pydantic import NonNegativeFloat

from paceline.core.value import NonNegativeInt, Value


class MemoryPoint(Value):
    """One moment of a step."""

    at_s: NonNegativeFloat
    """Since the step's begin."""
    bytes: NonNegativeFloat
    reserved_bytes: NonNegativeFloat | None = None


class RankCurve(Value):
    """One rank over the profiled steps."""

    rank: NonNegativeInt
    kind: str
    """`allocated`: live tensors on a device; `resident`: the process's memory on a CPU."""
    peak_bytes: NonNegativeFloat
    lowest_bytes: NonNegativeFloat
    peak_step: NonNegativeInt
    peak_at: NonNegativeFloat
    """The share of that step that had passed."""
    reserved_bytes: NonNegativeFloat | None = None
    """What the device's allocator held at the peak."""
    fragmentation: NonNegativeFloat | None = None
    """Share of it that no tensor filled: (reserved - allocated) / reserved."""
    parts_bytes: dict[str, float] = {}
    """The peak of the step that the run has watched, by part; negative where one was counted
    elsewhere."""
    unexplained_bytes: float | None = None
    """The peak beyond these parts: on a CPU freed memory that is kept, workspaces, libraries."""
    why: str | None = None
    """Why there are no parts, or which could not be told apart."""
    curve: tuple[MemoryPoint, ...] = ()
    """The step with the peak."""
