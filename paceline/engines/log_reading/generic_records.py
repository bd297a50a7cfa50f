"""Records of the generic reader: the named numbers of each line of any text.

A line holds `name: value` pairs, a progress bar, a meter, JSON, or cells of CSV.
"""

from __future__ import annotations

import csv
import math
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import numpy as np

from paceline.engines.log_reading.log_content import LARGEST
from paceline.engines.log_reading.records import without_colors
from paceline.files.documents import parse_json

MAX_NAMES = 64
"""Maximum number of values in a record; longer ones are data, not step lines."""
MAX_LINE = 4_000
MIN_LINE = len("a=1 b=2")
MAX_DEPTH = 3
_CLOCK_TEXT = r"((?:\d{1,4}:)?\d{1,2}:\d{2})"
_RATE_TEXT = r"(?:[\d.]{1,16}|\?) ?(?:s/it|it/s|s/step|step/s)"
_BAR = re.compile(
    rf"(?<![\d.])(\d{{1,12}})(?:/(\d{{1,12}}|\?)"
    rf"(?: \[{_CLOCK_TEXT}<[^,\]]{{1,24}}, {{0,4}}{_RATE_TEXT}"
    rf"| {_CLOCK_TEXT} • \S{{1,20}} {{1,4}}{_RATE_TEXT})|it \[{_CLOCK_TEXT}, {{0,4}}{_RATE_TEXT})"
)
"""Bars of tqdm, of rich in Lightning, and of tqdm without a total."""
_EPOCHS_ONLY = re.compile(r"(?:^|[^\w])epochs?\W{0,9}(?:\d{1,3}%)?\W*$", re.IGNORECASE)
"""Description of a bar that counts epochs."""
_EPOCH_NUMBER = re.compile(r"(?<![a-z])epoch\W{0,3}(\d{1,6})(?!\d|%)", re.IGNORECASE)
_BAR_LOSS = re.compile(
    r"(?<![A-Za-z])(?:train_|step_)?[Ll]oss(?:_step)?[:=] ?([-+.\deE]{1,24}|nan|inf)"
)
_STAMP = re.compile(r"(?<!\d)\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?")
STAMP = "time stamp"
"""Name of the first date in a line."""
UNITS = {
    **dict.fromkeys(("ns", "nanoseconds"), 1e-9),
    **dict.fromkeys(("us", "µs", "μs", "usec", "microseconds"), 1e-6),
    **dict.fromkeys(("ms", "msec", "msecs", "millisecond", "milliseconds"), 1e-3),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
}
"""Seconds in the units of time, as they are printed behind values and at the end of names."""
_SUFFIXES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
UNIT_WORDS = "|".join(sorted((*UNITS, "m"), key=len, reverse=True))
_DIGITS = r"(?>-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,20})(?:\.\d{1,18})?(?:[eE][-+]?\d{1,3})?)"
_PAIR = re.compile(
    r"(?<![\w.])([A-Za-z_][\w/%]{0,40}(?:[ .-][A-Za-z(][\w/%]{0,24}\)?){0,4}(?: ?\([\w/]{1,16}\))?)"
    rf"\s{{0,4}}[:=]\s{{0,4}}({_DIGITS}|nan|NaN|inf)(?!:\d|-\d|\.\d)([kKMGB](?![\w/]))?"
    rf"(?:/\d{{1,15}})?(?:\s?({UNIT_WORDS})(?![\w/]|\s{{0,4}}[:=]))?(?![A-Za-zµμ])"
)
"""Name, value, suffix and unit. A value before another letter, a clock or a date is left out."""
_STEP_WORD = re.compile(
    r"(?<![\w.])(?:[Ss]tep|STEP|[Ii]ter(?:ation)?|[Bb]atch|[Uu]pdate)s?[ #\[]{1,3}(\d{1,15})"
    r"(?![\d.]|:\d)"
)
_RATE_WORD = re.compile(
    rf"(?<![\w.])({_DIGITS})([kKMG]?) ?"
    r"(?:([mu]?s(?:ec)?)/(?:step|iter|it)|(it|steps?|tok(?:ens)?|samples?)/s(?:ec)?)"
    r"(?![\w/]|\s{0,4}[:=])"
)
"""Value, suffix, and a unit of time per step or an amount per second, without a name."""
_METER_POSITION = re.compile(
    r"(?<!\w)(?:Epoch|Train):? {0,2}\[ {0,6}(\d{1,9})(?:/\d{1,9})?\]\s{0,2}"
    r"\[ {0,12}(\d{1,12})/ {0,12}(\d{1,12})\]"
)
"""Epoch, step in it, and steps of an epoch, as in PyTorch's ImageNet example, MMCV and Swin."""
_METER = re.compile(
    rf"(?<![\w.])([A-Za-z][\w@]{{0,24}}):?\s{{1,4}}({_DIGITS}|nan) \(\s{{0,4}}(?:{_DIGITS}|nan)\)"
)
"""Name and value of a meter, before its mean in parentheses."""
STEP_NAMES = (
    *("global_step", "train/global_step", "trainer/global_step", "step", "steps", "iteration"),
    *("iter", "it", "update", "train_step", "num_steps", "batch", "num_updates", "n_iter", "_step"),
)
"""Names of step numbers, most likely first; `_step` of W&B counts its own records."""
EVALUATION = re.compile(
    r"(?:^|[^a-z])(?:val|valid\w*|eval\w*|test|testing)(?:[^a-z]|$)", re.IGNORECASE
)
"""Name of a value, or start of a line, of an evaluation."""
_OTHER_BAR = re.compile(
    r"eval|valid|test|tokeni|map|load|generating|generation|sampl|sanity|filter|pack|saving|writ|extract|check",
    re.IGNORECASE,
)
"""Descriptions of progress bars that count no training steps."""
Record = dict[str, float]
BAR = "bar of "
"""Start of the name that a bar's record has; the total follows."""


