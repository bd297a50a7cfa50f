"""Records in log text: fields by name, and generic signs of a program's end."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from re import _parser as re_parser  # type: ignore[attr-defined]
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from paceline.core.steps import FloatColumn, IntColumn
from paceline.engines.log_reading.log_content import (
    Fact,
    LogContent,
    decimal_step,
    excerpt,
    numbers,
)

NUMBER = rb"(-?(?:nan|inf)|[-+0-9.eE]{1,24})"
"""Number in the form that programs print in step lines."""

OUT_OF_MEMORY = (
    b"oom-kill",
    b"oom_kill",
    b"std::bad_alloc",
    b"DefaultCPUAllocator: can't allocate memory",
)
"""Text that programs and kernels write only after running out of memory."""

ERROR_CLASS = b"OutOfMemoryError"

_NOT_A_NUMBER = re.compile(
    rb"(?:Error|Exception): [^\r\n]{0,120}?(?:found NaN in local |returned nan values in its "
    rb"|\bis nan\b|invalid value \(nan\)|loss scale already at minimum|Minimum loss scale reached)"
    rb"|Loss is nan, stopping training"
)
"""Errors with which programs stop because the loss or a gradient is not a number."""

MAX_PREFIX_BYTES = 200

LARGEST_SETTING = 1 << 62

OF_NUMBERS = b"0123456789.,eE+-"
_COLOUR = re.compile(rb"\x1b\[[0-9;]{0,24}m")
_LINE_END = re.compile(rb"[\r\n]|\Z")

_ERROR = re.compile(ERROR_CLASS + rb"(?!\w)")
_AMBIGUOUS_SIGN = re.compile(
    rb"(?:[\w.:]{0,80}OutOfMemoryError"
    rb"|(?:CUDA|HIP|[NX]PU)(?: driver)?(?: error:)? out of memory)\Z"
)
"""Signs that also occur in prose: a class, or a message without its continuation."""

_BEFORE_PROSE = re.compile(rb"(?:[a-z]{1,20}[,;]? {1,2}|[(\"'`])\Z")
"""Word or bracket before a message in prose.

