"""The tool `nsys`: Nsight Systems around the chosen ranks, and reports from elsewhere.

Files are converted to SQLite: .qdstrm by Nsight Systems' importer, .nsys-rep by `nsys`.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.job import Job
from paceline.core.run import RunSpec
from paceline.core.training import PROFILES_FOLDER
from paceline.files.programs import run_program
from paceline.files.temporary import temporary_folder
from paceline.profiles.attribution import breakdowns, critical_path, top_kernels
from paceline.profiles.nsys.timelines import (
    SYSTEM_CALLS,
    ReportTables,
    rank_of,
    read_timeline,
)
from paceline.profiles.profile import Hot, Profile, profile_of, refuse_duplicate_ranks
from paceline.profiles.timeline import Timeline
from paceline.profiles.tools import wrap_ranks
from paceline.profiles.torch_traces import HOOKED_ENGINES

STREAM, REPORT, DATABASE = ".qdstrm", ".nsys-rep", ".sqlite"
ENDINGS = (DATABASE, REPORT, STREAM)
"""Endings that can be read, in order of preference."""
LIMIT_S = 1800.0
IMPORTER = "QdstrmImporter"


def nsys_program() -> Path | None:
    """Return `nsys` from PATH or next to the interpreter, or None."""
    sibling = Path(sys.executable).with_name("nsys")
    path = shutil.which("nsys") or (str(sibling) if sibling.exists() else None)
    return Path(path) if path else None


def importer_program(nsys: Path) -> Path | None:
    """Return the importer of an `nsys`; Debian installs host and target parts separately."""
    target = nsys.resolve().parent
    hosts = [folder / "host-linux-x64" for folder in (target.parent, *target.parents)]
    hosts += [folder / "nsight-systems/host-linux-x64" for folder in target.parents]
    return next((host / IMPORTER for host in hosts if (host / IMPORTER).is_file()), None)


def reports_of(folder: Path) -> list[Path]:
    """Return the reports of a folder in order, one per rank."""
    report_by_stem: dict[str, Path] = {}
    for ending in reversed(ENDINGS):
        report_by_stem |= {path.stem: path for path in folder.glob(f"*{ending}")}
    return [path for _, path in sorted(report_by_stem.items())]


def database(path: Path, folder: Path) -> Path:
    """Return the SQLite file of a report, exported into `folder` unless it is one already.

    Raises UserError for other files and if `nsys` is missing, SystemFaultError if it fails.
    """
    if path.suffix == DATABASE:
        return path
    if path.suffix not in (STREAM, REPORT):
        raise UserError(str(path), "is not an Nsight Systems report", allowed=", ".join(ENDINGS))
    nsys = nsys_program()
    if nsys is None:
        raise UserError(
            str(path),
            "needs Nsight Systems to be read, but nsys is not in PATH",
            remedy="install it, or read the output of nsys export --type sqlite",
        )
    report = path if path.suffix == REPORT else _import_stream(path, folder, nsys)
    output_file = folder / f"{path.stem}{DATABASE}"
    with _atomic_output(output_file) as part:
        output = f"--output={part}"
        words = ["export", "--type=sqlite", "--force-overwrite=true", output, str(report)]
        _run([str(nsys), *words], report, part)
    return output_file


def _import_stream(path: Path, folder: Path, nsys: Path) -> Path:
    """Return the report of a .qdstrm file, imported into `folder`."""
    importer = importer_program(nsys)
    if importer is None:
        raise UserError(
            str(path),
            f"must be imported, but {IMPORTER} is not next to {nsys}",
            remedy="install the host part of Nsight Systems, or copy the file to a machine with it",
        )
    output_file = folder / f"{path.stem}{REPORT}"
    with _atomic_output(output_file) as part:
        words = ["--force-overwrite", "--input-file", str(path), "--output-file", str(part)]
        _run([str(importer), *words], path, part)
    return output_file


@contextmanager
def _atomic_output(output_file: Path) -> Iterator[Path]:
    """Yield a temporary path that becomes `output_file` when it is complete."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(temporary_folder(output_file.parent))
        except OSError as error:
            what = f"cannot be written: {error.strerror}"
            raise SystemFaultError(str(output_file), what) from error
        part = folder / output_file.name
        yield part
        part.replace(output_file)


def _run(command: Sequence[str], source: Path, output_file: Path) -> None:
    deadline = time.monotonic() + LIMIT_S

    def check() -> None:
        if time.monotonic() > deadline:
            what = f"took {Path(command[0]).name} more than {LIMIT_S:.0f} s"
            raise SystemFaultError(str(source), what)

    try:
        result = run_program(command, check)
    except OSError as error:
        raise SystemFaultError(command[0], f"cannot be started: {error.strerror}") from error
    if result.returncode or not output_file.is_file():
        lines = (result.stderr or result.stdout).strip().splitlines()
        message = lines[-1] if lines else f"exit code {result.returncode}"
        raise UserError(str(source), f"cannot be read by {Path(command[0]).name}: {message}")


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
    level = "IFNULL(nestingLevel, 0) = 0" if "nestingLevel" in present else "1"
    total = SystemCalls(span_s=tables.span_ns(SYSTEM_CALLS) * 1e-9)
    for name, calls, ns in tables.sums(SYSTEM_CALLS, "nameId", level):
        total.seconds[name] += ns * 1e-9  # pyright: ignore
        total.calls[name] += calls
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
    with temporary_folder() as scratch:
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
