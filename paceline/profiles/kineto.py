"""Traces of PyTorch's profiler (Kineto) as timelines, of GPUs or of a CPU.

Of a GPU's trace the kernels count, and operations of the CPU are passed over. Interface:
`torch.profiler.profile.export_chrome_trace`; times are microseconds.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from paceline.core.errors import UserError
from paceline.files.documents import open_regular
from paceline.profiles.kernels import (
    Calls,
    annotation_label,
    axis_of,
    is_communication,
    is_data_wait,
    kind_of,
    operation_label,
)
from paceline.profiles.timeline import (
    COMMUNICATION,
    NONE,
    Intervals,
    StepSpan,
    Timeline,
    TimelineBuilder,
    intervals,
)

SENT = "gloo:"
"""Begin of the names of what its threads do."""
ISSUED = "paceline:communication:"
"""Begin of the marks, behind which axis and method stand."""
UNKNOWN = "unknown"
_FAMILY = re.compile(r"reduce|gather|broadcast|scatter|to_?all|send|recv|barrier")


class TracedCall(NamedTuple):
    """A named stretch of time in seconds."""

    begin_s: float
    end_s: float
    name: str


def with_axes(
    sent: Sequence[TracedCall], issued: Sequence[TracedCall]
) -> Iterator[tuple[TracedCall, str]]:
    """What was sent with its axis, `unknown` where no call is left for it.

    It belongs to the call that it lies in; else to the next one of its family that has none.
    """
    calls: dict[str, list[TracedCall]] = defaultdict(list)
    for call in sorted(issued):
        calls[_family(call.name)].append(call)
    queued: dict[str, list[TracedCall]] = defaultdict(list)
    for work in sorted(sent):
        queued[_family(work.name)].append(work)
    for family, works in queued.items():
        waiting = _Calls(calls[family])
        inside = [waiting.around(work) for work in works]
        for work, call in zip(works, inside, strict=True):
            call = call or waiting.next(work)
            yield work, call.name.removeprefix(ISSUED).partition(":")[0] if call else UNKNOWN


class _Calls:
    """Calls of one family, each of which is taken once."""

    def __init__(self, calls: list[TracedCall]) -> None:
        self.calls, self.taken = calls, [False] * len(calls)
        self.first = 0

    def around(self, work: TracedCall) -> TracedCall | None:
        """The call in which a work lies, which is then taken; works are asked for in order."""
        while self.first < len(self.calls) and self.calls[self.first].end_s < work.begin_s:
            self.first += 1
        at = self.first
        if at == len(self.calls) or self.taken[at]:
            return None
        call = self.calls[at]
        if call.begin_s <= work.begin_s and work.end_s <= call.end_s:
            self.taken[at] = True
            return call
        return None

    def next(self, work: TracedCall) -> TracedCall | None:
        """The first call that is not taken and was issued before a work began."""
        if all(self.taken):
            return None
        at = self.taken.index(False)
        if self.calls[at].begin_s > work.begin_s:
            return None
        self.taken[at] = True
        return self.calls[at]


def _family(name: str) -> str:
    match = _FAMILY.search(name.rpartition(":")[2])
    return match[0] if match else ""


EVENTS = "traceEvents"
CHUNK = 1 << 20
"""Characters that are read at once."""
LARGEST_VALUE = 1 << 26
"""Characters of a field, or of an event: what is longer is no trace."""
_BLANK = " \t\r\n"
_GZIP = b"\x1f\x8b"

Event = dict[str, Any]


class TraceFile:
    """A trace that is read once: iterate over its events, then look at its other `fields`.

    Raises UserError for what cannot be read or is no trace, and for a torn one with the event at
    which it ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fields: dict[str, Any] = {}
        self.num_events = 0
        self._text, self._at = "", 0
        self._decoder = json.JSONDecoder()

    def __iter__(self) -> Iterator[Event]:
        try:
            with open_regular(self.path) as raw, _decompressed(raw) as self._source:
                yield from self._document()
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise self._torn(f"its compression is broken: {error}") from error
        except UnicodeDecodeError as error:
            raise UserError(str(self.path), "is no JSON: it is not UTF-8") from error
        except OSError as error:
            what = f"cannot be read: {error.strerror or error}"
            raise UserError(str(self.path), what) from error

    def _document(self) -> Iterator[Event]:
        first = self._next()
        if first == "[":
            yield from self._events()
            return
        if first != "{":
            raise UserError(str(self.path), "is no trace: it holds no JSON object or list")
        while (mark := self._next()) != "}":
            if mark == ",":
                continue
            self._at -= 1
            name = self._value()
            if not isinstance(name, str) or self._next() != ":":
                raise self._torn("an object's field has no name")
            if name == EVENTS:
                if self._next() != "[":
                    raise UserError(str(self.path), f"is no trace: its {EVENTS} are no list")
                yield from self._events()
            else:
                self.fields[name] = self._value()

    def _events(self) -> Iterator[Event]:
        while (mark := self._next()) != "]":
            if mark == ",":
                continue
            self._at -= 1
            event = self._value()
            self.num_events += 1
            if isinstance(event, dict):
                yield cast(Event, event)

    def _next(self) -> str:
        """The next character that is no blank, which is then behind us."""
        while True:
            text, at = self._text, self._at
            while at < len(text) and text[at] in _BLANK:
                at += 1
            self._at = at
            if at < len(text):
                self._at = at + 1
                return text[at]
            if not self._more():
                if not self._text:
                    raise UserError(str(self.path), "is empty", allowed="a trace in JSON")
                raise self._torn("it ends in the middle")

    def _value(self) -> Any:
        """The JSON value that begins here, once all of it is there."""
        self._next()
        self._at -= 1
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except ValueError as error:
                # Of a whole value that is wrong no more text makes a right one.
                if len(self._text) - self._at > LARGEST_VALUE or not self._more():
                    raise self._torn(f"{error}") from error
            except RecursionError as error:
                raise self._torn("is nested too deeply") from error
            else:
                # A number may go on where the text that was read ends.
                if end < len(self._text) or not self._more():
                    self._at = end
                    return value

    def _more(self) -> bool:
        """Read on; False at the end of the file."""
        chunk = self._source.read(max(CHUNK, len(self._text) - self._at))
        if chunk:
            self._text, self._at = self._text[self._at :] + chunk, 0
        return bool(chunk)

    def _torn(self, why: str) -> UserError:
        return UserError(
            str(self.path),
            f"is no whole trace: behind event {self.num_events:,} {why}",
            remedy="profile fewer steps, or copy the file again",
        )


