"""The tool `nsys`: Nsight Systems around the chosen ranks, and reports from anywhere."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import UserError
from paceline.core.job import Job
from paceline.core.profiling import PROFILES_FOLDER
from paceline.core.run import RunSpec
from paceline.profiles.attribution import breakdowns
from paceline.profiles.hottest import critical_path, top_kernels
from paceline.profiles.nsys.command import NsysSettings, first_words, nsys_words, output_pattern
from paceline.profiles.nsys.reports import ENDINGS, database, nsys_program, reports_of
from paceline.profiles.nsys.system_calls import SystemCalls, longest, system_calls
from paceline.profiles.nsys.tables import ReportTables
from paceline.profiles.nsys.timelines import rank_of, read_timeline
from paceline.profiles.profile import Profile, profile_of, refuse_doubles
from paceline.profiles.timeline import Timeline
from paceline.profiles.torch_traces import HOOKED
from paceline.profiles.wrapping import wrapped


def unsupported(spec: RunSpec) -> str | None:
    """On GPUs the native trainer alone begins and ends the capture with its steps; on a CPU, where
    all of a program is recorded, any engine that starts its ranks here will do."""
    if spec.engine != "native" and not (spec.cluster.device == "cpu" and spec.engine in HOOKED):
        return (
            f"engine {spec.engine} is not told when to begin and end: use its own setting for "
            "Nsight Systems, and read the report by --from"
        )
    if spec.cluster.nodes == 1 and not spec.cluster.in_container and nsys_program() is None:
        return "nsys is not in PATH: install Nsight Systems, or `make deps-profiling` on Debian"
    return None


def attached(job: Job, spec: RunSpec) -> Job:
    """Each chosen rank runs as the program of an `nsys profile`."""
    assert spec.profile is not None
    device = "cpu" if spec.cluster.device == "cpu" else "cuda"
    asked = spec.profile
    settings = NsysSettings(gpu_metrics=asked.gpu_metrics, cpu=asked.cpu_samples)
    output = output_pattern(spec.recipe, spec.training.dtype, spec.world_size)
    return wrapped(
        job,
        asked.ranks,
        before=nsys_words(device, output, settings),
        before_first=first_words(device, settings),
    )


def read(folder: Path) -> Profile:
    """The reports of a run folder; what they are exported to stays beside them."""
    profiles = folder / PROFILES_FOLDER
    reports = reports_of(profiles)
    if not reports:
        raise UserError(
            str(profiles),
            "holds no report: the run ended before its profiled steps did",
            remedy="logs/ says why; --steps A-B profiles earlier ones",
        )
    return _profile(reports, [str(path.relative_to(folder)) for path in reports], profiles)


def read_file(path: Path) -> Profile:
    """One report, or all of a folder, one a rank."""
    reports = reports_of(path) if path.is_dir() else [path]
    if not reports:
        raise UserError(str(path), "holds no report", allowed=", ".join(f"*{e}" for e in ENDINGS))
    with tempfile.TemporaryDirectory(prefix="paceline-nsys-") as scratch:
        return _profile(reports, [str(report) for report in reports], Path(scratch))


def _profile(reports: Sequence[Path], names: Sequence[str], scratch: Path) -> Profile:
    timelines: list[Timeline] = []
    calls: list[SystemCalls] = []
    ranks: list[int] = []
    for number, report in enumerate(reports):
        with ReportTables(database(report, scratch)) as tables:
            timeline = read_timeline(tables, number)
            if timeline is not None:
                timelines.append(timeline)
            else:
                calls.append(system_calls(tables))
            ranks.append(timeline.rank if timeline else rank_of(tables, number))
    refuse_doubles(names, ranks)
    if timelines:
        few = f"{len(calls)} of {len(reports)} reports hold no steps of a device"
        return profile_of(
            "nsys",
            names,
            [each for timeline in timelines for each in breakdowns(timeline)],
            kernels=top_kernels(timelines),
            critical_path=critical_path(timelines),
            warnings=[few] if calls else [],
        )
    return Profile(
        tool="nsys",
        files=tuple(names),
        ranks=tuple(sorted(ranks)),
        steps=(),
        kernels=longest(calls),
        warnings=(
            "no steps on a device are marked (paceline:step N, step N, iteration N): what is told "
            "are calls of the operating system's libraries in all of the capture, all threads "
            "added up, and shares of its time",
        ),
    )
