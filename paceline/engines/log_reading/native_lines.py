"""JSON lines of the native trainer: as objects, or directly as columns if all lines look alike."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, nan
from types import NoneType
from typing import Any, TypeGuard, cast

import numpy as np

from paceline.core.steps import FloatColumn, IntColumn
from paceline.core.text import encodable
from paceline.engines.log_reading.log_content import LARGEST, numbers, whole_numbers

Event = dict[str, Any]
Columns = tuple[IntColumn, dict[str, FloatColumn]]
"""Step numbers, and figures by the names of Step."""

COLUMNS = (
    "step_time_s",
    "loss",
    "grad_norm",
    "tokens",
    "samples",
    "global_batch",
    "seq_len",
    "attended_share",
)
"""Columns to read; per-rank busy and waiting times are omitted, as they would double the memory."""

PEAKS = ("allocated", "reserved", "resident", "device_used")
MAX_FAILURES = 4
"""Number of broken objects in a line after which the rest of it is skipped."""

MAX_LEARNED_BYTES = 4096

STEP_LINE = re.compile(rb'\{"(?:event": "step", "step": \d|step": \d{1,18}, "step_time_s": )')

_WHOLE = rb"(?!0\d)\d{1,18}+"
_NUMBER = rb"-?(?!0\d)\d{1,999}+(?:\.\d++)?(?:[eE][-+]?\d++)?|null"
"""JSON number, so that both ways of reading accept the same lines."""

_LINE = re.compile(rb'\{"(?:event|step)": [^\r\n]*')
_OBJECT = re.compile(r'\{"(?:event|step)": ')
_DECODER = json.JSONDecoder(parse_constant=lambda _: inf)


@dataclass
class Faults:
    """Counts of lines that are not complete objects."""

    unread: int = 0
    is_incomplete: bool = False
    """True if the last line is incomplete."""


def lines_of(block: bytes) -> list[bytes]:
    """Return text that looks like a line of the trainer, from its opening brace."""
    return _LINE.findall(block)


def decode_events(lines: list[bytes], faults: Faults, ends_whole: bool) -> list[Event]:
    """Decode the lines' objects, all at once or else one by one; NaN becomes infinity.

    `ends_whole` states whether the last line has a line end.
    """
    try:
        events = _DECODER.decode((b"[" + b",".join(lines) + b"]").decode("utf-8"))
    except (ValueError, RecursionError):
        return list(_one_by_one(lines, faults, ends_whole))
    if all(type(event) is dict for event in events):
        return events
    return list(_one_by_one(lines, faults, ends_whole))


def columns_of(events: list[Event]) -> Columns:
    """Return columns of step events, whose step numbers must be counts."""
    columns = {name: _column([event.get(name) for event in events]) for name in COLUMNS}
    is_tracked = [event.get("tracked") is True for event in events]
    if any(is_tracked):  # Memory profiling distorts the time.
        columns["step_time_s"][is_tracked] = nan
    columns |= {f"{kind}_bytes": _column([_peak(each, kind) for each in events]) for kind in PEAKS}
    return np.array([event["step"] for event in events], dtype=np.int64), columns


def _peak(event: Event, kind: str) -> Any:
    """Return a memory peak; a rank's own line has the peaks in a nested object."""
    if of_one_rank(event):
        return as_object(event.get("memory_bytes")).get(kind)
    return event.get(f"{kind}_bytes")


def of_one_rank(event: Event) -> bool:
    """Return True for a rank's own line, False for a line of a run's merged steps."""
    return "event" in event


def is_count(value: object) -> TypeGuard[int]:
    """Return whether `value` is a whole number of at least 0 that fits in 64 bits."""
    return type(value) is int and 0 <= value < 1 << 62


def as_object(value: object) -> Event:
    """Return `value` if it is a JSON object, else an empty object."""
    return cast("Event", value) if isinstance(value, dict) else {}


