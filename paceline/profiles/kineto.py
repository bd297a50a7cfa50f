"""Reader of PyTorch profiler traces (Kineto) of GPUs or of a CPU.

For a GPU's trace only kernels count, not operations of the CPU. The format is that of
`torch.profiler.profile.export_chrome_trace`; times are in microseconds.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from paceline.core.errors import UserError
from paceline.core.text import encodable
from paceline.files.documents import open_expanded
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
    MAX_NAME_CHARS,
    NO_INTERVALS,
    Intervals,
    StepSpan,
    Timeline,
    TimelineBuilder,
    intervals,
)

GLOO_PREFIX = "gloo:"
"""Prefix of the names of gloo's transfers."""
COLLECTIVE_MARK = "paceline:communication:"
"""Prefix of the trainer's marks of collectives; axis and method follow."""
UNKNOWN = "unknown"
_FAMILY = re.compile(r"reduce|gather|broadcast|scatter|to_?all|send|recv|barrier")


class TracedCall(NamedTuple):
    """A named interval in seconds."""

    begin_s: float
    end_s: float
    name: str


def with_axes(
    transfers: Sequence[TracedCall], calls_with_axis: Sequence[TracedCall]
) -> Iterator[tuple[TracedCall, str]]:
    """Yield each transfer with its axis, or `unknown` if it matches no call.

    A transfer belongs to the call that encloses it, or else to the next unmatched call of the same
    family of collectives.
    """
    calls: dict[str, list[TracedCall]] = defaultdict(list)
    for call in sorted(calls_with_axis):
        calls[_family(call.name)].append(call)
    transfers_by_family: dict[str, list[TracedCall]] = defaultdict(list)
    for work in sorted(transfers):
        transfers_by_family[_family(work.name)].append(work)
    for family, works in transfers_by_family.items():
        waiting = _PendingCalls(calls[family])
        inside = [waiting.match_enclosing(work) for work in works]
        for work, call in zip(works, inside, strict=True):
            call = call or waiting.match_earlier(work)
            yield (
                work,
                call.name.removeprefix(COLLECTIVE_MARK).partition(":")[0] if call else UNKNOWN,
            )


class _PendingCalls:
    """Calls of one family of collectives, each of which is matched once."""

    def __init__(self, calls: list[TracedCall]) -> None:
        self.calls, self.is_matched = calls, [False] * len(calls)
        self.first = self.open = 0

    def match_enclosing(self, work: TracedCall) -> TracedCall | None:
        """Return and mark the call that encloses a transfer; transfers must be ordered by time."""
        while self.first < len(self.calls) and self.calls[self.first].end_s < work.begin_s:
            self.first += 1
        at = self.first
        if at == len(self.calls) or self.is_matched[at]:
            return None
        call = self.calls[at]
        if call.begin_s <= work.begin_s and work.end_s <= call.end_s:
            self.is_matched[at] = True
            return call
        return None

    def match_earlier(self, work: TracedCall) -> TracedCall | None:
        """Return and mark the first unmatched call that started before a transfer."""
        while self.open < len(self.calls) and self.is_matched[self.open]:
            self.open += 1
        at = self.open
        if at == len(self.calls) or self.calls[at].begin_s > work.begin_s:
            return None
        self.is_matched[at] = True
        return self.calls[at]


def _family(name: str) -> str:
    match = _FAMILY.search(name.rpartition(":")[2])
    return match[0] if match else ""


EVENTS = "traceEvents"
CHUNK = 1 << 20
"""Number of characters per read."""
MAX_VALUE_CHARS = 1 << 22
"""Maximum length of a field or an event in characters."""
MAX_BLANKS = 1 << 20
"""Maximum number of blanks in a row."""
FIELDS = ("distributedInfo", "paceline")
"""Used fields of a trace, in addition to its events."""
_BLANKS = re.compile(r"[ \t\r\n]*")

Event = dict[str, Any]