def step_name(names: Iterable[str]) -> str | None:
    """Return the most likely name of a step number, None without one."""
    normal = {normal_name(name): name for name in reversed(list(names))}
    return next((normal[step] for step in STEP_NAMES if step in normal), None)


def normal_name(name: str) -> str:
    """Return a name in lower case, with `_` for spaces."""
    return " ".join(name.lower().split()).replace(" ", "_") if "/" not in name else name.lower()


Reader = Callable[[Sequence[str]], Iterable[float]]
"""Function that reads values from their texts, which differ by digits only."""


class Field(NamedTuple):
    """Place of a value in the lines that differ by digits only."""

    name: str
    start: int
    end: int
    read: Reader
    name_span: tuple[int, int] = (0, 0)
    """Place of what the name depends on in the line."""


@dataclass(frozen=True)
class RecordGroup:
    """Records with the same names in a part of a log."""

    names: tuple[str, ...]
    places: Sequence[int]
    """Number of the line of each record in the log, which grows."""
    columns: Sequence[Iterable[float]]
    """Values of each name, one per record."""


MAX_SHAPES, MAX_SHAPE_BYTES = 5_000, 500
"""Maximum number of kinds of lines whose fields are stored, and of the bytes of each."""
_AS_ZERO = bytes.maketrans(b"123456789", b"000000000")
_DIGIT = re.compile("[0-9]")


