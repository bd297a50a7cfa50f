"""The tool `nccl`: NCCL's log and the trainer's counters of a run, and other NCCL files.

The counters are in rank-NNNNN.jsonl, schema 1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from paceline.core.errors import UserError
from paceline.core.job import Job
from paceline.core.problem import invalid_input
from paceline.core.run import RunSpec
from paceline.core.traffic import Collective
from paceline.core.training import PROFILES_FOLDER
from paceline.core.units import pluralize
from paceline.core.value import NonNegativeInt, PositiveInt, Value
from paceline.files.documents import parse_json, read_lines
from paceline.files.log_file import LogFile
from paceline.files.run_folder import read_record
from paceline.profiles.nccl import inspector
from paceline.profiles.nccl.communication import Communication, Membership, Tally
from paceline.profiles.nccl.debug_log import DebugLog
from paceline.profiles.nccl.inspector import InspectorLog
from paceline.profiles.nccl.traffic_comparison import axis_groups, compare_traffic, traffic_warnings
from paceline.profiles.profile import Profile
from paceline.profiles.tools import wrap_ranks


class TrafficStart(Value):
    """First line of a rank's file."""

    event: Literal["start"]
    schema_version: Literal[1] = Field(alias="schema")
    rank: NonNegativeInt
    world_size: PositiveInt
    backend: str | None = None
    axes: dict[str, tuple[NonNegativeInt, ...]] = {}
    """World ranks along each axis."""


class CountedMessage(Value):
    """Calls of one message size in one step."""

    axis: str
    collective: Collective
    ranks: PositiveInt
    num_bytes: NonNegativeInt = Field(alias="bytes")
    calls: PositiveInt


class TrafficStep(Value):
    """Traffic of one step of a rank."""

    event: Literal["traffic"]
    step: PositiveInt
    messages: tuple[CountedMessage, ...]


def read_counters(
    paths: Iterable[Path], first_step: int = 1, last_step: int | None = None
) -> tuple[Communication, frozenset[int]]:
    """Return (traffic of those steps, ranks with counters); an incomplete last line is skipped.

    Raises UserError for a file of another format.
    """
    tally, ranks, steps, num_incomplete = Tally(), set[int](), set[int](), 0
    world_ranks: dict[str, tuple[int, ...]] = {}
    for path in paths:
        start: TrafficStart | None = None
        for number, line in enumerate(read_lines(path), start=1):
            try:
                if start is None:
                    start = TrafficStart.model_validate(parse_json(line, nan=True))
                    ranks.add(start.rank)
                    continue
                step = TrafficStep.model_validate(parse_json(line, nan=True))
            except ValidationError as error:
                raise invalid_input(f"{path}:{number}", error) from error
            except ValueError:
                num_incomplete += 1
                continue
            if step.step < first_step or (last_step is not None and step.step > last_step):
                continue
            steps.add(step.step)
            for message in step.messages:
                members = start.axes.get(message.axis, ())
                name = f"{message.axis} {members}"
                world_ranks[name] = members
                process = f"rank {start.rank}"
                member = Membership(process, name, message.ranks, start.rank, message.axis)
                tally.add(member, message.collective, message.num_bytes, message.calls)
    table = Communication(
        source="trainer counters",
        ranks=len(ranks),
        steps=len(steps) or None,
        rows=tally.rows(world_ranks),
        torn_lines=num_incomplete,
    )
    return table, frozenset(ranks)


SUBSYSTEMS = "INIT,ENV,COLL,P2P,NET,TUNING"
LOGS, COUNTERS = "nccl-*.log", "rank-*.jsonl"
"""Files in PROFILES_FOLDER of a run."""
VARIABLES = {
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": SUBSYSTEMS,
    # A user's command has another working directory.
    "NCCL_DEBUG_FILE": f"{{folder}}/{PROFILES_FOLDER}/nccl-{{rank}}.%h.%p.log",
}
COUNT = {"PACELINE_TRAFFIC": PROFILES_FOLDER}


SUBMITTING_ENGINES = ("mlperf", "nemo")
"""Engines that submit their own batch script, so that variables do not reach the ranks."""