class TraceFile:
    """A trace file that is read once: iterate over its events, then use its other `fields`.

    Raises UserError for a file that cannot be read, is not a trace or is truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fields: dict[str, Any] = {}
        self.num_events = 0
        self._text, self._at = "", 0
        self._num_blanks = 0
        self._decoder = json.JSONDecoder()

    def __iter__(self) -> Iterator[Event]:
        try:
            with TextIOWrapper(open_expanded(self.path), encoding="utf-8") as self._source:
                yield from self._document()
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise self._corrupt_error(f"its compression is broken: {error}") from error
        except UnicodeDecodeError as error:
            raise UserError(str(self.path), "is not JSON: it is not UTF-8") from error
        except OSError as error:
            what = f"cannot be read: {error.strerror or error}"
            raise UserError(str(self.path), what) from error

    def _document(self) -> Iterator[Event]:
        first = self._next()
        if first == "[":
            yield from self._events()
            return
        if first != "{":
            raise UserError(str(self.path), "is not a trace: it holds no JSON object or list")
        while (mark := self._next()) != "}":
            if mark == ",":
                continue
            self._at -= 1
            name = self._value()
            if not isinstance(name, str) or self._next() != ":":
                raise self._corrupt_error("an object's field has no name")
            if name == EVENTS:
                if self._next() != "[":
                    raise UserError(str(self.path), f"is not a trace: {EVENTS} is not a list")
                yield from self._events()
            else:
                value = self._value()
                if name in FIELDS:
                    self.fields[name] = value

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
        """Consume and return the next character that is not a blank."""
        while True:
            blanks = cast(re.Match[str], _BLANKS.match(self._text, self._at))
            self._at = at = blanks.end()
            self._num_blanks += at - blanks.start()
            if self._num_blanks > MAX_BLANKS:
                raise self._corrupt_error(f"it holds {MAX_BLANKS:,} blanks")
            if at < len(self._text):
                self._at, self._num_blanks = at + 1, 0
                return self._text[at]
            if not self._more():
                if not self._text:
                    raise UserError(str(self.path), "is empty", allowed="a trace in JSON")
                raise self._corrupt_error("it ends in the middle")

    def _value(self) -> Any:
        """Consume and return the next JSON value, reading on until it is complete."""
        self._next()
        self._at -= 1
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except ValueError as error:
                # More text does not repair a value that is complete and wrong.
                if len(self._text) - self._at > MAX_VALUE_CHARS or not self._more():
                    raise self._corrupt_error(f"{error}") from error
            except RecursionError as error:
                raise self._corrupt_error("is nested too deeply") from error
            else:
                # A number may continue beyond the text that was read.
                if end < len(self._text) or not self._more():
                    text = self._text[self._at : end]
                    self._at = end
                    return encodable(value, text)

    def _more(self) -> bool:
        """Read more text; return False at the end of the file."""
        chunk = self._source.read(max(CHUNK, len(self._text) - self._at))
        if chunk:
            self._text, self._at = self._text[self._at :] + chunk, 0
        return bool(chunk)

    def _corrupt_error(self, why: str) -> UserError:
        return UserError(
            str(self.path),
            f"is not a complete trace: after event {self.num_events:,} {why}",
            remedy="profile fewer steps, or copy the file again",
        )


MAX_EVENTS = 4_000_000
"""Maximum number of events in memory, 24 bytes each."""
DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_STEP = re.compile(r"ProfilerStep#(\d{1,15})(?!\d)")
_RANK = re.compile(r"rank[-_]?(\d{1,9})(?!\d)")
MAX_RANK = 10**9 - 1
MAX_THREAD_CHARS = 200
MAX_TIME_US = 1e18
"""Maximum timestamp in microseconds, about 1,000 times today's Unix time."""
WORLD_GROUP = "default_pg"
"""PyTorch's name of the group of all ranks."""


def read_timeline(path: Path) -> Timeline:
    """Return the timeline of a trace; raises UserError if it is incomplete or has no steps."""
    trace = TraceFile(path)
    reading = _TraceReader(trace)
    for event in trace:
        reading.read_event(event)
    return reading.timeline()