def named_records(blocks: Iterable[bytes]) -> Iterator[list[RecordGroup]]:
    """Yield the named numbers of the lines of each block, in the order of each group's first line.

    Lines that differ by digits only have their values at the same places. These are found once.
    """
    shapes, cells = _Shapes(), _Cells()
    num_lines = 0
    for block in blocks:
        text = without_colors(block).replace(b"\r", b"\n")
        lines = text.decode("utf-8", "replace").split("\n")
        places_by_shape: dict[bytes, list[int]] = defaultdict(list)
        for place, shape in enumerate(text.translate(_AS_ZERO).split(b"\n")):
            places_by_shape[shape].append(place)
        places_by_shape.pop(b"", None)
        groups: list[RecordGroup] = []
        if (first_row := cells.first_row(lines)) < len(lines):
            groups += _groups_of(cells.records(lines, first_row))
        for shape, places in places_by_shape.items():
            places = places[: bisect_left(places, first_row)]
            if places and len(lines[places[0]]) <= MAX_LINE:
                groups += shapes.groups(shape, lines, places)
        yield [
            RecordGroup(group.names, [num_lines + place for place in group.places], group.columns)
            for group in sorted(groups, key=lambda group: group.places[0])
            if 2 <= len(group.names) <= MAX_NAMES
        ]
        num_lines += len(lines)


class _Shapes:
    """Fields of the lines of text so far, by the shape of the lines: with zeros as digits."""

    def __init__(self) -> None:
        self._fields: dict[bytes, list[Field]] = {}

    def groups(
        self, shape: bytes, lines: Sequence[str], places: list[int]
    ) -> Iterable[RecordGroup]:
        """Return the records of the lines at `places`, which all have the same shape."""
        first = lines[places[0]]
        if first[0] == "{":
            return _groups_of((place, _json_record(lines[place])) for place in places)
        fields = self._fields.get(shape)
        if fields is None:
            fields = _text_fields(first)
            if len(self._fields) < MAX_SHAPES and len(shape) <= MAX_SHAPE_BYTES:
                self._fields[shape] = fields if len(fields) > 1 else []
        if len(fields) < 2:
            return []
        spans = [each.name_span for each in fields if _DIGIT.search(each.name)]
        if not spans:
            return [_group(fields, lines, places)]
        places_by_name: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for place in places:
            line = lines[place]
            places_by_name[tuple([line[start:end] for start, end in spans])].append(place)
        return [
            _group(_text_fields(lines[places[0]]), lines, places)
            for places in places_by_name.values()
        ]


def _group(fields: Iterable[Field], lines: Sequence[str], places: list[int]) -> RecordGroup:
    """Return the values of the fields; of several with the same name, the first counts."""
    texts = [lines[place] for place in places]
    columns: dict[str, Iterable[float]] = {}
    for name, start, end, read, _ in fields:
        if name not in columns:
            columns[name] = read([text[start:end] for text in texts])
    return RecordGroup(tuple(columns), places, list(columns.values()))


def _groups_of(records: Iterable[tuple[int, Record]]) -> Iterator[RecordGroup]:
    """Yield records with their places, grouped by their names."""
    groups: dict[tuple[str, ...], list[tuple[int, Record]]] = defaultdict(list)
    for place, record in records:
        groups[tuple(record)].append((place, record))
    for names, group in groups.items():
        columns = list(zip(*(record.values() for _, record in group), strict=True))
        yield RecordGroup(names, [place for place, _ in group], columns)


class _Cells:
    """Reader of CSV, whose header is the first line of the log."""

    def __init__(self) -> None:
        self._first_lines: list[str] = []
        self._header: list[str] = []
        self._delimiter = ""

    def first_row(self, lines: Sequence[str]) -> int:
        """Return the place of the first row with cells; the number of lines if there are none."""
        for place, line in enumerate(lines):
            if len(self._first_lines) == 2:
                break
            if line and len(line) <= MAX_LINE:
                self._first_lines.append(line)
                if len(self._first_lines) == 2:
                    self._header, self._delimiter = _header(*self._first_lines)
                    return place if self._header else len(lines)
        return 0 if self._header else len(lines)

    def records(self, lines: Sequence[str], first_row: int) -> Iterator[tuple[int, Record]]:
        """Yield the places and values of the rows."""
        for place in range(first_row, len(lines)):
            if 0 < len(lines[place]) <= MAX_LINE:
                yield place, _csv_record(lines[place], self._header, self._delimiter)