def unsupported(spec: RunSpec) -> str | None:
    """Return why the run cannot be profiled, or None."""
    if spec.world_size == 1:
        return "a single rank exchanges nothing; use --devices 2 or more"
    if spec.cluster.device == "cpu" and spec.engine != "native":
        return f"engine {spec.engine} does not use NCCL on CPUs and has no counters"
    if spec.engine in SUBMITTING_ENGINES:
        switch = " (engine_settings.nccl_trace=true)" if spec.engine == "nemo" else ""
        return (
            f"engine {spec.engine} submits its own script; enable NCCL's log there{switch} "
            "and read it with --from"
        )
    return None


def attach(job: Job, spec: RunSpec) -> Job:
    """Return the job with NCCL's log and the trainer's counters enabled on the chosen ranks."""
    assert spec.profile is not None
    env = {} if spec.cluster.device == "cpu" else VARIABLES
    counts = COUNT if spec.engine == "native" else {}
    return wrap_ranks(job, spec.profile.ranks, env={**env, **counts})


def read(folder: Path) -> Profile:
    """Return the traffic of a run folder, compared with the bytes that its layout requires."""
    profiles = folder / PROFILES_FOLDER
    logs, counters = sorted(profiles.glob(LOGS)), sorted(profiles.glob(COUNTERS))
    if not logs and not counters:
        raise UserError(
            str(profiles),
            "holds neither an NCCL log nor counters: the run ended before its ranks connected",
            remedy="see logs/",
        )
    spec = read_record(folder).spec
    ranks: Collection[int] = ()
    steps: tuple[int, ...] = ()
    table: Communication | None = None
    if logs:
        axes = axis_groups(spec.layout, spec.dp) if spec else {}
        table = _read_logs(logs).communication(axes, spec.training.steps if spec else None)
        steps = tuple(range(1, spec.training.steps + 1)) if spec else ()
    if counters:
        request = spec.profile if spec else None
        first, last = (request.first_step, request.last_step) if request else (1, None)
        counter_table, ranks = read_counters(counters, first, last)
        steps = tuple(range(first, last + 1)) if last else ()
        table = _with_connections(counter_table, table)
    assert table is not None
    rows, why = (
        compare_traffic(table, spec, ranks) if spec else ((), "the run's settings are unknown")
    )
    names = [str(path.relative_to(folder)) for path in (*counters, *logs)]
    profiled_ranks = sorted(ranks) or (
        spec.profile.ranks if spec and spec.profile else range(table.ranks)
    )
    return Profile(
        tool="nccl",
        files=tuple(names),
        ranks=tuple(profiled_ranks),
        steps=steps,
        communication=table,
        traffic=rows,
        traffic_why=why,
        warnings=(*table.warnings, *traffic_warnings(rows), *_damage(table)),
    )


def read_file(path: Path) -> Profile:
    """Return the traffic of an NCCL log, inspector records or counters: one file or a folder."""
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
        traffic_why="layout and number of steps are unknown",
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
    log = _read_logs(files)
    if not log.num_lines:
        raise UserError(
            str(path),
            "holds no NCCL lines",
            allowed="logs of NCCL_DEBUG=INFO, JSON of NCCL's inspector, plain or gzip",
            remedy=f"set NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS={SUBSYSTEMS}",
        )
    return log.communication()


def _read_logs(paths: Sequence[Path]) -> DebugLog:
    log = DebugLog()
    for path in paths:
        log.read(path)
    return log


def _with_connections(
    counter_table: Communication, log_table: Communication | None
) -> Communication:
    """Return the trainer's counters by step, with the connections from NCCL's log."""
    if log_table is None:
        return counter_table
    log_fields = ("algorithms", "network", "torn_lines", "broken_off", "warnings")
    return counter_table.model_copy(update={name: getattr(log_table, name) for name in log_fields})


def _damage(table: Communication) -> Iterator[str]:
    if not table.rows:
        yield "no call was logged; NCCL_DEBUG_SUBSYS must include COLL"
    if table.torn_lines:
        yield f"missing: {pluralize(table.torn_lines, 'call')} on incomplete or unknown lines"
    if table.broken_off:
        yield f"a file could not be read to its end: {table.broken_off}"
