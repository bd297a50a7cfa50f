"""Megatron-family iteration records as text: `iteration 5/ 100 | name: value | ... |`.

Every version and fork prints different fields in a different order, so the order is learned from
the log. One regular expression with all known fields, each optional, then reads a block at once.

A terminal, a pager or an editor may have wrapped a record over several lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

MAX_LINES = 32
"""Maximum number of lines per record."""

KNOWN = (
    b"consumed samples",
    b"consumed tokens",
    b"skipped samples",
    b"elapsed time per iteration (ms)",
    b"elapsed time per iteration (s)",
    b"throughput per GPU (TFLOP/s/GPU)",
    b"tokens/sec/gpu",
    b"eta",
    b"energy per GPU (J/iter/GPU)",
    b"power per GPU (W/GPU)",
    b"iteration time",
    b"learning rate",
    b"global batch size",
    b"lm loss",
    b"lm-loss",
    b"loss scale",
    b"grad norm",
    b"num zeros",
    b"params norm",
    b"curriculum seqlen",
    b"actual seqlen",
    b"number of skipped iterations",
    b"number of nan iterations",
    b"samples per second",
    b"tokens per gpu per second (tgs)",
    b"TFLOPs",
)
"""Field names that identify a line as the continuation of the previous line's record."""

_INTRUDER = re.compile(
    rb"Step Time : [0-9.]{1,24}s GPU utilization: [0-9.]{1,24} ?[A-Z_]{0,8}FLOP/s/GPU"
)
"""Output of another rank at the same time, sometimes in the middle of a record."""

_PREFIX = re.compile(rb"(?:\[[\w.:/-]{1,64}\]:?|\d{1,6}:) ?")

_SPLIT_FIELD = re.compile(rb" {0,24}[A-Za-z][^|:]{1,60}: {0,24}[-+0-9][^|]{0,60}\|")
"""Field of any name that the previous line's end splits."""


class Wrapping:
    """Continuation lines of one log.

    `record` matches the start of a record; `fields` are the known fields of this log, in order.
    """

    def __init__(self, record: re.Pattern[bytes], fields: Sequence[bytes]) -> None:
        self._names = (*KNOWN, *fields)
        names = b"|".join(map(re.escape, self._names))
        self._field = re.compile(rb" {0,24}(" + names + rb"):[^|]{0,100}+(?:\||$)")
        patterns = [rb" {0,4}" + re.escape(name) + rb":[^|]{0,100}+\|" for name in fields]
        end = patterns[-1] if fields else rb"(?!)"
        # Each field at most once, in order, with the last one at the end.
        body = b"".join(b"(?:" + field + b")?+" for field in patterns[:-1])
        self._whole = re.compile(record.pattern + body + end)

    def join(self, lines: bytes, is_last: bool) -> bytes | None:
        """Return the record at the start of `lines` on one line; None if no line continues it.

        `lines` end at the next record, or at the end of the text for the last record.
        """
        if b"\r" in lines:
            lines = lines.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        pure = _INTRUDER.sub(b"", lines)
        record, *others = pure.split(b"\n", MAX_LINES)
        # Text after the last line end is the start of the next record's line.
        others = others if is_last else others[:-1]
        for space in (b"", b" ") if others else ():
            text = space.join([record, *others])
            if self._whole.match(text):
                return text
        longer = self._join_line_by_line(record, others)
        return longer if longer != record or len(pure) < len(lines) else None

    def _join_line_by_line(self, record: bytes, lines: list[bytes]) -> bytes:
        for line in lines:
            longer = self._continue(record, line)
            if longer is None:
                break
            record = longer
        return record

    def _continue(self, record: bytes, line: bytes) -> bytes | None:
        """Return `record` with `line` appended if that completes a field, else None."""
        line = line.strip(b" \t")
        if prefix := _PREFIX.match(line):
            line = line[prefix.end() :]
        bar = record.rfind(b"|") + 1
        partial = record[bar:].strip()
        for space in (b"", b" ") if line else ():
            text = record[bar:] + space + line
            field = self._field.match(text)
            if field and b" " + field[1] + b":" in record[:bar]:
                return None
            if field or self._begins_name(text.strip()):
                return record[:bar] + text
        if partial and line and _SPLIT_FIELD.match(record[bar:] + line):
            return record + line
        return None

    def _begins_name(self, text: bytes) -> bool:
        return any(name.startswith(text) for name in self._names)


