"""The tool `torch`: PyTorch's own profiler in the native trainer, and traces from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import UserError
from paceline.core.job import Job
from paceline.core.profiling import PROFILES_FOLDER
from paceline.core.run import RunSpec
from paceline.profiles.attribution import breakdowns
from paceline.profiles.hottest import critical_path, top_kernels
from paceline.profiles.kineto import read_timeline
from paceline.profiles.profile import Profile, profile_of, refuse_doubles

ENDINGS = (".json.gz", ".json")
OF_RUN = "rank-*.trace.json.gz"
"""What the native trainer writes."""


def unsupported(spec: RunSpec) -> str | None:
    """Only the native trainer takes its profiler from Paceline."""
    if spec.engine == "native":
        return None
    return (
        f"engine {spec.engine} is not told to profile itself: switch on its own profiler, and read "
        "the trace by --from"
    )


def attached(job: Job, spec: RunSpec) -> Job:
    """The trainer attaches its own profiler."""
    return job


def read(folder: Path) -> Profile:
    """The traces of a run folder; raises UserError where there are none or one is torn."""
    traces = sorted((folder / PROFILES_FOLDER).glob(OF_RUN))
    if not traces:
        raise UserError(
            str(folder / PROFILES_FOLDER),
            "holds no trace: the run ended before its profiled steps did",
            remedy="logs/ says why; --steps A-B profiles earlier ones",
        )
    return _profile(traces, [str(path.relative_to(folder)) for path in traces])


def read_file(path: Path) -> Profile:
    """One trace, or all of a folder, one a rank."""
    if not path.is_dir():
        return _profile([path], [str(path)])
    traces = sorted(file for file in path.iterdir() if file.name.endswith(ENDINGS))
    if not traces:
        raise UserError(str(path), "holds no trace", allowed=", ".join(f"*{e}" for e in ENDINGS))
    return _profile(traces, [str(file) for file in traces])


def _profile(paths: Sequence[Path], names: Sequence[str]) -> Profile:
    timelines = [read_timeline(path) for path in paths]
    refuse_doubles(names, [timeline.rank for timeline in timelines])
    return profile_of(
        "torch",
        names,
        [each for timeline in timelines for each in breakdowns(timeline)],
        kernels=top_kernels(timelines),
        critical_path=critical_path(timelines),
    )
