"""Schema of profile.json: the result of a profiler for a run, with its MFU waterfall."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import NonNegativeFloat

from paceline.core.errors import UserError
from paceline.core.result import WaterfallLevel
from paceline.core.training import ToolName
from paceline.core.value import NonNegativeInt, Value
from paceline.profiles.breakdown import AxisTime, Breakdown, MeanBreakdown
from paceline.profiles.nccl.communication import Communication
from paceline.profiles.nccl.traffic_comparison import TrafficComparison

PEAK, MEASURED = "peak", "measured"
NAMES = {
    "memory_bound": "memory-bound work",
    "optimizer": "optimizer",
    "bubble": "pipeline bubble",
    "data_wait": "waiting for data",
    "host_gap": "CPU launch overhead",
    "other": "other kernels",
}


def waterfall(
    profile: Profile, flops_per_step: float, peak_flops_per_s: float
) -> tuple[WaterfallLevel, ...]:
    """Return the levels of one device from its peak to the profiled step; empty without GEMMs.

    `flops_per_step` are the model FLOPs of one device. At the peak they take FLOPs / peak seconds.
    GEMMs and attention lose their time beyond that, every other category all of its time.
    """
    parts = profile.parts
    if not profile.step_time_s or not parts.get("gemm", 0.0) + parts.get("attention", 0.0):
        return ()
    elapsed_s = flops_per_step / peak_flops_per_s
    levels = [WaterfallLevel(name=PEAK, flops_per_s=peak_flops_per_s, share=1.0, lost_s=0.0)]
    for name, seconds in _causes(profile, elapsed_s):
        elapsed_s += seconds
        rate = flops_per_step / elapsed_s
        share = rate / peak_flops_per_s
        levels.append(WaterfallLevel(name=name, flops_per_s=rate, share=share, lost_s=seconds))
    return (*levels, levels[-1].model_copy(update={"name": MEASURED, "lost_s": 0.0}))


def _causes(profile: Profile, ideal_s: float) -> Iterator[tuple[str, float]]:
    """Yield every cause with its seconds; the first can be negative if the FLOPs convention counts
    operations that are not computed."""
    parts = profile.parts
    yield "GEMMs and attention", parts["gemm"] + parts["attention"] - ideal_s
    for name in ("memory_bound", "optimizer"):
        if parts[name]:
            yield NAMES[name], parts[name]
    for axis, time in profile.axes.items():
        if time.exposed_s:
            yield f"communication {axis}", time.exposed_s
    for name in ("bubble", "data_wait", "host_gap", "other"):
        if parts[name]:
            yield NAMES[name], parts[name]


class MemoryPoint(Value):
    """Memory at one time of a step."""

    at_s: NonNegativeFloat
    """Time since the start of the step."""
    bytes: NonNegativeFloat
    reserved_bytes: NonNegativeFloat | None = None


class RankCurve(Value):
    """Memory of one rank over the profiled steps."""

    rank: NonNegativeInt
    kind: str
    """`allocated`: live tensors on a device; `resident`: the process's memory on a CPU."""
    peak_bytes: NonNegativeFloat
    lowest_bytes: NonNegativeFloat
    peak_step: NonNegativeInt
    peak_at: NonNegativeFloat
    """Position of the peak in that step, 0 to 1."""
    reserved_bytes: NonNegativeFloat | None = None
    """Memory reserved by the device's allocator at the peak."""
    fragmentation: NonNegativeFloat | None = None
    """Share of reserved memory without tensors: (reserved - allocated) / reserved."""
    parts_bytes: dict[str, float] = {}
    """Peak by part in the step that was tracked; negative if a part was counted elsewhere."""
    unexplained_bytes: float | None = None
    """Peak minus these parts: on a CPU cached memory, workspaces and libraries."""
    why: str | None = None
    """Reason for missing parts, or parts that cannot be separated."""
    curve: tuple[MemoryPoint, ...] = ()
    """Memory over the step with the peak."""


PROFILE_FILE, PROFILE_PAGE = "profile.json", "profile.html"
PROFILE_SCHEMA = 1


class Hot(Value):
    """A kernel, an operation, or a part of the critical path."""

    name: str
    label: str
    """Category; for communication with the axis."""
    n: NonNegativeInt
    """Calls per step and rank, rounded."""
    seconds: NonNegativeFloat
    """Mean seconds per step and rank."""
    share: NonNegativeFloat
    """Share of the step; kernels that run at the same time can add up to more than 1."""


class Overhead(Value):
    """Overhead of profiling: profiled steps compared with other steps of the same run."""

    fraction: float | None
    """Median profiled step divided by median other step, minus 1; None without other steps."""
    profiled_s: float | None = None
    plain_s: float | None = None
    n_profiled: NonNegativeInt = 0
    n_plain: NonNegativeInt = 0
    why: str | None = None
    """Reason for a missing fraction."""


class Profile(Value):
    """Content of profile.json. Values that a tool does not provide are empty or None."""

    schema_version: Literal[1] = PROFILE_SCHEMA
    tool: ToolName
    run: str | None = None
    """Name of the run folder; None for other files."""
    files: tuple[str, ...] = ()
    """Files that were read, relative to the run folder or as given."""
    ranks: tuple[NonNegativeInt, ...]
    steps: tuple[NonNegativeInt, ...]
    step_time_s: NonNegativeFloat | None = None
    """Mean over steps and ranks, by the profiler's clock."""
    spread: NonNegativeFloat | None = None
    """Standard deviation over the mean."""
    n: NonNegativeInt = 0
    """Steps times ranks."""
    parts: dict[str, NonNegativeFloat] = {}
    """Seconds of a step by category; all except `communication_overlapped` add up to the step."""
    axes: dict[str, AxisTime] = {}
    """Communication by axis of the layout."""
    breakdowns: tuple[Breakdown, ...] = ()
    kernels: tuple[Hot, ...] = ()
    """Longest kernels over all ranks, the longest first."""
    critical_path: tuple[Hot, ...] = ()
    """Activities that the end of a step waited for; each moment counts once."""
    memory: tuple[RankCurve, ...] = ()
    """Memory curves of the tool `memory`."""
    overhead: Overhead | None = None
    communication: Communication | None = None
    """Traffic between ranks."""
    traffic: tuple[TrafficComparison, ...] = ()
    """Bytes per step, compared with the bytes that the layout requires."""
    traffic_why: str | None = None
    """Reason for a missing comparison."""
    waterfall: tuple[WaterfallLevel, ...] = ()
    peak_source: str | None = None
    """Source of the waterfall's first level."""
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
    """Return the profile of at least one breakdown of a step."""
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


def refuse_duplicate_ranks(files: Sequence[str], ranks: Sequence[int]) -> None:
    """Raise UserError if two files are of the same rank."""
    twice = next((rank for rank in ranks if ranks.count(rank) > 1), None)
    if twice is not None:
        both = " and ".join(file for file, rank in zip(files, ranks, strict=True) if rank == twice)
        raise UserError(both, f"are both of rank {twice}", remedy="read them separately")
