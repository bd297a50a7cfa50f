"""The tool `nsys`: Nsight Systems around the chosen ranks, and reports from elsewhere."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.errors import UserError
from paceline.core.job import Job
from paceline.core.run import RunSpec
from paceline.core.training import PROFILES_FOLDER
from paceline.profiles.attribution import breakdowns, critical_path, top_kernels
from paceline.profiles.nsys.reports import ENDINGS, database, nsys_program, reports_of
from paceline.profiles.nsys.timelines import (
    STRINGS,
    SYSTEM_CALLS,
    ReportTables,
    rank_of,
    read_timeline,
)
from paceline.profiles.profile import Hot, Profile, profile_of, refuse_duplicate_ranks
from paceline.profiles.timeline import Timeline
from paceline.profiles.torch_traces import HOOKED_ENGINES
from paceline.profiles.wrapping import wrap_ranks

MAX_CALLS = 30
LABEL = "system call"


@dataclass(frozen=True)
class SystemCalls:
    """System calls of one rank, summed over threads."""

    span_s: float = 0.0
    """Time from the first call to the end of the last one."""
    seconds: Counter[str] = field(default_factory=Counter[str])
    calls: Counter[str] = field(default_factory=Counter[str])


def system_calls(tables: ReportTables) -> SystemCalls:
    """Return system calls by name; empty if they were not recorded."""
    present = tables.columns(SYSTEM_CALLS)
    if not {"start", "end", "nameId"} <= present:
        return SystemCalls()
    # Nested calls are part of the outer call's time.
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


def longest_calls(ranks: Sequence[SystemCalls]) -> tuple[Hot, ...]:
    """Return the longest calls as mean over ranks, with shares of a rank's capture."""
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
        for name, total in seconds.most_common(MAX_CALLS)
    )


TRACE = "cuda,nvtx"
CPU_TRACE = "osrt,nvtx"
"""Without a GPU, only calls of operating system libraries are recorded."""


@dataclass(frozen=True)
class NsysSettings:
    """Data to record in addition to kernels and the trainer's marks."""

    gpu_metrics: bool = False
    """Sample hardware counters of all devices of a host, in its first rank."""
    cpu: bool = False
    """Sample the CPU's program counter, without backtraces."""


def nsys_words(device: str, output: str, settings: NsysSettings) -> list[str]:
    """Return the command before the program of one rank; `output` is the path of its report.

    On a GPU the capture lasts from cudaProfilerStart to cudaProfilerStop, which the trainer calls
    around the chosen steps. On a CPU the whole program is recorded.
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
    # With backtraces or context switches, version 2022.4 hangs in virtual machines.
    words += ["--sample=process-tree", "--backtrace=none"] if settings.cpu else ["--sample=none"]
    if cuda:
        # Without `stop`, the program would end with the capture.
        words += [
            "--nic-metrics=true",
            "--capture-range=cudaProfilerApi",
            "--capture-range-end=stop",
        ]
    return words


def first_words(device: str, settings: NsysSettings) -> list[str]:
    """Return further words for the first rank of a host, which samples all its devices."""
    return ["--gpu-metrics-device=all"] if settings.gpu_metrics and device == "cuda" else []


def output_pattern(recipe: str, dtype: str, world_size: int) -> str:
    """Return the path RECIPE-DTYPE_64g_JOB_NODE_LOCAL in the run folder, with placeholders.

    These are the file names of NVIDIA's benchmark collection.
    """
    name = re.sub(r"[^\w.-]+", "-", recipe)
    return f"{PROFILES_FOLDER}/{name}-{dtype}_{world_size}g_{{job}}_{{node}}_{{local}}"


def unsupported(spec: RunSpec) -> str | None:
    """Return why the run cannot be profiled, or None.

    On GPUs only the native trainer starts and stops the capture with its steps. On a CPU the whole
    program is recorded, for any engine whose ranks are started here."""
    if spec.engine != "native" and not (
        spec.cluster.device == "cpu" and spec.engine in HOOKED_ENGINES
    ):
        return (
            f"engine {spec.engine} cannot start and stop the capture; use its own setting for "
            "Nsight Systems and read the report with --from"
        )
    if spec.cluster.nodes == 1 and not spec.cluster.in_container and nsys_program() is None:
        return "nsys is not in PATH: install Nsight Systems, or `make deps-profiling` on Debian"
    return None


def attach(job: Job, spec: RunSpec) -> Job:
    """Return the job with `nsys profile` around the program of each chosen rank."""
    assert spec.profile is not None
    device = "cpu" if spec.cluster.device == "cpu" else "cuda"
    request = spec.profile
    settings = NsysSettings(gpu_metrics=request.gpu_metrics, cpu=request.cpu_samples)
    output = output_pattern(spec.recipe, spec.training.dtype, spec.world_size)
    return wrap_ranks(
        job,
        request.ranks,
        before=nsys_words(device, output, settings),
        before_first=first_words(device, settings),
    )


def read(folder: Path) -> Profile:
    """Return the profile of a run folder; the exported files stay next to the reports."""
    profiles = folder / PROFILES_FOLDER
    reports = reports_of(profiles)
    if not reports:
        raise UserError(
            str(profiles),
            "holds no report: the run ended before its profiled steps",
            remedy="see logs/; --steps A-B profiles earlier steps",
        )
    return _profile(reports, [str(path.relative_to(folder)) for path in reports], profiles)


def read_file(path: Path) -> Profile:
    """Return the profile of one report, or of a folder with one report per rank."""
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
    refuse_duplicate_ranks(names, ranks)
    if timelines:
        few = f"{len(calls)} of {len(reports)} reports have no steps on a device"
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
        kernels=longest_calls(calls),
        warnings=(
            "no step marks on a device (paceline:step N, step N, iteration N): the table shows "
            "calls of operating system libraries over the complete capture, summed over threads, "
            "and their shares of its time",
        ),
    )
