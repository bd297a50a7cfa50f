"""Reader of an Nsight Systems report as the timeline of a rank.

The CPU runs ahead of its device: a kernel belongs to the step and to the mark in which it was
launched. On the device, a step starts with the first kernel that it launched.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import UserError, unreadable
from paceline.files.documents import open_database
from paceline.profiles.kernels import annotation_label, is_communication, is_data_wait, kind_of
from paceline.profiles.kineto import COLLECTIVE_MARK
from paceline.profiles.timeline import (
    COMMUNICATION,
    NO_INTERVALS,
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
MAX_ROWS = 4_000_000
MAX_TABLES = 10_000
MAX_CHARS = 1 << 26
"""Maximum length of all texts of a report together."""
Column = NDArray[np.int64]


class ReportTables:
    """Read-only access to a report; raises UserError for other files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._db: sqlite3.Connection | None = None
        self._open_files = ExitStack()
        self._num_chars = 0

    def __enter__(self) -> Self:
        with self._answers():
            self._db = self._open_files.enter_context(open_database(self.path))
            # Only tables: a view could run forever.
            rows = self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            self.names = {str(name) for (name,) in rows.fetchmany(MAX_TABLES)}
        if STRINGS not in self.names:
            self._open_files.close()
            raise UserError(
                str(self.path),
                "is not an Nsight Systems export: it has no table StringIds",
                remedy="nsys export --type sqlite REPORT.nsys-rep",
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._open_files.close()

    def columns(self, table: str) -> set[str]:
        """Return the names of a table's columns; empty without such a table."""
        if table not in self.names:
            return set()
        with self._answers():
            return {str(row[1]) for row in self._open.execute(f"PRAGMA table_info({table})")}

    def numbers(self, table: str, names: Sequence[str]) -> tuple[Column, ...]:
        """Return integer columns ordered by `start`; missing values are -1."""
        present = self.columns(table)
        if "start" not in present:
            return tuple(np.empty(0, dtype=np.int64) for _ in names)
        expressions = [_integer(f'"{name}"') if name in present else "-1" for name in names]
        query = f"SELECT {', '.join(expressions)} FROM {table} ORDER BY start"
        rows: list[NDArray[np.int64]] = []
        total = 0
        with self._answers(), closing(self._open.execute(query)) as cursor:
            while part := cursor.fetchmany(65536):
                total += len(part)
                if total > MAX_ROWS:
                    raise UserError(
                        str(self.path),
                        f"holds more than {MAX_ROWS:,} rows of {table}",
                        remedy="profile fewer steps",
                    )
                rows.append(np.array(part, dtype=np.int64))
        whole = np.concatenate(rows) if rows else np.empty((0, len(names)), dtype=np.int64)
        return tuple(whole.T)

    def texts(self, table: str, column: str, fallback_column: str) -> list[str]:
        """Return each row's string ordered by `start`, or else the fallback column's text."""
        present = self.columns(table)
        if "start" not in present:
            return []
        number = _integer(column) if column in present else "-1"
        text = fallback_column if fallback_column in present else "NULL"
        strings = self.strings
        with self._answers():
            rows = self._open.execute(f"SELECT {number}, {text} FROM {table} ORDER BY start")
            return [strings.get(key) or self._text(text) for key, text in rows]

    @cached_property
    def strings(self) -> dict[int, str]:
        """All strings by their id; the first one of an id that occurs twice."""
        with self._answers():
            rows = self._open.execute(f"SELECT {_integer('id')}, value FROM {STRINGS}")
            strings: dict[int, str] = {}
            for number, value in rows:
                if number not in strings:
                    strings[number] = self._text(value)
            return strings

    def _text(self, value: object) -> str:
        """Return a value as text; raise UserError once all texts together exceed the limit."""
        text = str(value or "")
        self._num_chars += len(text) + 1
        if self._num_chars > MAX_CHARS:
            raise UserError(
                str(self.path),
                f"holds more than {MAX_CHARS:,} characters of names",
                remedy="profile fewer steps",
            )
        return text

    def sums(self, table: str, column: str, where: str) -> list[tuple[str, int, int]]:
        """Return (name, number of rows, total of end - start) for each string of a column."""
        query = (
            f"SELECT {_integer(column)}, COUNT(*), {_integer('SUM(end - start)')} FROM {table} "
            f"WHERE end > start AND {where} GROUP BY 1"
        )
        with self._answers():
            rows = self._open.execute(query)
            return [
                (self.strings[number], calls, ns)
                for number, calls, ns in rows
                if number in self.strings
            ]

    def span_ns(self, table: str) -> int:
        """Return the time from the first start to the last end; 0 without rows."""
        ends = "MAX(CAST(end AS INTEGER)) - MIN(CAST(start AS INTEGER))"
        with self._answers():
            (span,) = self._open.execute(f"SELECT {_integer(ends)} FROM {table}").fetchone()
            return max(int(span), 0)

    @property
    def _open(self) -> sqlite3.Connection:
        assert self._db is not None, "use it as a context manager"
        return self._db

    @contextmanager
    def _answers(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unreadable(str(self.path), error) from error
        except (sqlite3.Error, OverflowError, ValueError, TypeError) as error:
            what = f"cannot be read as a report's SQLite file: {error}"
            raise UserError(
                str(self.path), what, remedy="export it again, by nsys export"
            ) from error


def _integer(expression: str) -> str:
    """Return the SQL of a value as a whole number, -1 if it is missing."""
    return f"IFNULL(CAST({expression} AS INTEGER), -1)"


NS = 1e-9
COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
_MARKED_STEP = re.compile(
    r"^(?:paceline:step|ProfilerStep|train[_ ]step|step|iteration|iter)[ _#:=]*(\d{1,9})", re.I
)
_RANK = re.compile(r"rank[ _-]?(\d{1,9})", re.I)
_PLACE = re.compile(r"_(\d{1,6})_(\d{1,4})$")
PID_STEP = 1 << 24
"""Step between process ids in a global thread id; the lower bits are the thread's."""


@dataclass(frozen=True, slots=True)
class StepMark:
    """An NVTX range in nanoseconds."""

    begin: int
    end: int
    text: str


@dataclass(frozen=True)
class _DeviceWork:
    """Activities of the device, ordered by start."""

    begin: Column
    end: Column
    launch_ns: Column
    """Launch time on the CPU, or the activity's start if unknown."""
    names: list[str]


def read_timeline(tables: ReportTables, number: int = 0) -> Timeline | None:
    """Return the rank's timeline, or None without device activity or step marks.

    `number` is the index of the file, as in `rank_of`.
    """
    work = _device_work(tables)
    marks = _marks(tables)
    steps = _steps(work, marks)
    if not len(work.begin) or not steps:
        return None
    axes = _Ranges([m for m in marks if m.text.startswith(COLLECTIVE_MARK)])
    updates = _Ranges([m for m in marks if annotation_label(m.text) == "optimizer"])
    builder = TimelineBuilder(tables.path)
    axis_mark, optimizer_mark = axes.at(work.launch_ns), updates.at(work.launch_ns)
    for i, name in enumerate(work.names):
        if is_communication(name):
            text = axes.marks[axis_mark[i]].text if axis_mark[i] >= 0 else ""
            axis = text.removeprefix(COLLECTIVE_MARK).partition(":")[0] or "unknown"
            label = COMMUNICATION + axis
        else:
            label = "optimizer" if optimizer_mark[i] >= 0 else kind_of(name)
        builder.add(name, label, work.begin[i] * NS, work.end[i] * NS)
    data = [(m.begin * NS, m.end * NS) for m in marks if is_data_wait(m.text)]
    waits: Intervals = np.array(sorted(data)) if data else NO_INTERVALS
    return builder.timeline(_rank(tables.path, marks, number), steps, waits)


def _device_work(tables: ReportTables) -> _DeviceWork:
    """Return kernels, copies and fills of the process with most of them."""
    strings = tables.strings
    present = tables.columns(KERNELS)
    name_column = next(
        (c for c in ("demangledName", "shortName", "mangledName") if c in present), ""
    )
    parts: list[tuple[Column, ...]] = []
    names: list[str] = []
    for table, column in ((KERNELS, name_column), (COPIES, "copyKind"), (FILLS, "")):
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
        return _DeviceWork(begin, end, begin, [])
    processes, counts = np.unique(process, return_counts=True)
    busiest = processes[counts.argmax()]
    mine = np.flatnonzero(process == busiest)
    mine = mine[np.argsort(begin[mine], kind="stable")]
    launch_ns = _launches(tables, int(busiest), correlation[mine], begin[mine])
    return _DeviceWork(begin[mine], end[mine], launch_ns, [names[i] for i in mine])


def _launches(tables: ReportTables, process: int, correlation: Column, begin: Column) -> Column:
    """Return launch times, matched by the correlation id of call and kernel."""
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
    # A launch precedes its kernel; ids of another process may be equal.
    return np.where((number[row] == correlation) & (start[row] <= begin), start[row], begin)


def _marks(tables: ReportTables) -> list[StepMark]:
    """Return all ranges ordered by start."""
    begin, end = tables.numbers(MARKS, ["start", "end"])
    texts = tables.texts(MARKS, "textId", "text")
    return [
        StepMark(int(b), int(e), text)
        for b, e, text in zip(begin, end, texts, strict=True)
        if e > b and text
    ]


def _steps(work: _DeviceWork, marks: list[StepMark]) -> list[StepSpan]:
    """Return the steps on the device, from the first kernel of each to the first of the next."""
    step_marks = [(mark, int(m[1])) for mark in marks if (m := _MARKED_STEP.match(mark.text))]
    spans: list[tuple[int, float]] = []
    order = np.argsort(work.launch_ns, kind="stable")
    launch_ns = work.launch_ns[order]
    last = 0.0
    for mark, number in step_marks:
        first, behind = np.searchsorted(launch_ns, [mark.begin, mark.end])
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
    """Ranges without overlap, for looking up times."""

    def __init__(self, marks: list[StepMark]) -> None:
        self.marks = marks
        self._begin = np.array([mark.begin for mark in marks], dtype=np.int64)
        self._end = np.array([mark.end for mark in marks], dtype=np.int64)

    def at(self, moments: Column) -> Column:
        """Return the index (n,) of the range around each time, or -1."""
        if not self.marks:
            return np.full(len(moments), -1, dtype=np.int64)
        row = np.searchsorted(self._begin, moments, side="right") - 1
        inside = (row >= 0) & (moments < self._end[np.maximum(row, 0)])
        return np.where(inside, row, -1)


def rank_of(tables: ReportTables, number: int = 0) -> int:
    """Return the rank from the trainer's marks, the file name or, failing both, `number`."""
    return _rank(tables.path, _marks(tables), number)


def _rank(path: Path, marks: list[StepMark], number: int) -> int:
    texts = [mark.text for mark in marks if mark.text.startswith("paceline:step")][:1]
    match = next((m for text in (*texts, path.stem) if (m := _RANK.search(text))), None)
    if match is None and (place := _PLACE.search(path.stem)) and place[1] == "0":
        return int(place[2])
    return int(match[1]) if match else number
