"""The tool `memory`: memory of a rank over a step, and the parts of its peak."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

import numpy as np
from pydantic import Field, NonNegativeFloat, model_validator

from paceline.core.errors import UserError
from paceline.core.job import Job
from paceline.core.run import RunSpec
from paceline.core.training import PROFILES_FOLDER
from paceline.core.value import NonNegativeInt, Value
from paceline.files.documents import read_lines, read_value
from paceline.files.events import MemoryEvent, read_rank
from paceline.files.run_folder import STEPS_FOLDER
from paceline.profiles.profile import MemoryPoint, Profile, RankCurve

RUN_FILES = "rank-*.memory.json"
MAX_CURVE_POINTS = 400
"""Maximum number of points of a curve in profile.json."""


class MemoryRecord(Value):
    """Memory of one rank over time, written by the native trainer in lists of equal length."""

    schema_version: Literal[1] = Field(alias="schema")
    rank: NonNegativeInt
    kind: Literal["resident", "allocated"]
    steps: tuple[NonNegativeInt, ...]
    edges_s: tuple[float, ...]
    """Start of each step, and the end of the last one."""
    time_s: tuple[float, ...] = Field(min_length=1)
    bytes: tuple[NonNegativeFloat, ...]
    reserved_bytes: tuple[NonNegativeFloat | None, ...]
    note: str | None = None
    """Missing parts of the steps."""

    @model_validator(mode="after")
    def _of_one_length(self) -> Self:
        lengths = {len(self.time_s), len(self.bytes), len(self.reserved_bytes)}
        if len(lengths) > 1 or len(self.edges_s) != len(self.steps) + 1 or not self.steps:
            raise ValueError("the lists have different lengths")
        return self


def unsupported(spec: RunSpec) -> str | None:
    """Return why the engine is not supported; only the native trainer records its memory."""
    if spec.engine == "native":
        return None
    return f"engine {spec.engine} does not record its memory; use --engine native"


def attach(job: Job, spec: RunSpec) -> Job:
    """Return the job unchanged; the trainer records its own memory."""
    return job


def read(folder: Path) -> Profile:
    """Return the curves of a run, each with its rank's peak by part from the run's event lines."""
    paths = sorted((folder / PROFILES_FOLDER).glob(RUN_FILES))
    if not paths:
        raise UserError(
            str(folder / PROFILES_FOLDER),
            "holds no memory curve: the run ended before its profiled steps",
            remedy="see logs/; --steps A-B profiles earlier steps",
        )
    records = [read_value(path, MemoryRecord) for path in paths]
    curves = [_curve(record, _event(folder, record.rank)) for record in records]
    return _profile(records, curves, [str(path.relative_to(folder)) for path in paths])


def read_file(path: Path) -> Profile:
    """Return the curve of one file; raises UserError for a file of another format."""
    try:
        record = read_value(path, MemoryRecord)
    except UserError as error:
        raise UserError(
            str(path),
            f"cannot be read as a memory curve: {error.what}",
            allowed=f"{PROFILES_FOLDER}/{RUN_FILES} of a run",
        ) from error
    return _profile([record], [_curve(record, None)], [str(path)])


def _profile(records: list[MemoryRecord], curves: list[RankCurve], files: list[str]) -> Profile:
    return Profile(
        tool="memory",
        files=tuple(files),
        ranks=tuple(sorted({record.rank for record in records})),
        steps=tuple(sorted({step for record in records for step in record.steps})),
        memory=tuple(curves),
        warnings=tuple(f"rank {record.rank}: {record.note}" for record in records if record.note),
    )


def _event(folder: Path, rank: int) -> MemoryEvent | None:
    path = folder / STEPS_FOLDER / f"rank-{rank:05d}.jsonl"
    return read_rank(read_lines(path)).memory if path.is_file() else None


def _curve(record: MemoryRecord, event: MemoryEvent | None) -> RankCurve:
    times, sizes = np.array(record.time_s), np.array(record.bytes)
    inside = (times >= record.edges_s[0]) & (times <= record.edges_s[-1])
    rows = np.flatnonzero(inside) if inside.any() else np.arange(len(times))
    top = int(rows[np.argmax(sizes[rows])])
    step_at = int(np.searchsorted(record.edges_s, times[top], side="right")) - 1
    step_at = min(max(step_at, 0), len(record.steps) - 1)
    begin_s, end_s = record.edges_s[step_at : step_at + 2]
    reserved = record.reserved_bytes[top]
    parts = _parts(record, event)
    peak = float(sizes[top])
    return RankCurve(
        rank=record.rank,
        kind=record.kind,
        peak_bytes=peak,
        lowest_bytes=float(sizes[rows].min()),
        peak_step=record.steps[step_at],
        peak_at=_share(float(times[top]), begin_s, end_s),
        reserved_bytes=reserved,
        fragmentation=(reserved - peak) / reserved if reserved and reserved >= peak else None,
        parts_bytes=parts,
        unexplained_bytes=peak - sum(parts.values()) if parts else None,
        why=event.why if event else "the run's event lines have no memory by part",
        curve=tuple(_points(record, begin_s, end_s)),
    )


def _share(moment: float, begin_s: float, end_s: float) -> float:
    return min(max((moment - begin_s) / (end_s - begin_s), 0.0), 1.0) if end_s > begin_s else 0.0


def _parts(record: MemoryRecord, event: MemoryEvent | None) -> dict[str, float]:
    """Return bytes by part at the peak of the step that was tracked.

    On a CPU the resident set also contains the memory from before the model was built, and the
    tracker's own memory."""
    if event is None or event.at_peak_bytes is None:
        return {}
    parts = dict(event.at_peak_bytes)
    if record.kind == "resident":
        parts["context"] = event.parts_bytes.get("context") or 0.0
        parts["watcher"] = event.watcher_bytes or 0.0
    return {name: size for name, size in parts.items() if size}


def _points(record: MemoryRecord, begin_s: float, end_s: float) -> Iterator[MemoryPoint]:
    """Yield the curve of the step with the peak; the highest point of each group."""
    rows = [row for row, at in enumerate(record.time_s) if begin_s <= at <= end_s]
    width = max(-(-len(rows) // MAX_CURVE_POINTS), 1)
    for first in range(0, len(rows), width):
        row = max(rows[first : first + width], key=lambda row: record.bytes[row])
        yield MemoryPoint(
            at_s=record.time_s[row] - begin_s,
            bytes=record.bytes[row],
            reserved_bytes=record.reserved_bytes[row],
        )
