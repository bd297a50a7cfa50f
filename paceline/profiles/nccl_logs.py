"""The tool `nccl`: NCCL's log and the trainer's counters of a run, and files from anywhere."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from paceline.core.errors import UserError
from paceline.core.job import Job
from paceline.core.profiling import PROFILES_FOLDER
from paceline.core.run import RunSpec
from paceline.core.units import counted
from paceline.files.log_file import LogFile
from paceline.files.run_folder import read_record
from paceline.profiles.nccl import inspector
from paceline.profiles.nccl.communication import Communication
from paceline.profiles.nccl.contrast import axis_groups, contrast, differences
from paceline.profiles.nccl.counters import read_counters
from paceline.profiles.nccl.debug_log import DebugLog
from paceline.profiles.nccl.inspector import InspectorLog
from paceline.profiles.profile import Profile
from paceline.profiles.wrapping import wrapped

SUBSYSTEMS = "INIT,ENV,COLL,P2P,NET,TUNING"
LOGS, COUNTERS = "nccl-*.log", "rank-*.jsonl"
"""In PROFILES_FOLDER of a run."""
VARIABLES = {
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": SUBSYSTEMS,
    # A command works in its user's folder.
    "NCCL_DEBUG_FILE": f"{{folder}}/{PROFILES_FOLDER}/nccl-{{rank}}.%h.%p.log",
}
COUNT = {"PACELINE_TRAFFIC": PROFILES_FOLDER}


SUBMITTED = ("mlperf", "nemo")
"""Engines whose batch script is submitted as it is, so that no variable of ours reaches a rank."""


def unsupported(spec: RunSpec) -> str | None:
    """One rank exchanges nothing; without GPUs the native trainer alone counts."""
    if spec.world_size == 1:
        return "a single rank exchanges nothing: take --devices 2 or more"
    if spec.cluster.device == "cpu" and spec.engine != "native":
        return f"engine {spec.engine} on CPUs does not use NCCL, and counts nothing itself"
    if spec.engine in SUBMITTED:
        switch = " (engine_settings.nccl_trace=true)" if spec.engine == "nemo" else ""
        return (
            f"engine {spec.engine} submits a script of its own: switch NCCL's log on there{switch} "
            "and read it by --from"
        )
    return None


def attached(job: Job, spec: RunSpec) -> Job:
    """NCCL writes a log a process, the native trainer its counts, on the chosen ranks."""
    assert spec.profile is not None
    env = {} if spec.cluster.device == "cpu" else VARIABLES
    counts = COUNT if spec.engine == "native" else {}
    return wrapped(job, spec.profile.ranks, env={**env, **counts})


def read(folder: Path) -> Profile:
    """The table of a run folder, beside the bytes that its layout asks for."""
    profiles = folder / PROFILES_FOLDER
    logs, counters = sorted(profiles.glob(LOGS)), sorted(profiles.glob(COUNTERS))
    if not logs and not counters:
        raise UserError(
            str(profiles),
            "holds neither a log of NCCL nor counts: the run ended before its ranks met",
            remedy="logs/ says why",
        )
    spec = read_record(folder).spec
    ranks: Collection[int] = ()
    steps: tuple[int, ...] = ()
    table: Communication | None = None
    if logs:
        axes = axis_groups(spec.layout, spec.dp) if spec else {}
        table = _of_logs(logs).communication(axes, spec.training.steps if spec else None)
        steps = tuple(range(1, spec.training.steps + 1)) if spec else ()
    if counters:
        asked = spec.profile if spec else None
        first, last = (asked.first_step, asked.last_step) if asked else (1, None)
        counted, ranks = read_counters(counters, first, last)
        steps = tuple(range(first, last + 1)) if last else ()
        table = _joined(counted, table)
    assert table is not None
    rows, why = contrast(table, spec, ranks) if spec else ((), "nothing says what was run")
    names = [str(path.relative_to(folder)) for path in (*counters, *logs)]
    chosen = sorted(ranks) or (spec.profile.ranks if spec and spec.profile else range(table.ranks))
    return Profile(
        tool="nccl",
        files=tuple(names),
        ranks=tuple(chosen),
        steps=steps,
        communication=table,
        traffic=rows,
        traffic_why=why,
        warnings=(*table.warnings, *differences(rows), *_damage(table)),
    )


def read_file(path: Path) -> Profile:
    """A log, records of the inspector or counts of anybody; or a folder of one of them."""
    files = [path]
    if path.is_dir():
        files = sorted(path.glob(COUNTERS)) or sorted(f for f in path.iterdir() if f.is_file())
    try:
        table = _table(path, files)
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        raise UserError(str(path), what) from error
    return Profile(
        tool="nccl",
        files=tuple(str(file) for file in files),
        ranks=tuple(range(table.ranks)),
        steps=(),
        communication=table,
        traffic_why="nothing says in which layout, and for how many steps, it ran",
        warnings=(*table.warnings, *_damage(table)),
    )


def _table(path: Path, files: Sequence[Path]) -> Communication:
    first = b"".join(next(iter(LogFile(file)), b"") for file in files[:1])
    if inspector.MARK in first:
        records = InspectorLog()
        for file in files:
            records.read(file)
        return records.communication()
    if first.startswith(b'{"event": "start"'):
        return read_counters(files)[0]
    log = _of_logs(files)
    if not log.num_lines:
        raise UserError(
            str(path),
            "holds no line of NCCL",
            allowed="logs of NCCL_DEBUG=INFO, JSON of NCCL's inspector, plain or gzip",
            remedy=f"set NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS={SUBSYSTEMS}",
        )
    return log.communication()


def _of_logs(paths: Sequence[Path]) -> DebugLog:
    log = DebugLog()
    for path in paths:
        log.read(path)
    return log


def _joined(counted: Communication, logged: Communication | None) -> Communication:
    """The trainer's counts, which know their steps, with what NCCL says of its connections."""
    if logged is None:
        return counted
    kept = ("algorithms", "network", "torn_lines", "broken_off", "warnings")
    return counted.model_copy(update={name: getattr(logged, name) for name in kept})


def _damage(table: Communication) -> Iterator[str]:
    if not table.rows:
        yield "no call was logged: NCCL_DEBUG_SUBSYS has to name COLL"
    if table.torn_lines:
        yield f"missing: {counted(table.torn_lines, 'call')} on torn or unknown lines"
    if table.broken_off:
        yield f"a file could not be read to its end: {table.broken_off}"
