"""A report's kernels and marks as the timeline of a rank.

A program runs ahead of its device: a kernel belongs to the step, and to the mark, in which the
program launched it. A step begins on the device with the first kernel that it launched.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import UserError
from paceline.profiles.kernels import annotation_label, is_communication, is_data_wait, kind_of
from paceline.profiles.timeline import (
    COMMUNICATION,
    NONE,
    Intervals,
    StepSpan,
    Timeline,
    TimelineBuilder,
)

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
FILLS = "CUPTI_ACTIVITY_KIND_MEMSET"
LAUNCHES = "CUPTI_ACTIVITY_KIND_RUNTIME"
MARKS = "NVTX_EVENTS"
SYSTEM_CALLS = "OSRT_API"
STRINGS = "StringIds"
MOST_ROWS = 20_000_000
Column = NDArray[np.int64]


class ReportTables:
    """A report, read only; raises UserError for a file that is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._db: sqlite3.Connection | None = None

    def __enter__(self) -> Self:
        with self._answers():
            if not self.path.is_file():
                raise UserError(str(self.path), "is no file")
            uri = f"file:{quote(str(self.path.resolve()))}?mode=ro&immutable=1"
            self._db = sqlite3.connect(uri, uri=True)
            self._db.execute("PRAGMA trusted_schema = OFF")
            # A view could compute for ever.
            rows = self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            self.names = {str(name) for (name,) in rows}
        if STRINGS not in self.names:
            raise UserError(
                str(self.path),
                "is no export of Nsight Systems: it has no table StringIds",
                remedy="nsys export --type sqlite REPORT.nsys-rep",
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._db is not None:
            self._db.close()

    def columns(self, table: str) -> set[str]:
        """Names of a table's columns; none where there is no such table."""
        if table not in self.names:
            return set()
        with self._answers():
            return {str(row[1]) for row in self._open.execute(f"PRAGMA table_info({table})")}

    def numbers(self, table: str, names: Sequence[str]) -> tuple[Column, ...]:
        """Columns of whole numbers in the order of `start`; missing values are -1."""
        present = self.columns(table)
        if "start" not in present:
            return tuple(np.empty(0, dtype=np.int64) for _ in names)
        chosen = [f'IFNULL("{name}", -1)' if name in present else "-1" for name in names]
        query = f"SELECT {', '.join(chosen)} FROM {table} ORDER BY start"
        rows: list[NDArray[np.int64]] = []
        total = 0
        with self._answers(), closing(self._open.execute(query)) as cursor:
            while part := cursor.fetchmany(65536):
                total += len(part)
                if total > MOST_ROWS:
                    raise UserError(
                        str(self.path),
                        f"holds more than {MOST_ROWS:,} rows of {table}",
                        remedy="profile fewer steps",
                    )
                rows.append(np.array(part, dtype=np.int64))
        whole = np.concatenate(rows) if rows else np.empty((0, len(names)), dtype=np.int64)
        return tuple(whole.T)

    def texts(self, table: str, column: str, own: str | None = None) -> list[str]:
        """Of each row in the order of `start` the string that a column names, or the `own` text."""
        present = self.columns(table)
        if "start" not in present:
            return []
        named = f"s.value, t.{own}" if own in present else "s.value, NULL"
        joined = f"LEFT JOIN {STRINGS} s ON s.id = t.{column}"
        if column not in present:
            joined = f"LEFT JOIN {STRINGS} s ON 0"
        query = f"SELECT {named} FROM {table} t {joined} ORDER BY t.start"
        with self._answers():
            return [str(value or text or "") for value, text in self._open.execute(query)]

    def strings(self) -> dict[int, str]:
        """Names by their number."""
        with self._answers():
            rows = self._open.execute(f"SELECT id, value FROM {STRINGS}")
            return {int(number): str(value) for number, value in rows}

    def values(self, query: str) -> list[tuple[Any, ...]]:
        """Rows of a query over tables that are there."""
        with self._answers():
            return self._open.execute(query).fetchall()

    @property
    def _open(self) -> sqlite3.Connection:
        assert self._db is not None, "it is entered first"
        return self._db

    @contextmanager
    def _answers(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OverflowError, ValueError, TypeError) as error:
            what = f"cannot be read as a report's SQLite file: {error}"
            raise UserError(
                str(self.path), what, remedy="export it again, by nsys export"
            ) from error


NS = 1e-9
ISSUED = "paceline:communication:"
"""How the trainer marks a collective; its axis follows, then the method."""
COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
_MARKED_STEP = re.compile(
    r"^(?:paceline:step|ProfilerStep|train[_ ]step|step|iteration|iter)[ _#:=]*(\d{1,9})", re.I
)
_RANK = re.compile(r"rank[ _-]?(\d{1,9})", re.I)
_PLACE = re.compile(r"_(\d{1,6})_(\d{1,4})$")
PID_STEP = 1 << 24
"""A global thread is its process's number plus its own; what is below belongs to the thread."""


@dataclass(frozen=True)
class StepMark:
    """A range of NVTX, in nanoseconds."""

    begin: int
    end: int
    text: str


@dataclass(frozen=True)
class _Work:
    """Everything that the device did, in the order of its begin."""

    begin: Column
    end: Column
    launched: Column
    """When the program asked for it; its own begin where nothing tells."""
    names: list[str]


def read_timeline(tables: ReportTables, number: int = 0) -> Timeline | None:
    """The rank's timeline; None where the report holds no work of a device or marks no steps.

    `number` is the file's among others, as of `rank_of`.
    """
    work = _device_work(tables)
    marks = _marks(tables)
    steps = _steps(work, marks)
    if not len(work.begin) or not steps:
        return None
    axes = _Ranges([m for m in marks if m.text.startswith(ISSUED)])
    updates = _Ranges([m for m in marks if annotation_label(m.text) == "optimizer"])
    builder = TimelineBuilder()
    issued, updating = axes.at(work.launched), updates.at(work.launched)
    for i, name in enumerate(work.names):
        if is_communication(name):
            text = axes.marks[issued[i]].text if issued[i] >= 0 else ""
            axis = text.removeprefix(ISSUED).partition(":")[0] or "unknown"
            label = COMMUNICATION + axis
        else:
            label = "optimizer" if updating[i] >= 0 else kind_of(name)
        builder.add(name, label, work.begin[i] * NS, work.end[i] * NS)
    data = [(m.begin * NS, m.end * NS) for m in marks if is_data_wait(m.text)]
    waits: Intervals = np.array(sorted(data)) if data else NONE
    return builder.timeline(_rank(tables.path, marks, number), steps, waits)


def _device_work(tables: ReportTables) -> _Work:
    """Kernels, copies and fills of the process that has most of them."""
    strings = tables.strings()
    present = tables.columns(KERNELS)
    named = next((c for c in ("demangledName", "shortName", "mangledName") if c in present), "")
    parts: list[tuple[Column, ...]] = []
    names: list[str] = []
    for table, column in ((KERNELS, named), (COPIES, "copyKind"), (FILLS, "")):
        rows = tables.numbers(table, ["start", "end", "globalPid", "correlationId", column or "x"])
        parts.append(rows[:4])
        if table == KERNELS:
            names += [strings.get(int(number), "unknown") for number in rows[4]]
        elif table == COPIES:
            names += [f"memcpy {COPY_KINDS.get(int(k), 'other')}" for k in rows[4]]
        else:
            names += ["memset"] * len(rows[0])
    begin, end, process, correlation = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    if not len(begin):
        return _Work(begin, end, begin, [])
    processes, counts = np.unique(process, return_counts=True)
    busiest = processes[counts.argmax()]
    mine = np.flatnonzero(process == busiest)
    mine = mine[np.argsort(begin[mine], kind="stable")]
    launched = _launches(tables, int(busiest), correlation[mine], begin[mine])
    return _Work(begin[mine], end[mine], launched, [names[i] for i in mine])


def _launches(tables: ReportTables, process: int, correlation: Column, begin: Column) -> Column:
    """When each was asked for, by the number that a call and its kernel share."""
    start, thread, number = tables.numbers(LAUNCHES, ["start", "globalTid", "correlationId"])
    same = (
        (thread // PID_STEP == process // PID_STEP) if process >= 0 else np.ones(len(start), bool)
    )
    start, number = start[same], number[same]
    if not len(start):
        return begin
    order = np.argsort(number, kind="stable")
    at = np.minimum(np.searchsorted(number[order], correlation), len(order) - 1)
    row = order[at]
    # A launch lies before its kernel; numbers of another process may be the same.
    return np.where((number[row] == correlation) & (start[row] <= begin), start[row], begin)


def _marks(tables: ReportTables) -> list[StepMark]:
    """All ranges, in the order of their begin."""
    begin, end = tables.numbers(MARKS, ["start", "end"])
    texts = tables.texts(MARKS, "textId", own="text")
    return [
        StepMark(int(b), int(e), text)
        for b, e, text in zip(begin, end, texts, strict=True)
        if e > b and text
    ]


def _steps(work: _Work, marks: list[StepMark]) -> list[StepSpan]:
    """Steps on the device: from the first kernel of each to the first one of the next."""
    marked = [(mark, int(m[1])) for mark in marks if (m := _MARKED_STEP.match(mark.text))]
    spans: list[tuple[int, float]] = []
    order = np.argsort(work.launched, kind="stable")
    launched = work.launched[order]
    last = 0.0
    for mark, number in marked:
        first, behind = np.searchsorted(launched, [mark.begin, mark.end])
        if first < behind and not (spans and spans[-1][0] == number):
            rows = order[first:behind]
            spans.append((number, float(work.begin[rows].min())))
            last = float(work.end[rows].max())
    begins = [begin for _, begin in spans]
    ends = [*begins[1:], last][: len(begins)]
    return [
        StepSpan(number, begin * NS, end * NS)
        for (number, begin), end in zip(spans, ends, strict=True)
        if end > begin
    ]


class _Ranges:
    """Ranges that do not overlap, to look up moments in."""

    def __init__(self, marks: list[StepMark]) -> None:
        self.marks = marks
        self._begin = np.array([mark.begin for mark in marks], dtype=np.int64)
        self._end = np.array([mark.end for mark in marks], dtype=np.int64)

    def at(self, moments: Column) -> Column:
        """(n,) the number of the range around each moment, else -1."""
        if not self.marks:
            return np.full(len(moments), -1, dtype=np.int64)
        row = np.searchsorted(self._begin, moments, side="right") - 1
        inside = (row >= 0) & (moments < self._end[np.maximum(row, 0)])
        return np.where(inside, row, -1)


def rank_of(tables: ReportTables, number: int = 0) -> int:
    """By the trainer's marks, else by the file's name, else the file's `number` among others."""
    return _rank(tables.path, _marks(tables), number)


def _rank(path: Path, marks: list[StepMark], number: int) -> int:
    texts = [mark.text for mark in marks if mark.text.startswith("paceline:step")][:1]
    match = next((m for text in (*texts, path.stem) if (m := _RANK.search(text))), None)
    if match is None and (place := _PLACE.search(path.stem)) and place[1] == "0":
        return int(place[2])
    return int(match[1]) if match else number