A real message starts a line or follows a prefix or an error's name.
"""

_BEHIND_PROSE = re.compile(rb" [a-z]")

# Warnings contain these words too, so their context matters. A literal at the front of a pattern is
# searched many times faster than alternatives; hence the lookbehinds.
_RAN_OUT = re.compile(
    rb"ut of memory(?:"
    rb"(?<=CUDA out of memory)|(?<=HIP out of memory)|(?<=[NX]PU out of memory)"
    rb"|(?<=CUDA error: out of memory)|(?<=HIP error: out of memory)"
    rb"|(?<=CUDA driver error: out of memory)"
    rb"|(?<=Cuda failure 'out of memory)'|(?<=Cuda failure \d 'out of memory)'"
    rb"|(?<=RESOURCE_EXHAUSTED: Out of memory)|(?<=Ran out of memory) in memory space"
    rb"|: Kill(?:ed)? process)"
)


def field(name: bytes) -> re.Pattern[bytes]:
    """Return a pattern for Records: `name`, then a number; the rest of the record is ignored."""
    return re.compile(name + NUMBER + rb"[^\n]*")


@cache
def required_literal(pattern: re.Pattern[bytes]) -> bytes:
    """Return the longest literal that every match of a pattern contains; empty without one.

    Literals are searched many times faster than patterns.
    """
    if pattern.flags & re.IGNORECASE:
        return b""
    tree: Iterable[Any] = re_parser.parse(pattern.pattern, pattern.flags)  # type: ignore[attr-defined]
    items = cast("Iterable[tuple[Any, Any]]", tree)
    runs = [bytearray()]
    for operation, value in items:
        if str(operation) == "LITERAL":
            runs[-1].append(value)
        else:
            runs.append(bytearray())
    return bytes(max(runs, key=len))


def json_field(name: bytes) -> re.Pattern[bytes]:
    """Return a pattern like `field` for `name` in JSON, including `NaN` and `Infinity`."""
    return re.compile(rb'"' + name + rb'": (-?(?:NaN|Infinity)|[-+0-9.eE]{1,24})[^\n]*')


@dataclass(frozen=True)
class RecordColumn:
    """Column of step records: patterns of its names, of which the first in a record wins."""

    patterns: tuple[re.Pattern[bytes], ...]
    scale: float = 1.0
    """Factor of the printed number."""


def column(*names: bytes, scale: float = 1.0) -> RecordColumn:
    """Return the column of a number that follows one of `names`, as in `field`."""
    return RecordColumn(tuple(map(field, names)), scale)


class Records:
    """Records of one kind, one line each, whose fields are found by name in any order."""

    def __init__(self, lines: Sequence[bytes]) -> None:
        # With their ends, which the patterns of some fields ask for.
        self._lines = [line + b"\n" for line in lines]
        self._text = b"".join(self._lines)

    def texts(self, field: re.Pattern[bytes]) -> list[bytes] | None:
        """Return the field of each record as printed, empty if absent; None if all lack it."""
        literal = required_literal(field)
        if literal not in self._text:
            return None
        printed: list[bytes] = field.findall(self._text)
        if not printed:
            return None
        if len(printed) == len(self._lines):
            return printed
        hits = [field.search(line) if literal in line else None for line in self._lines]
        return [hit[1] if hit else b"" for hit in hits]

    def either_texts(self, patterns: Iterable[re.Pattern[bytes]]) -> list[bytes]:
        """Return the first available field of each record as printed; empty without one."""
        columns = [texts for texts in map(self.texts, patterns) if texts is not None]
        return [next((text for text in texts if text), b"") for texts in zip(*columns, strict=True)]

    def columns(self, table: Mapping[str, RecordColumn]) -> dict[str, FloatColumn]:
        """Return the columns that any record has, as numbers; NaN if absent in a record."""
        columns: dict[str, FloatColumn] = {}
        for name, column in table.items():
            for texts in filter(None, map(self.texts, column.patterns)):
                values = numbers(texts) * column.scale
                earlier = columns.get(name, values)
                columns[name] = np.where(np.isnan(earlier), values, earlier)
        return columns


def ratio(amount: FloatColumn, rate: FloatColumn) -> FloatColumn:
    """Return amount / rate, NaN if either is unknown, infinite or not above 0."""
    quotient = np.full(len(rate), np.nan)
    sound = np.isfinite(amount) & np.isfinite(rate) & (amount > 0) & (rate > 0)
    with np.errstate(over="ignore"):
        np.divide(amount, rate, out=quotient, where=sound)
    return np.where(np.isfinite(quotient), quotient, np.nan)


def product_of(first: FloatColumn, second: FloatColumn) -> FloatColumn:
    """Return first x second, NaN if either is unknown, infinite or not above 0."""
    value = np.full(len(first), np.nan)
    sound = np.isfinite(first) & np.isfinite(second) & (first > 0) & (second > 0)
    with np.errstate(over="ignore"):
        np.multiply(first, second, out=value, where=sound)
    return np.where(np.isfinite(value), value, np.nan)


def nan_if_negative(values: FloatColumn) -> FloatColumn:
    """Return `values`, NaN where negative: programs print negative numbers for unknown values."""
    return np.where(values >= 0, values, np.nan)


def note_resolution(log: LogContent, columns: Mapping[str, FloatColumn], digits: int) -> None:
    """Store the resolution of the last step time, printed with `digits` significant digits."""
    times = columns.get("step_time_s")
    if times is not None:
        sound = times[np.isfinite(times) & (times > 0)]
        if len(sound):
            log.resolution_s = significant_step(sound[-1].item(), digits)


def note_decimals(log: LogContent, times: Sequence[bytes], per_second: float = 1.0) -> None:
    """Store the resolution of printed step times with a fixed number of decimals.

    `per_second` is the number of printed units in a second.
    """
    if text := next(filter(None, reversed(times)), None):
        log.resolution_s = decimal_step(text) / per_second


def watch_end(
    blocks: Iterable[bytes],
    log: LogContent,
    ends: bytes | None = None,
    incomplete: re.Pattern[bytes] | None = None,
) -> Iterator[bytes]:
    """Yield `blocks`; store in `log` how the program ended.

    `ends` is a literal in the line that reports the end of the program. `incomplete` matches an
    incomplete record in a last line without a line end. A number at the end of such a line may have
    lost digits and is removed.
    """
    last = b""
    for block in blocks:
        if log.out_of_memory is None:
            log.out_of_memory = out_of_memory_line(block)
        if ends is not None and ends in block:
            log.end_line = _line_at(block, block.rfind(ends))
        last = block if block.endswith((b"\n", b"\r")) else block.rstrip(OF_NUMBERS)
        yield last
    tail = last[max(last.rfind(b"\n"), last.rfind(b"\r")) + 1 :]
    if incomplete is not None and incomplete.search(tail):
        log.incomplete_reason = f"the log ends within a step line: {excerpt(tail)}"


def step_lines(
    blocks: Iterable[bytes],
    log: LogContent,
    line: re.Pattern[bytes],
    ends: bytes | None = None,
    incomplete: re.Pattern[bytes] | None = None,
) -> Iterator[tuple[bytes, list[tuple[bytes, ...]]]]:
    """Yield the text of each block, and the groups of its step lines as columns, empty without any.

    The text has no colors, and line ends for carriage returns. See `watch_end`.
    """
    for block in watch_end(blocks, log, ends, incomplete):
        text = without_colors(block).replace(b"\r", b"\n")
        yield text, list(zip(*line.findall(text), strict=True))


def out_of_memory_line(text: bytes) -> str | None:
    """Return the first line that reports running out of memory, or None.

    Warnings, prose, advice and source code do not count.
    """
    places = [at for at in map(text.find, OUT_OF_MEMORY) if at >= 0]
    for sign in (_RAN_OUT, _ERROR):
        if required_literal(sign) not in text:
            continue
        messages = (match for match in sign.finditer(text) if not _is_prose(text, match))
        places += [match.start() for match in islice(messages, 1)]
    return _line_at(text, min(places)) if places else None


def watch_not_a_number(
    blocks: Iterable[bytes], log: LogContent, step_line: re.Pattern[bytes]
) -> Iterator[bytes]:
    """Yield `blocks`; store in `log` the error with which the program stopped because of a NaN.

    An error before the last two step lines was survived by a restart; one line may be late.
    """
    last = before = b""
    for block in blocks:
        before, last = last, block
        yield block
    text = before + last
    if _NOT_A_NUMBER.search(text):
        steps = deque((match.start() for match in step_line.finditer(text)), maxlen=2)
        match = _NOT_A_NUMBER.search(text, steps[0] if len(steps) == 2 else 0)
        log.not_a_number = _line_at(text, match.start()) if match else None


def _is_prose(text: bytes, sign: re.Match[bytes]) -> bool:
    """Return whether the words around a sign only mention running out of memory."""
    line = max(text.rfind(b"\n", 0, sign.start()), text.rfind(b"\r", 0, sign.start())) + 1
    words = text[max(line, sign.end() - MAX_PREFIX_BYTES) : sign.end()]
    ambiguous = _AMBIGUOUS_SIGN.search(words)
    if ambiguous is None:
        return False
    before = _BEFORE_PROSE.search(words[: ambiguous.start()])
    return before is not None or _BEHIND_PROSE.match(text, sign.end()) is not None


def last_match(pattern: re.Pattern[bytes], text: bytes) -> re.Match[bytes] | None:
    """Return the last match of `pattern` in `text`, because a restart repeats settings."""
    if required_literal(pattern) not in text:
        return None
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def without_colors(block: bytes) -> bytes:
    """Return `block` without the terminal's color codes."""
    return _COLOUR.sub(b"", block) if b"\x1b[" in block else block