def _header(first: str, second: str) -> tuple[list[str], str]:
    """Return the names in the first line of a CSV file and its delimiter, or no names."""
    for delimiter in (",", "\t", ";"):
        names = [
            name.strip() for name in next(csv.reader([first], delimiter=delimiter), list[str]())
        ]
        is_header = len(names) >= 2 and len(set(names)) == len(names) and all(map(_is_name, names))
        if is_header and _csv_record(second, names, delimiter):
            return names, delimiter
    return [], ""


def _is_name(text: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z_][\w /().,:%|-]{0,80}", text)) and not re.search(
        r"[:=] ?\d", text
    )


def _csv_record(line: str, header: list[str], delimiter: str) -> Record:
    cells = next(csv.reader([line], delimiter=delimiter), list[str]())
    if len(cells) != len(header):
        return {}
    if delimiter == ";":
        cells = [_DECIMAL_COMMA.sub(r"\1.\2", cell) for cell in cells]
    numbers = {name: _number(cell) for name, cell in zip(header, cells, strict=True)}
    return {name: value for name, value in numbers.items() if value is not None}


def _json_record(line: str) -> Record:
    try:
        content = parse_json(line, nan=True)
    except ValueError:
        group = _group(_text_fields(line), [line], [0])
        return {name: value for name, (value,) in zip(group.names, group.columns, strict=True)}
    record: Record = {}
    if isinstance(content, dict):
        _flatten(cast("dict[str, Any]", content), "", record, 0)
    return record


def _flatten(content: Mapping[str, Any], prefix: str, record: Record, depth: int) -> None:
    for key, value in content.items():
        name = f"{prefix}{key}"[:80]
        if isinstance(value, dict) and depth < MAX_DEPTH:
            _flatten(cast("dict[str, Any]", value), f"{name}.", record, depth + 1)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            record[name] = float(value) if abs(value) < LARGEST else math.inf


def _text_fields(line: str) -> list[Field]:
    """Return the named numbers of a line of text, times in seconds.

    A progress bar has the steps that it counts. Lines of evaluations have none.
    """
    if len(line) < MIN_LINE:
        return []
    if bar := _BAR.search(line):
        return _bar_fields(line, bar)
    fields, first = _meter_fields(line)
    for pair in _PAIR.finditer(line):
        if _number(pair[2]) is None:
            continue
        first = min(first, pair.start())
        name, unit = pair[1].strip(), pair[4]
        if pair[3] and normal_name(name) in STEP_NAMES:  # A step number such as 12K is rounded.
            continue
        unit_s = 60.0 if unit == "m" else UNITS[unit] if unit else 1.0
        value = _scaled(unit_s, _SUFFIXES.get(pair[3], 1.0))
        name = f"{name} (s)" if unit else name
        fields.append(Field(name, *pair.span(2), value, pair.span(1)))
    if (not fields or not step_name(name for name, *_ in fields)) and (
        word := _STEP_WORD.search(line)
    ):
        fields.append(Field("step", *word.span(1), _numbers))
        first = min(first, word.start())
    if EVALUATION.search(line[:first]):
        return []
    fields += _rate_fields(line)
    if fields and (stamp := _STAMP.search(line, 0, first)):
        fields.append(Field(STAMP, *stamp.span(), _seconds_since_1970))
    return fields


def _rate_fields(line: str) -> Iterator[Field]:
    """Yield the rates without a name, as seconds per step or as amounts per second."""
    for word in _RATE_WORD.finditer(line):
        _, suffix, unit, amount = word.groups()
        if _number(word[1]) is None:
            continue
        factor = _SUFFIXES.get(suffix, 1.0)
        if unit:
            yield Field("s/step", *word.span(1), _scaled(factor, UNITS[unit]))
        elif amount[:2] in ("it", "st"):
            yield Field("s/step", *word.span(1), partial(_inverses, factor))
        else:
            yield Field(f"{_AMOUNTS[amount[:2]]}/s", *word.span(1), _scaled(factor))