def _decompressed(raw: BinaryIO) -> io.TextIOWrapper:
    """The text of a file, which may be compressed by gzip whatever it is called."""
    packed = raw.read(2) == _GZIP
    raw.seek(0)
    content = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
    return io.TextIOWrapper(content, encoding="utf-8")


MOST_EVENTS = 20_000_000
"""Kept of one trace, 24 bytes each."""
DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_STEP = re.compile(r"ProfilerStep#(\d+)")
_RANK = re.compile(r"rank[-_]?(\d+)")
LARGEST_US = 1e18
"""Of a moment; the clock of Unix is a thousandth of it."""
WORLD_GROUP = "default_pg"
"""What PyTorch calls the group of all ranks."""


def read_timeline(path: Path) -> Timeline:
    """The timeline of one rank's trace; raises UserError where it is torn or marks no steps."""
    trace = TraceFile(path)
    reading = _Reading(trace)
    for event in trace:
        reading.take(event)
    return reading.timeline()


class _Reading:
    """What has been read so far."""

    def __init__(self, trace: TraceFile) -> None:
        self.trace = trace
        self.device = TimelineBuilder()
        self.steps: dict[int, tuple[float, float]] = {}
        self.device_steps: dict[int, tuple[float, float]] = {}
        self.data: list[tuple[float, float]] = []
        self.optimizer: list[tuple[float, float]] = []
        self.names: dict[str, int] = {}
        self.marked: set[str] = set()
        """Those that a program gave to stretches of its own."""
        self.threads: dict[object, Calls] = {}
        self.sent: list[TracedCall] = []
        self.issued: list[TracedCall] = []
        """Collectives of gloo, and where the program asked for one."""
        self.kept = 0

    def take(self, event: Event) -> None:
        """One event of any kind."""
        category = event.get("cat")
        if event.get("ph") != "X" or not isinstance(category, str):
            return
        name, begin, length = event.get("name"), _number(event, "ts"), _number(event, "dur")
        if not isinstance(name, str) or begin is None or length is None:
            return
        begin_s, end_s = begin / 1e6, (begin + max(length, 0)) / 1e6
        if category in DEVICE_CATEGORIES:
            self._keep()
            self.threads.clear()  # a device computes
            label = self._communication(event) if is_communication(name) else kind_of(name)
            self.device.add(name, label, begin_s, end_s)
        elif category == "gpu_user_annotation":
            self._mark(self.device_steps, name, begin_s, end_s)
            if annotation_label(name) == "optimizer":
                self.optimizer.append((begin_s, end_s))
        elif category == "user_annotation":
            self._annotation(event, name, begin_s, end_s)
        elif category == "cpu_op" and not len(self.device):
            self._call(event, name, begin_s, end_s)

    def _annotation(self, event: Event, name: str, begin_s: float, end_s: float) -> None:
        self._mark(self.steps, name, begin_s, end_s)
        if is_data_wait(name):
            self.data.append((begin_s, end_s))
        if name.startswith(ISSUED):
            self.issued.append(TracedCall(begin_s, end_s, name))
        elif name.startswith(SENT):
            self.sent.append(TracedCall(begin_s, end_s, name))
        elif not len(self.device):
            self.marked.add(name)
            self._call(event, name, begin_s, end_s)

    def _call(self, event: Event, name: str, begin_s: float, end_s: float) -> None:
        self._keep()
        thread = (event.get("pid"), event.get("tid"))
        number = self.names.setdefault(name, len(self.names))
        self.threads.setdefault(str(thread), Calls()).add(number, begin_s, end_s)

    def _keep(self) -> None:
        self.kept += 1
        if self.kept > MOST_EVENTS:
            raise UserError(
                str(self.trace.path),
                f"holds more than {MOST_EVENTS:,} kernels or operations",
                remedy="profile fewer steps",
            )

    def _mark(
        self, steps: dict[int, tuple[float, float]], name: str, begin_s: float, end_s: float
    ) -> None:
        """A step's edges; of one that several streams have, the outermost."""
        if match := _STEP.match(name):
            number = int(match[1])
            before = steps.get(number, (begin_s, end_s))
            steps[number] = min(begin_s, before[0]), max(end_s, before[1])

    def _communication(self, event: Event) -> str:
        arguments = event.get("args")
        arguments = arguments if isinstance(arguments, dict) else {}
        described = str(arguments.get("Process Group Description", ""))
        named = str(arguments.get("Process Group Name", ""))
        if (axis := _axes(self.trace.fields).get(named)) is not None:
            return COMMUNICATION + axis
        described = _groups(self.trace.fields).get(named, described) if named else described
        return COMMUNICATION + ("world" if described == WORLD_GROUP else axis_of(described))

    def timeline(self) -> Timeline:
        """All of it, once the file is at its end."""
        steps = self._spans()
        if not steps:
            raise UserError(
                str(self.trace.path),
                "marks no steps (ProfilerStep#N), so no step can be taken apart",
                remedy="call `profiler.step()` at the end of every training step",
            )
        data = np.array(self.data) if self.data else NONE
        if not len(self.device):
            self._take_calls()
        timeline = self.device.timeline(self._rank(), steps, data)
        return _with_optimizer(timeline, self.optimizer)

    def _spans(self) -> list[StepSpan]:
        """The steps, the begin of each the end of the one before it, by the device's clock if it
        has one: a program runs ahead of its device."""
        marks = self.device_steps if self.device_steps else self.steps
        ordered = sorted(marks.items(), key=lambda item: item[1])
        begins = [begin for _, (begin, _) in ordered]
        ends = [*begins[1:], ordered[-1][1][1]] if ordered else []
        return [
            StepSpan(number, begin, end)
            for (number, _), begin, end in zip(ordered, begins, ends, strict=True)
            if end > begin
        ]

    def _take_calls(self) -> None:
        """Of a CPU: the own time of all operations, and what gloo's threads sent meanwhile."""
        names = list(self.names)
        inside = [annotation_label(name) for name in names]
        labels = [None if name in self.marked else operation_label(name) for name in names]
        for calls in self.threads.values():
            for name, label, begin_s, end_s in calls.own_time(names, inside, labels):
                self.device.add(name, label, begin_s, end_s)
        self.threads.clear()
        for work, axis in with_axes(self.sent, self.issued):
            self.device.add(work.name, COMMUNICATION + axis, work.begin_s, work.end_s)

    def _rank(self) -> int:
        info = self.trace.fields.get("distributedInfo")
        rank = info.get("rank") if isinstance(info, dict) else None
        if isinstance(rank, int) and rank >= 0:
            return rank
        match = _RANK.search(self.trace.path.name)
        return int(match[1]) if match else 0