def significant_step(value: float, digits: int) -> float:
    """Return the resolution of `value` with `digits` significant digits; 0.0 if undefined."""
    if not math.isfinite(value) or value <= 0:
        return 0.0
    return 10.0 ** (math.floor(math.log10(value)) - digits + 1)


def store_whole_numbers(
    log: LogContent, names: Mapping[bytes, str], statements: Iterable[tuple[bytes, bytes]]
) -> None:
    """Store settings in `names` in the log's facts if they are numbers above 0.

    Numbers may have thousands separators (commas). A later value replaces an earlier one.
    """
    for key, text in statements:
        if key in names and (number := whole_setting(text)) is not None:
            log.facts[names[key]] = number


def store_total_steps(log: LogContent, totals: Sequence[bytes]) -> None:
    """Store the last of `totals` that is a number above 0, so that all block sizes agree."""
    numbers_back = map(whole_setting, reversed(totals))
    if (number := next((n for n in numbers_back if n is not None), None)) is not None:
        log.facts["total_steps"] = number


def whole_setting(text: bytes) -> int | None:
    """Return a setting as a whole number above 0, or None."""
    digits = text.replace(b",", b"")
    if not digits.isdigit() or len(digits) >= 20:
        return None
    number = int(digits)
    return number if 0 < number < LARGEST_SETTING else None