def _scaled(*factors: float) -> Reader:
    """Return a function that reads numbers and multiplies them by each factor."""
    others = [factor for factor in factors if factor != 1.0]

    def read_values(texts: Sequence[str]) -> list[float]:
        values = _numbers(texts)
        for factor in others:
            values = [value * factor for value in values]
        return values

    return read_values if others else _numbers


def _inverses(factor: float, texts: Sequence[str]) -> list[float]:
    """Return the inverse of numbers times a factor; 0 for 0."""
    return [1 / (value * factor) if value else value for value in _numbers(texts)]


def _meter_fields(line: str) -> tuple[list[Field], int]:
    """Return epoch, step, and values of a line such as `Epoch: [0][10/500] Time 0.3 (0.4)`.

    A value is that of the last step or steps, and its mean over the epoch in parentheses is left
    out. The start of the line's values comes second.
    """
    position = _METER_POSITION.search(line)
    if position is None:
        return [], len(line)
    fields: list[Field] = [
        Field("epoch", *position.span(1), _numbers),
        Field("step", *position.span(2), _numbers),
        Field(f"{BAR}{position[3]}", 0, 0, _zeros, position.span(3)),
    ]
    fields += [
        Field(each[1], *each.span(2), _numbers, each.span(1))
        for each in _METER.finditer(line, position.end())
        if _number(each[2]) is not None
    ]
    return fields, position.start()


def _bar_fields(line: str, bar: re.Match[str]) -> list[Field]:
    """Return what a progress bar counts; nothing for one that counts no training steps."""
    description = line[: bar.start()]
    if _OTHER_BAR.search(description) or _EPOCHS_ONLY.search(description):
        return []
    clock = next(group for group in (3, 4, 5) if bar[group])
    fields: list[Field] = [
        Field("step", *bar.span(1), _numbers),
        Field("elapsed", *bar.span(clock), partial(map, _clock_seconds)),
        Field(f"{BAR}{bar[2]}", 0, 0, _zeros, bar.span(2)),
    ]
    if epoch := _EPOCH_NUMBER.search(description):
        fields.append(Field("epoch", *epoch.span(1), _numbers))
    if (loss := _BAR_LOSS.search(line)) and _number(loss[1]) is not None:
        fields.append(Field("loss", *loss.span(1), _numbers))
    return fields


def _zeros(texts: Sequence[str]) -> list[float]:
    return [0.0] * len(texts)


def _seconds_since_1970(texts: Sequence[str]) -> list[float]:
    """Return dates in seconds; 0 for an impossible one."""
    dates = [text.replace(",", ".").replace(" ", "T") for text in texts]
    try:
        return (np.array(dates, "datetime64[us]").astype(np.int64) / 1e6).tolist()
    except ValueError:
        return [0.0] if len(texts) == 1 else [_seconds_since_1970([text])[0] for text in texts]


_AMOUNTS = {"to": "tokens", "sa": "samples"}
_DECIMAL_COMMA = re.compile(r"^\s*(-?\d+),(\d+)\s*$")
_EXPONENT = re.compile("[A-Za-z]")
"""Exponent, NaN or infinity, without which a number is small."""
_GROUPED = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


@lru_cache(maxsize=1 << 12)
def _clock_seconds(text: str) -> float:
    parts = [int(part) for part in text.split(":")]
    return float(sum(part * 60**power for power, part in enumerate(reversed(parts))))


def _number(text: str) -> float | None:
    try:
        is_grouped = "," in text and _GROUPED.fullmatch(text.strip())
        value = float(text.replace(",", "") if is_grouped else text)
    except ValueError:
        return None
    return value if abs(value) < LARGEST else math.inf


def _numbers(texts: Sequence[str]) -> list[float]:
    """Return numbers that differ by digits only, as `_number` does for each."""
    if "," in texts[0]:
        texts = [text.replace(",", "") for text in texts]
    values = list(map(float, texts))
    if _EXPONENT.search(texts[0]):
        values = [value if abs(value) < LARGEST else math.inf for value in values]
    return values