RECORD = re.compile(rb"iteration {1,24}+(\d{1,18})/ {0,24}+(\d{1,18}) {0,4}+\|")

RECORD_BYTES = 1 << 14
"""Maximum length of a record in bytes."""

MAX_FIELDS = 64

MAX_FUTILE = 200_000
"""Number of consecutive records without end or continuation after which the search stops."""

_NAME = rb"[A-Za-z][^|:\r\n]{1,60}+"
_VALUE = rb"[^i|\r\n]{0,100}+(?:i(?!teration {1,24}\d)[^i|\r\n]{0,100}+){0,8}+"
"""Pattern up to the start of the next record, which may be on the same line."""

_FIELD = re.compile(rb"(" + _NAME + rb"):(" + _VALUE + rb")\|")
_REST = rb"((?: {0,4}+" + _NAME + rb":" + _VALUE + rb"\|)*+)"

_NUMBER = (
    rb" {0,24}+([-+0-9.eEnNaAiIfF]{1,24}+)"
    rb"(?: {0,4}+(?:TFLOPS?|/[^|\r\n]{0,60}|\([^|\r\n]{0,60}))?+ {0,24}+\|"
)
"""Pattern of a value; a running mean may follow it: `346.3/340.8`, `615.5 (avg 615.4)`."""

_RATE_INSIDE = rb"[^|\r\n:]{0,60}samples/sec:" + _NUMBER
"""Rate inside another field, as in `iteration time: 270.125 s samples/sec: 3.8`."""

_VALUES = {b"": re.compile(_NUMBER), b"iteration time": re.compile(_RATE_INSIDE)}

_ANSI = re.compile(rb"\x1b\[[0-9;]{0,16}[A-Za-z]")

Row = tuple[bytes, ...]
"""Number of a record, the values of its fields, and the text of unknown fields."""


@dataclass(frozen=True)
class Rows:
    """Text of each field and record; empty if the record does not have the field."""

    numbers: tuple[bytes, ...]
    """Numbers of the iterations."""
    columns: dict[bytes, tuple[bytes, ...]]
    ends_whole: bool
    """True if the last record has the field that ends records in this log."""


