"""The tool `nsys`: Nsight Systems around the chosen ranks, and reports from anywhere."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.errors import UserError
from paceline.core.job import Job
from paceline.core.profiling import PROFILES_FOLDER
from paceline.core.run import RunSpec
from paceline.profiles.attribution import breakdowns, critical_path, top_kernels
from paceline.profiles.nsys.reports import ENDINGS, database, nsys_program, reports_of
from paceline.profiles.nsys.timelines import (
    STRINGS,
    SYSTEM_CALLS,
    ReportTables,
    rank_of,
    read_timeline,
)
from paceline.profiles.profile import Hot, Profile, profile_of, refuse_doubles
from paceline.profiles.timeline import Timeline
from paceline.profiles.torch_traces import HOOKED
from paceline.profiles.wrapping import wrapped

MOST = 30
LABEL = "system call"


@dataclass(frozen=True)
class SystemCalls:
    """Of one rank, all threads together."""

    span_s: float = 0.0
    """From the first call to the end of the last one."""
    seconds: Counter[str] = field(default_factory=Counter[str])
    calls: Counter[str] = field(default_factory=Counter[str])


def system_calls(tables: ReportTables) -> SystemCalls:
    """Calls by name; empty where they were not recorded."""
    present = tables.columns(SYSTEM_CALLS)
    if not {"start", "end", "nameId"} <= present:
        return SystemCalls()
    # What is nested is in the outer call's time, and the profiler's own marks take none.
    level = "AND IFNULL(o.nestingLevel, 0) = 0" if "nestingLevel" in present else ""
    rows = tables.values(
        f"SELECT s.value, COUNT(*), SUM(o.end - o.start) FROM {SYSTEM_CALLS} o "
        f"JOIN {STRINGS} s ON s.id = o.nameId WHERE o.end > o.start {level} GROUP BY o.nameId"
    )
    ((span,),) = tables.values(f"SELECT IFNULL(MAX(end) - MIN(start), 0) FROM {SYSTEM_CALLS}")
    total = SystemCalls(span_s=span * 1e-9)
    for name, calls, ns in rows:
        total.seconds[str(name)] += ns * 1e-9
        total.calls[str(name)] += calls
    return total


def longest(ranks: Sequence[SystemCalls]) -> tuple[Hot, ...]:
    """The longest calls, the mean of the ranks; shares are of a rank's whole capture."""
    seconds, calls = Counter[str](), Counter[str]()
    for rank in ranks:
        seconds.update(rank.seconds)
        calls.update(rank.calls)
    n, span_s = max(len(ranks), 1), sum(rank.span_s for rank in ranks)
    return tuple(
        Hot(
            name=name,
            label=LABEL,
            n=round(calls[name] / n),
            seconds=total / n,
            share=total / span_s if span_s else 0.0,
        )
        for name, total in seconds.most_common(MOST)
    )


TRACE = "cuda,nvtx"
CPU_TRACE = "osrt,nvtx"
"""Without a GPU there is nothing but calls of the operating system's libraries."""


@dataclass(frozen=True)
class NsysSettings:
    """What is recorded beside kernels and the trainer's marks."""

    gpu_metrics: bool = False
    """Samples of the devices' counters, by the first rank of each host for all of its devices."""
    cpu: bool = False
    """Samples of the program counter on the CPU, without the calls that lead there."""


def nsys_words(device: str, output: str, settings: NsysSettings) -> list[str]:
    """The words before the program of one rank; `output` names its file.

    On a GPU the capture lasts from cudaProfilerStart to cudaProfilerStop, between which the trainer
    runs the chosen steps; on a CPU nothing tells it, so the whole program is recorded.
    """
    cuda = device == "cuda"
    words = [
        "nsys",
        "profile",
        f"--output={output}",
        "--force-overwrite=true",
        "--inherit-environment=true",
        f"--trace={TRACE if cuda else CPU_TRACE}",
        "--cpuctxsw=none",
    ]
    # With backtraces, or with switches between threads, 2022.4 never ends in a virtual machine.
    words += ["--sample=process-tree", "--backtrace=none"] if settings.cpu else ["--sample=none"]
    if cuda:
        # Without `stop` the program would be ended with the capture.
        words += [
            "--nic-metrics=true",
            "--capture-range=cudaProfilerApi",
            "--capture-range-end=stop",
        ]
    return words


def first_words(device: str, settings: NsysSettings) -> list[str]:
    """Further words for the first rank of a host: counters are the device's, not a process's."""
    return ["--gpu-metrics-device=all"] if settings.gpu_metrics and device == "cuda" else []


def output_pattern(recipe: str, dtype: str, world_size: int) -> str:
    """RECIPE-DTYPE_64g_JOB_NODE_LOCAL in the run's folder, with places that the rank fills in.

    So does NVIDIA's benchmark collection name its files.
    """
    name = re.sub(r"[^\w.-]+", "-", recipe)
    return f"{PROFILES_FOLDER}/{name}-{dtype}_{world_size}g_{{job}}_{{node}}_{{local}}"


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