class _TraceReader:
    """State while reading a trace."""

    def __init__(self, trace: TraceFile) -> None:
        self.trace = trace
        self.device = TimelineBuilder(trace.path)
        self.steps: dict[int, tuple[float, float]] = {}
        self.device_steps: dict[int, tuple[float, float]] = {}
        self.data: list[tuple[float, float]] = []
        self.optimizer: list[tuple[float, float]] = []
        self.names: dict[str, int] = {}
        self.marked: set[str] = set()
        """Names of the program's own annotations."""
        self.threads: dict[object, Calls] = {}
        self.sent: list[TracedCall] = []
        self.issued: list[TracedCall] = []
        """Transfers of gloo, and the program's calls of collectives."""
        self.num_kept = self.name_chars = 0
        self._groups = _ProcessGroups({})

    def read_event(self, event: Event) -> None:
        """Add one event of any kind."""
        category = event.get("cat")
        if event.get("ph") != "X" or not isinstance(category, str):
            return
        name, begin, length = event.get("name"), _number(event, "ts"), _number(event, "dur")
        if not isinstance(name, str) or begin is None or length is None:
            return
        begin_s, end_s = begin / 1e6, (begin + max(length, 0)) / 1e6
        if category in DEVICE_CATEGORIES:
            self._count_event()
            self.threads.clear()  # a device computes, so CPU operations do not count
            label = self._communication(event) if is_communication(name) else kind_of(name)
            self.device.add(name, label, begin_s, end_s)
        elif category == "gpu_user_annotation":
            self._count_event()
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
        if name.startswith(COLLECTIVE_MARK):
            self._count_event(name)
            self.issued.append(TracedCall(begin_s, end_s, name))
        elif name.startswith(GLOO_PREFIX):
            self._count_event(name)
            self.sent.append(TracedCall(begin_s, end_s, name))
        elif not len(self.device):
            self.marked.add(name)
            self._call(event, name, begin_s, end_s)
        else:
            self._count_event()

    def _call(self, event: Event, name: str, begin_s: float, end_s: float) -> None:
        self._count_event(name)
        thread = str((event.get("pid"), event.get("tid")))[:MAX_THREAD_CHARS]
        number = self.names.setdefault(name, len(self.names))
        self.threads.setdefault(thread, Calls()).add(number, begin_s, end_s)

    def _count_event(self, name: str = "") -> None:
        self.num_kept += 1
        # A name of the CPU is stored when it is new, or with a transfer.
        self.name_chars += 0 if name in self.names else len(name)
        if self.num_kept > MAX_EVENTS or self.name_chars > MAX_NAME_CHARS:
            raise UserError(
                str(self.trace.path),
                f"holds more than {MAX_EVENTS:,} kernels or operations",
                remedy="profile fewer steps",
            )

    def _mark(
        self, steps: dict[int, tuple[float, float]], name: str, begin_s: float, end_s: float
    ) -> None:
        """Record the start and end of a step; the outermost ones if several streams have it."""
        if match := _STEP.match(name):
            number = int(match[1])
            before = steps.get(number, (begin_s, end_s))
            steps[number] = min(begin_s, before[0]), max(end_s, before[1])

    def _communication(self, event: Event) -> str:
        arguments = event.get("args")
        arguments = arguments if isinstance(arguments, dict) else {}
        description = str(arguments.get("Process Group Description", ""))
        group_name = str(arguments.get("Process Group Name", ""))
        fields = self.trace.fields
        if self._groups.num_fields != len(fields):
            self._groups = _ProcessGroups(fields)
        if (axis := self._groups.axes.get(group_name)) is not None:
            return COMMUNICATION + axis
        description = (
            self._groups.descriptions.get(group_name, description) if group_name else description
        )
        return COMMUNICATION + ("world" if description == WORLD_GROUP else axis_of(description))

    def timeline(self) -> Timeline:
        """Return the timeline after all events were read."""
        steps = self._spans()
        if not steps:
            raise UserError(
                str(self.trace.path),
                "has no step marks (ProfilerStep#N), so steps cannot be analysed",
                remedy="call `profiler.step()` at the end of every training step",
            )
        data = np.array(self.data) if self.data else NO_INTERVALS
        if not len(self.device):
            self._add_cpu_activities()
        timeline = self.device.timeline(self._rank(), steps, data)
        return _with_optimizer(timeline, self.optimizer)

    def _spans(self) -> list[StepSpan]:
        """Return the steps, each ending where the next one starts.

        The marks on the device count if there are any, because the CPU runs ahead of its device. A
        mark on the device covers only the kernels that the marking thread launches, which excludes
        the backward pass. So the last step lasts at least as long as on the CPU.
        """
        marks = self.device_steps if self.device_steps else self.steps
        by_time = sorted(marks.items(), key=lambda item: item[1])
        begins = [begin for _, (begin, _) in by_time]
        ends = begins[1:]
        if by_time:
            number, (begin, end) = by_time[-1]
            cpu_begin, cpu_end = self.steps.get(number, (begin, end))
            ends.append(max(end, begin + cpu_end - cpu_begin))
        return [
            StepSpan(number, begin, end)
            for (number, _), begin, end in zip(by_time, begins, ends, strict=True)
            if end > begin
        ]

    def _add_cpu_activities(self) -> None:
        """Add the self time of all CPU operations, and the transfers of gloo's threads."""
        names = list(self.names)
        inside = [annotation_label(name) for name in names]
        labels = [None if name in self.marked else operation_label(name) for name in names]
        for calls in self.threads.values():
            for name, label, begin_s, end_s in calls.self_times(names, inside, labels):
                self.device.add(name, label, begin_s, end_s)
        self.threads.clear()
        for work, axis in with_axes(self.sent, self.issued):
            self.device.add(work.name, COMMUNICATION + axis, work.begin_s, work.end_s)

    def _rank(self) -> int:
        info = self.trace.fields.get("distributedInfo")
        rank = info.get("rank") if isinstance(info, dict) else None
        if isinstance(rank, int) and 0 <= rank <= MAX_RANK:
            return rank
        match = _RANK.search(self.trace.path.name)
        return int(match[1]) if match else 0


class _ProcessGroups:
    """Axis and description of each process group, by name."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.num_fields = len(fields)
        self.axes, self.descriptions = _axes(fields), _groups(fields)


def _axes(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the axis of each process group by name, as written by the native trainer."""
    metadata = fields.get("paceline")
    axes = metadata.get("axes") if isinstance(metadata, dict) else None
    return {str(k): str(v) for k, v in axes.items()} if isinstance(axes, dict) else {}


def _groups(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the description of each process group by name."""
    info = fields.get("distributedInfo")
    groups = info.get("pg_config") if isinstance(info, dict) else None
    rows = [row for row in groups if isinstance(row, dict)] if isinstance(groups, list) else []
    return {str(row.get("pg_name")): str(row.get("pg_desc", "")) for row in rows}


def _with_optimizer(timeline: Timeline, ranges: list[tuple[float, float]]) -> Timeline:
    """Return the timeline with all computation during an optimizer step labelled as optimizer."""
    if not ranges:
        return timeline
    spans: Intervals = intervals(*zip(*sorted(ranges), strict=True))
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
    return float(value) if numeric and abs(value) < MAX_TIME_US else None