@dataclass(frozen=True)
class LineLayout:
    """Format of a step line, learned from one line: several times faster than JSON decoding."""

    pattern: re.Pattern[bytes]
    names: tuple[str, ...]
    of_one_rank: bool

    @classmethod
    def learn(cls, line: bytes) -> LineLayout | None:
        """Return the layout of `line`; None if not a valid step line, too long or skipped."""
        if len(line) > MAX_LEARNED_BYTES:
            return None
        try:
            event = as_object(_DECODER.decode(line.decode("ascii")))
        except (ValueError, RecursionError):
            return None
        names: list[str] = []
        fields = [_field(key, value, names) for key, value in event.items()]
        pattern = re.compile(rb"\{" + b", ".join(fields) + rb"\}(?=[\r\n\x1b])")
        is_step = event.get("event", "step") == "step" and names.count("step") == 1
        is_usual = event.get("skipped") is not True and event.get("tracked") is not True
        if (
            not (is_step and is_usual)
            or len(set(names)) < len(names)
            or not pattern.match(line + b"\n")
        ):
            return None
        return cls(pattern, tuple(names), of_one_rank(event))

    def columns(self, block: bytes) -> Columns | None:
        """Return the steps of a block whose trainer lines all have this layout, else None."""
        matches = self.pattern.findall(block)
        if not matches or len(matches) != block.count(b'{"event"') + block.count(b'{"step"'):
            return None
        if len(self.names) == 1:
            return whole_numbers(matches), {}
        texts = dict(zip(self.names, zip(*matches, strict=True), strict=True))
        index = whole_numbers(texts.pop("step"))
        return index, {name: _numbers(column) for name, column in texts.items()}


def _field(key: str, value: Any, names: list[str], prefix: str = "") -> bytes:
    """Return the pattern of one field; required numbers are groups, their columns go to `names`."""
    begin = re.escape(json.dumps(key).encode("ascii")) + b": "
    if isinstance(value, dict):
        inner = cast("Event", value)
        fields = [_field(name, number, names, f"{key}/") for name, number in inner.items()]
        return begin + rb"\{" + b", ".join(fields) + rb"\}"
    if isinstance(value, bool | str | list):
        return begin + re.escape(json.dumps(value).encode("ascii"))
    column = f"{key}_bytes" if prefix == "memory_bytes/" else prefix + key
    if column == "step":
        names.append(column)
        return begin + b"(" + _WHOLE + b")"
    if column in COLUMNS or column.removesuffix("_bytes") in PEAKS:
        names.append(column)
        return begin + b"(" + _NUMBER + b")"
    return begin + b"(?:" + _NUMBER + b")"


def _one_by_one(lines: list[bytes], faults: Faults, ends_whole: bool) -> Iterator[Event]:
    """Yield the objects of each line; several ranks may have written to a line at once."""
    for number, line in enumerate(lines, 1):
        text, at, failures = line.decode("utf-8", "replace"), 0, 0
        while failures < MAX_FAILURES and (start := _OBJECT.search(text, at)):
            try:
                event, at = _DECODER.raw_decode(text, start.start())
                yield encodable(event, text)
            except (ValueError, RecursionError):
                at, failures = start.end(), failures + 1
        if failures and (ends_whole or number < len(lines)):
            faults.unread += 1
        elif failures:
            faults.is_incomplete = True


def _numbers(texts: Sequence[bytes]) -> FloatColumn:
    if texts.count(texts[0]) == len(texts):
        return np.broadcast_to(numbers(texts[:1]), len(texts))
    return numbers(texts)


def _column(values: list[Any]) -> FloatColumn:
    """Return numbers; NaN for null and for values that are not numbers, infinity beyond 1e100."""
    if not set(map(type, values)) <= {int, float, NoneType}:
        values = [_sound(value) for value in values]
    try:
        column = np.array(values, dtype=np.float64)
    except OverflowError:
        column = np.array([_sound(value) for value in values], dtype=np.float64)
    column[np.abs(column) > LARGEST] = inf
    return column


def _sound(value: Any) -> float | None:
    if type(value) is int:
        return float(value) if abs(value) < LARGEST else inf
    return value if type(value) is float else None