def product(*factors: Fact | None) -> int | None:
    """Return the product of whole numbers above 0; None if any factor is something else."""
    if not all(isinstance(factor, int) and factor > 0 for factor in factors):
        return None
    return math.prod(int(factor) for factor in factors if factor is not None)


def _line_at(block: bytes, at: int) -> str:
    """Return the text of the line at position `at`, from shortly before it."""
    start = max(block.rfind(b"\n", 0, at), block.rfind(b"\r", 0, at)) + 1
    end = _LINE_END.search(block, at)
    return excerpt(block[max(start, at - 80) : end.start() if end else None])


class RunningTotals:
    """Differences per step of one or more running totals between consecutive lines."""

    def __init__(self, num_totals: int = 1) -> None:
        self._index = 0
        self._totals = np.zeros(num_totals)
        self._has_lines = False
        self.distance = 1
        """Steps between the last two lines."""

    def rates(
        self, index: IntColumn, totals: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.bool_], list[FloatColumn]]:
        """Return a mask of lines with a new step, and their increase per step in each total.

        The increase is (T_i - T_i-1) / (n_i - n_i-1) for step numbers n. It is NaN if a total does
        not grow, because a clock was set back or a run restarted. The first line has an increase
        only if it is step 1. A repeated step is left out.
        """
        before = np.concatenate([[self._index], index[:-1]])
        new = index != before
        new[0] |= not self._has_lines
        index, totals = index[new], totals[:, new]
        if not len(index):
            return new, [np.zeros(0) for _ in totals]
        numbers = np.concatenate([[self._index], index]).astype(np.float64)
        values = np.concatenate([self._totals[:, None], totals], axis=1)
        steps, increases = np.diff(numbers), _differences(values)
        unknown = (steps <= 0) | ~(increases > 0)
        if not self._has_lines and index[0] != 1:
            unknown[:, 0] = True
        self.distance = max(1, int(min(steps[-1], 1e9)))
        self._index, self._totals, self._has_lines = int(index[-1]), totals[:, -1].copy(), True
        per_step = np.where(unknown, math.nan, increases) / np.where(steps > 0, steps, 1.0)
        return new, list(per_step)


def _differences(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return differences along each row, NaN next to values that are not finite."""
    return np.diff(np.where(np.isfinite(values), values, math.nan), axis=1)