def whole_records(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield `blocks` without colors and NULs, split only before a line with a record."""
    pending = b""
    for block in blocks:
        if b"\x1b" in block:
            block = _ANSI.sub(b"", block)
        if b"\0" in block:
            block = block.translate(None, b"\0")
        text = pending + block
        end = _line_of_last_record(text)
        pending = text[end:]
        if end:
            yield text[:end]
    if pending:
        yield pending


def _line_of_last_record(text: bytes) -> int:
    """Return where the last record's line starts; the text's length if that is too far back."""
    start = _last_start(text, max(0, len(text) - RECORD_BYTES))
    if start < 0:
        return len(text)
    return max(text.rfind(b"\n", 0, start), text.rfind(b"\r", 0, start)) + 1


def last_record(text: bytes) -> int:
    """Return where the last record in `text` starts, or -1."""
    start = _last_start(text, max(0, len(text) - RECORD_BYTES))
    return start if start >= 0 else _last_start(text, 0)


def _last_start(text: bytes, start: int) -> int:
    last = -1
    for match in RECORD.finditer(text, start):
        last = match.start()
    return last


class Fields:
    """Known fields in their order, and the expression that reads them.

    `numeric_names` matches the names of numeric fields; other values are ignored.
    """

    def __init__(self, numeric_names: re.Pattern[bytes]) -> None:
        self._numeric_names = numeric_names
        self._names: list[bytes] = []
        self._numeric: set[bytes] = set()
        self._num_futile = 0
        self._compile()

    def rows(self, text: bytes) -> Rows | None:
        """Return the records in `text`, including wrapped ones, or None."""
        rows: list[Row] = self._expression.findall(text)
        if not rows:
            return None
        columns = list(zip(*rows, strict=True))
        all_whole = bool(self._names) and all(columns[-2])
        if not any(columns[-1]) and (all_whole or self._num_futile >= MAX_FUTILE):
            numbers, *values, _ = columns
            return self._as_rows(numbers, dict(zip(self._captured, values, strict=True)))
        return self._one_by_one(text)

    def _one_by_one(self, text: bytes) -> Rows:
        """Return the records of a text with new fields, missing last fields or wrapped records."""
        starts = [match.start() for match in RECORD.finditer(text)]
        numbers: list[bytes] = []
        columns: dict[bytes, list[bytes]] = {name: [] for name in self._captured}
        for begin, end in pairwise([*starts, len(text)]):
            number, *values, _ = self._row(text[begin:end], end == len(text))
            for name, value in zip(self._captured, values, strict=True):
                if name not in columns:
                    columns[name] = [b""] * len(numbers)
                columns[name].append(value)
            numbers.append(number)
        for column in columns.values():
            column += [b""] * (len(numbers) - len(column))
        return self._as_rows(tuple(numbers), {name: tuple(c) for name, c in columns.items()})

    def _as_rows(self, numbers: Row, columns: dict[bytes, Row]) -> Rows:
        ends_whole = not self._names or bool(columns[self._names[-1]][-1])
        numeric = {name: c for name, c in columns.items() if name in self._numeric and any(c)}
        return Rows(numbers, numeric, ends_whole)

    def _row(self, lines: bytes, is_last: bool) -> Row:
        """Return the record at the start of `lines`; learn its new fields."""
        row = self._match(lines)
        if not row[-1] and row[-2] and self._names:
            return row
        if self._num_futile < MAX_FUTILE:
            record = self._wrapping.join(lines, is_last)
            self._num_futile = self._num_futile + 1 if record is None else 0
            if record is not None:
                lines, row = record, self._match(record)
        if row[-1] and self._learn(_FIELD.findall(row[-1])):
            row = self._match(lines)
        return self._fill_missing(row) if row[-1] else row

    def _match(self, lines: bytes) -> Row:
        match = self._expression.match(lines)
        assert match is not None
        return match.groups(b"")

    def _learn(self, fields: list[tuple[bytes, bytes]]) -> bool:
        """Insert each new name before the next known one, or last; surplus names are dropped."""
        names = dict.fromkeys(name for name, _ in fields if name not in self._names)
        new = list(names)[: MAX_FIELDS - len(self._names)]
        place = len(self._names)
        for name, value in reversed(fields):
            if name in self._names:
                place = self._names.index(name)
            elif name in new:
                self._names.insert(place, name)
                if self._numeric_names.fullmatch(name) and _number(name, value):
                    self._numeric.add(name)
        if new:
            self._compile()
        return bool(new)

    def _compile(self) -> None:
        """Compile the expression: one group per captured field, in the order of `_captured`."""
        last = self._names[-1:]
        parts: list[bytes] = []
        for name in self._names:
            value = rb":" + _VALUE + rb"\|"
            if name in self._numeric:
                value = rb":" + _pattern(name).pattern
            elif name in last:
                value = rb"(:)" + _VALUE + rb"\|"
            parts.append(rb"(?: {0,4}+" + re.escape(name) + value + rb")?+")
        record = rb"iteration {1,24}+(\d{1,18})/ {0,24}+\d{1,18} {0,4}+\|"
        self._captured = [n for n in self._names if n in self._numeric or n in last]
        self._expression = re.compile(record + b"".join(parts) + _REST)
        self._wrapping = Wrapping(RECORD, self._names)

    def _fill_missing(self, row: Row) -> Row:
        """Return the row with the values of fields in an unusual order."""
        fields = dict(reversed(_FIELD.findall(row[-1])))
        values = list(row)
        for place, name in enumerate(self._captured, 1):
            if name in fields and not values[place]:
                values[place] = _number(name, fields[name]) or b""
        return tuple(values)


def _pattern(name: bytes) -> re.Pattern[bytes]:
    return _VALUES.get(name, _VALUES[b""])


def _number(name: bytes, value: bytes) -> bytes | None:
    """Return the number at the start of a field's value, as text."""
    match = _pattern(name).match(value + b"|")
    return match[1] if match else None
