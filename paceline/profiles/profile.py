"""What a tool's files say of a run: profile.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import NonNegativeFloat

from paceline.core.errors import UserError
from paceline.core.profiling import ToolName
from paceline.core.value import NonNegativeInt, Value
from paceline.core.waterfall import WaterfallLevel
from paceline.profiles.breakdown import AxisTime, Breakdown, MeanBreakdown
from paceline.profiles.nccl.communication import Communication
from paceline.profiles.nccl.contrast import TrafficContrast


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


PROFILE_FILE, PROFILE_PAGE = "profile.json", "profile.html"
PROFILE_SCHEMA = 1


class Hot(Value):
    """A kernel or an operation, or a stretch of the critical path."""

    name: str
    label: str
    """Its category; of communication with the axis."""
    n: NonNegativeInt
    """How often it ran in a step of a rank, rounded."""
    seconds: NonNegativeFloat
    """In a step of a rank, on average."""
    share: NonNegativeFloat
    """Of the step; kernels that run at the same time add up to more than 1."""


class Overhead(Value):
    """What profiling cost: profiled steps held against others of the same run."""

    fraction: float | None
    """Median profiled step over median other step, less 1; None where there are none."""
    profiled_s: float | None = None
    plain_s: float | None = None
    n_profiled: NonNegativeInt = 0
    n_plain: NonNegativeInt = 0
    why: str | None = None
    """Why there is none."""


class Profile(Value):
    """profile.json. What a tool does not tell is empty or None."""

    schema_version: Literal[1] = PROFILE_SCHEMA
    tool: ToolName
    run: str | None = None
    """The run folder's name; None for a file from elsewhere."""
    files: tuple[str, ...] = ()
    """What was read, relative to the run folder, or as it was named."""
    ranks: tuple[NonNegativeInt, ...]
    steps: tuple[NonNegativeInt, ...]
    step_time_s: NonNegativeFloat | None = None
    """Mean over steps and ranks, by the profiler's clock."""
    spread: NonNegativeFloat | None = None
    """Standard deviation over the mean."""
    n: NonNegativeInt = 0
    """Steps times ranks."""
    parts: dict[str, NonNegativeFloat] = {}
    """Seconds of a step by category; without `communication_overlapped` they add up to it."""
    axes: dict[str, AxisTime] = {}
    """Communication by axis of the layout."""
    breakdowns: tuple[Breakdown, ...] = ()
    kernels: tuple[Hot, ...] = ()
    """The longest first, all together."""
    critical_path: tuple[Hot, ...] = ()
    """What the end of a step waited for, each moment once."""
    memory: tuple[RankCurve, ...] = ()
    """Of the tool `memory`."""
    overhead: Overhead | None = None
    communication: Communication | None = None
    """What the ranks exchanged."""
    traffic: tuple[TrafficContrast, ...] = ()
    """The same in bytes of a step, beside what the layout asks for."""
    traffic_why: str | None = None
    """Why nothing stands beside it."""
    waterfall: tuple[WaterfallLevel, ...] = ()
    peak_source: str | None = None
    """What the first level of the waterfall is."""
    warnings: tuple[str, ...] = ()


def profile_of(
    tool: ToolName,
    files: Sequence[str],
    breakdowns: Sequence[Breakdown],
    *,
    kernels: Sequence[Hot] = (),
    critical_path: Sequence[Hot] = (),
    warnings: Sequence[str] = (),
) -> Profile:
    """The profile of steps that were taken apart; there is at least one."""
    mean = MeanBreakdown.of(breakdowns)
    return Profile(
        tool=tool,
        files=tuple(files),
        ranks=tuple(sorted({each.rank for each in breakdowns})),
        steps=tuple(sorted({each.step for each in breakdowns})),
        step_time_s=mean.step_time_s,
        spread=mean.spread,
        n=mean.n,
        parts=mean.parts,
        axes=mean.axes,
        breakdowns=tuple(breakdowns),
        kernels=tuple(kernels),
        critical_path=tuple(critical_path),
        warnings=tuple(warnings),
    )


def refuse_doubles(files: Sequence[str], ranks: Sequence[int]) -> None:
    """Raise UserError where two files are of the same rank."""
    twice = next((rank for rank in ranks if ranks.count(rank) > 1), None)
    if twice is not None:
        both = " and ".join(file for file, rank in zip(files, ranks, strict=True) if rank == twice)
        raise UserError(both, f"are both of rank {twice}", remedy="read them one by one")