def _axes(fields: Mapping[str, Any]) -> dict[str, str]:
    """The axes of process groups by the groups' names, as the native trainer writes them."""
    metadata = fields.get("paceline")
    axes = metadata.get("axes") if isinstance(metadata, dict) else None
    return {str(k): str(v) for k, v in axes.items()} if isinstance(axes, dict) else {}


def _groups(fields: Mapping[str, Any]) -> dict[str, str]:
    """The descriptions of the process groups by their names."""
    info = fields.get("distributedInfo")
    groups = info.get("pg_config") if isinstance(info, dict) else None
    rows = [row for row in groups if isinstance(row, dict)] if isinstance(groups, list) else []
    return {str(row.get("pg_name")): str(row.get("pg_desc", "")) for row in rows}


def _with_optimizer(timeline: Timeline, marked: list[tuple[float, float]]) -> Timeline:
    """The timeline in which what a device computes in an optimizer's step belongs to that."""
    if not marked:
        return timeline
    spans: Intervals = intervals(*zip(*sorted(marked), strict=True))
    more = () if "optimizer" in timeline.labels else ("optimizer",)
    labels = (*timeline.labels, *more)
    middles = timeline.spans.mean(axis=1)
    at = np.searchsorted(spans[:, 0], middles, side="right") - 1
    inside = (at >= 0) & (middles < np.maximum.accumulate(spans[:, 1])[np.maximum(at, 0)])
    computes = np.array([not label.startswith(COMMUNICATION) for label in labels])
    number = labels.index("optimizer")
    label_of = np.where(inside & computes[timeline.label_of], number, timeline.label_of)
    return replace(timeline, labels=labels, label_of=label_of.astype(np.int32))


def _number(event: Event, name: str) -> float | None:
    value = event.get(name, 0)
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if numeric and abs(value) < LARGEST_US else None
