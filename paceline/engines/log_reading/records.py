"""Records in log text: their fields by name, and what any framework's log may say of its end."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

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
"""A number as programs print it in their step lines."""

OUT_OF_MEMORY = (
    b"oom-kill",
    b"oom_kill",
    b"std::bad_alloc",
    b"DefaultCPUAllocator: can't allocate memory",
)
"""What programs and kernels write only when memory has run out."""

ERROR_CLASS = b"OutOfMemoryError"

MOST_BEFORE = 200

LARGEST_SETTING = 1 << 62

OF_NUMBERS = b"0123456789.,eE+-"
_COLOUR = re.compile(rb"\x1b\[[0-9;]{0,24}m")
_LINE_END = re.compile(rb"[\r\n]|\Z")

_ERROR = re.compile(ERROR_CLASS + rb"(?!\w)")
_NAMED = re.compile(
    rb"(?:[\w.:]{0,80}OutOfMemoryError"
    rb"|(?:CUDA|HIP|[NX]PU)(?: driver)?(?: error:)? out of memory)\Z"
)
"""What people write about as well: a class, or a message without what follows it."""

_BEFORE_PROSE = re.compile(rb"(?:[a-z]{1,20}[,;]? {1,2}|[(\"'`])\Z")
"""A word or a bracket: before a message stand a line's beginning, a prefix or an error's name."""

_BEHIND_PROSE = re.compile(rb" [a-z]")

# Warnings have these words too, so their neighbours count. A literal at the front of a pattern is
# searched many times faster than a choice of words: hence the looks back.
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
    """A pattern for Records: `name`, then a number; nothing of a record is looked at behind it."""
    return re.compile(name + NUMBER + rb"[^\n]*")


def json_field(name: bytes) -> re.Pattern[bytes]:
    """As `field`, for `name` in a JSON object, where numbers may be `NaN` and `Infinity`."""
    return re.compile(rb'"' + name + rb'": (-?(?:NaN|Infinity)|[-+0-9.eE]{1,24})[^\n]*')


class Records:
    """Records of one kind, one line each, whose fields are found by name in whatever order."""

    def __init__(self, lines: Sequence[bytes]) -> None:
        self._lines = lines
        self._text = b"\n".join(lines)

    def texts(self, field: re.Pattern[bytes]) -> list[bytes] | None:
        """The field of each record as printed, empty where it lacks; None when all lack it."""
        printed: list[bytes] = field.findall(self._text)
        if not printed:
            return None
        if len(printed) == len(self._lines):
            return printed
        hits = [field.search(line) for line in self._lines]
        return [hit[1] if hit else b"" for hit in hits]

    def either_texts(self, patterns: Iterable[re.Pattern[bytes]]) -> list[bytes]:
        """Of each record the first of several fields that it has, as printed; empty without one."""
        columns = [texts for texts in map(self.texts, patterns) if texts is not None]
        return [next((text for text in texts if text), b"") for texts in zip(*columns, strict=True)]

    def columns(
        self, fields: Mapping[str, re.Pattern[bytes]], scale: float = 1.0
    ) -> dict[str, FloatColumn]:
        """The fields that some record has, as numbers times `scale`; NaN where one lacks it."""
        columns: dict[str, FloatColumn] = {}
        for name, pattern in fields.items():
            texts = self.texts(pattern)
            if texts is not None:
                columns[name] = numbers(texts) * scale
        return columns

    def either(
        self, choices: Mapping[str, Sequence[re.Pattern[bytes]]], scale: float = 1.0
    ) -> dict[str, FloatColumn]:
        """Columns of fields with several names: the first of them that a record has counts."""
        columns: dict[str, FloatColumn] = {}
        for name, patterns in choices.items():
            for pattern in patterns:
                column = self.columns({name: pattern}, scale).get(name)
                if column is not None:
                    earlier = columns.get(name, column)
                    columns[name] = np.where(np.isnan(earlier), column, earlier)
        return columns


def ratio(amount: FloatColumn, rate: FloatColumn) -> FloatColumn:
    """amount / rate, unknown where either is unknown, infinite or not above 0."""
    quotient = np.full(len(rate), np.nan)
    sound = np.isfinite(amount) & np.isfinite(rate) & (amount > 0) & (rate > 0)
    return np.divide(amount, rate, out=quotient, where=sound)


def product_of(first: FloatColumn, second: FloatColumn) -> FloatColumn:
    """first x second, unknown where either is unknown, infinite or not above 0."""
    value = np.full(len(first), np.nan)
    sound = np.isfinite(first) & np.isfinite(second) & (first > 0) & (second > 0)
    return np.multiply(first, second, out=value, where=sound)


def above_zero(values: FloatColumn) -> FloatColumn:
    """`values`, unknown where they are negative: how programs print that they do not know."""
    return np.where(values >= 0, values, np.nan)


def note_resolution(log: LogContent, columns: Mapping[str, FloatColumn], digits: int) -> None:
    """Keep the step of the last printed step time, of which `digits` significant ones are shown."""
    times = columns.get("step_time_s")
    if times is not None:
        sound = times[np.isfinite(times) & (times > 0)]
        if len(sound):
            log.resolution_s = significant_step(sound[-1].item(), digits)


def note_decimals(log: LogContent, times: Sequence[bytes] | None) -> None:
    """Keep the step of the last digit of step times as printed, with a fixed number of decimals."""
    for text in reversed(times or ()):
        if text:
            log.resolution_s = decimal_step(text)
            return


def watched(
    blocks: Iterable[bytes],
    log: LogContent,
    ends: bytes | None = None,
    torn: re.Pattern[bytes] | None = None,
) -> Iterator[bytes]:
    """`blocks`, with what they say of the program's end kept in `log`.

    `ends` is a literal of the line with which the program says that it is done; `torn` matches a
    begun record in a last line that has no line end. A number that touches the end of such a line
    may have lost digits and is taken away.
    """
    last = b""
    for block in blocks:
        if log.out_of_memory is None:
            log.out_of_memory = out_of_memory_line(block)
        if ends is not None and ends in block:
            log.ended = _line_at(block, block.rfind(ends))
        last = block if block.endswith((b"\n", b"\r")) else block.rstrip(OF_NUMBERS)
        yield last
    tail = last[max(last.rfind(b"\n"), last.rfind(b"\r")) + 1 :]
    if torn is not None and torn.search(tail):
        log.torn = f"the log breaks off within a step line: {excerpt(tail)}"


def out_of_memory_line(text: bytes) -> str | None:
    """The first line that tells of memory that ran out, or None; warnings of it do not count.

    Nor does what only speaks of it: prose, advice, source code.
    """
    places = [at for at in map(text.find, OUT_OF_MEMORY) if at >= 0]
    for sign in (_RAN_OUT, _ERROR):
        messages = (match for match in sign.finditer(text) if not _is_prose(text, match))
        places += [match.start() for match in islice(messages, 1)]
    return _line_at(text, min(places)) if places else None


def _is_prose(text: bytes, sign: re.Match[bytes]) -> bool:
    """Whether the words around a sign only speak of memory that runs out."""
    line = max(text.rfind(b"\n", 0, sign.start()), text.rfind(b"\r", 0, sign.start())) + 1
    words = text[max(line, sign.end() - MOST_BEFORE) : sign.end()]
    named = _NAMED.search(words)
    if named is None:
        return False
    before = _BEFORE_PROSE.search(words[: named.start()])
    return before is not None or _BEHIND_PROSE.match(text, sign.end()) is not None


def last_match(pattern: re.Pattern[bytes], text: bytes) -> re.Match[bytes] | None:
    """The last place in `text` that `pattern` matches: what a restart says again counts."""
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def without_colours(block: bytes) -> bytes:
    """`block` without the terminal's colour codes."""
    return _COLOUR.sub(b"", block) if b"\x1b[" in block else block


def significant_step(value: float, digits: int) -> float:
    """The step of the last of `digits` significant digits of `value`; 0.0 where it has none."""
    if not math.isfinite(value) or value <= 0:
        return 0.0
    return 10.0 ** (math.floor(math.log10(value)) - digits + 1)


def keep_whole_numbers(
    log: LogContent, names: Mapping[bytes, str], statements: Iterable[tuple[bytes, bytes]]
) -> None:
    """Keep in the log's facts what is said of the settings in `names`, if it is a number above 0.

    Thousands may be set apart by commas. A later statement replaces an earlier one.
    """
    for key, text in statements:
        if key in names and (number := _setting(text)) is not None:
            log.facts[names[key]] = number


def keep_total_steps(log: LogContent, totals: Sequence[bytes]) -> None:
    """Keep the latest of `totals` that is a number above 0, so that pieces of any size agree."""
    numbers_back = map(_setting, reversed(totals))
    if (number := next((n for n in numbers_back if n is not None), None)) is not None:
        log.facts["total_steps"] = number


def _setting(text: bytes) -> int | None:
    """A whole number above 0 that a setting may be, None for anything else."""
    digits = text.replace(b",", b"")
    if not digits.isdigit() or len(digits) >= 20:
        return None
    number = int(digits)
    return number if 0 < number < LARGEST_SETTING else None


def product(*factors: Fact | None) -> int | None:
    """The product of whole numbers above 0; None when one is something else."""
    if not all(isinstance(factor, int) and factor > 0 for factor in factors):
        return None
    return math.prod(int(factor) for factor in factors if factor is not None)


def _line_at(block: bytes, at: int) -> str:
    """What the line says that has the place `at`, from shortly before that."""
    start = max(block.rfind(b"\n", 0, at), block.rfind(b"\r", 0, at)) + 1
    end = _LINE_END.search(block, at)
    return excerpt(block[max(start, at - 80) : end.start() if end else None])


class RunningTotals:
    """What the steps between two lines took, a step: the differences of one or more totals."""

    def __init__(self, num_totals: int = 1) -> None:
        self._index = 0
        self._totals = np.zeros(num_totals)
        self._begun = False
        self.distance = 1
        """Steps between the last two lines."""

    def rates(
        self, index: IntColumn, totals: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.bool_], list[FloatColumn]]:
        """Which lines are of a new step, and of those what one step added to each row of `totals`.

        (T_i - T_i-1) / (n_i - n_i-1), n the step numbers. NaN where a total is not larger than
        before, for then a clock was set back or a run began again. The first line has what came
        before it only where it is step 1; a line of the same step as the one before is left out.
        """
        before = np.concatenate([[self._index], index[:-1]])
        new = index != before
        new[0] |= not self._begun
        index, totals = index[new], totals[:, new]
        if not len(index):
            return new, [np.zeros(0) for _ in totals]
        numbers = np.concatenate([[self._index], index]).astype(np.float64)
        values = np.concatenate([self._totals[:, None], totals], axis=1)
        steps, added = np.diff(numbers), _differences(values)
        unknown = (steps <= 0) | ~(added > 0)
        if not self._begun and index[0] != 1:
            unknown[:, 0] = True
        self.distance = max(1, int(min(steps[-1], 1e9)))
        self._index, self._totals, self._begun = int(index[-1]), totals[:, -1].copy(), True
        per_step = np.where(unknown, math.nan, added) / np.where(steps > 0, steps, 1.0)
        return new, list(per_step)


def _differences(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Differences along each row, NaN beside what is no finite number."""
    return np.diff(np.where(np.isfinite(values), values, math.nan), axis=1)
