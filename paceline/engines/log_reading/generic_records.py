"""Records of the generic reader: the named numbers of each line of any text.

A line holds `name: value` pairs, a progress bar, a meter, JSON, or cells of CSV.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

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


Field = tuple[str, int, int, Callable[[str], float | None]]
"""Name of a value, start and end of its text in the line, and the function that reads it."""


def named_records(blocks: Iterable[bytes]) -> Iterator[Record]:
    """Yield the named numbers of each line, in the order of the line.

    Lines that differ by digits only have their values at the same places. These are found once.
    """
    header: list[str] = []
    delimiter, before, number = "", "", 0
    fields_by_shape: dict[bytes, list[Field]] = {}
    for text, shape in _lines(blocks):
        fields = fields_by_shape.get(shape)
        if fields == []:
            continue
        line = text.decode("utf-8", "replace")
        if fields is None:
            if not line or len(line) > MAX_LINE:
                continue
            if number == 1:
                header, delimiter = _header(before, line)
            before, number = line, number + 1
        if header:
            record = _csv_record(line, header, delimiter)
        elif line[0] == "{":
            record = _json_record(line)
        else:
            if fields is None:
                fields = _text_fields(line)
                if number > 2 and len(fields_by_shape) < MAX_SHAPES:
                    _store_fields(fields_by_shape, shape, fields)
            record = _record_of(line, fields)
        if 2 <= len(record) <= MAX_NAMES:
            yield record


MAX_SHAPES, MAX_SHAPE_BYTES = 5_000, 500
"""Maximum number of kinds of lines whose fields are stored, and of the bytes of each."""
_AS_ZERO = bytes.maketrans(b"123456789", b"000000000")
_DIGIT = re.compile("[0-9]")


def _lines(blocks: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yield each line, and its shape: the line with zeros as digits."""
    for block in blocks:
        text = without_colors(block).replace(b"\r", b"\n")
        yield from zip(text.split(b"\n"), text.translate(_AS_ZERO).split(b"\n"), strict=True)


def _store_fields(by_shape: dict[bytes, list[Field]], shape: bytes, fields: list[Field]) -> None:
    """Store the fields of a shape unless their names depend on digits; none for a single field."""
    if len(shape) > MAX_SHAPE_BYTES:
        return
    if len(fields) < 2:
        by_shape[shape] = []
    elif not any(_DIGIT.search(name) for name, *_ in fields):
        by_shape[shape] = fields


def _record_of(line: str, fields: Iterable[Field]) -> Record:
    """Return the values of the fields; of several with the same name, the first counts."""
    record: Record = {}
    for name, start, end, read_value in fields:
        value = read_value(line[start:end])
        if value is not None:
            record.setdefault(name, value)
    return record


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
        return _record_of(line, _text_fields(line))
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
        fields.append((f"{name} (s)" if unit else name, *pair.span(2), value))
    if (not fields or not step_name(name for name, *_ in fields)) and (
        word := _STEP_WORD.search(line)
    ):
        fields.append(("step", *word.span(1), float))
        first = min(first, word.start())
    if EVALUATION.search(line[:first]):
        return []
    fields += _rate_fields(line)
    if fields and (stamp := _STAMP.search(line, 0, first)):
        fields.append((STAMP, *stamp.span(), _seconds_since_1970))
    return fields


def _rate_fields(line: str) -> Iterator[Field]:
    """Yield the rates without a name, as seconds per step or as amounts per second."""
    for word in _RATE_WORD.finditer(line):
        _, suffix, unit, amount = word.groups()
        if _number(word[1]) is None:
            continue
        factor = _SUFFIXES.get(suffix, 1.0)
        if unit:
            yield "s/step", *word.span(1), _scaled(factor, UNITS[unit])
        elif amount[:2] in ("it", "st"):
            yield "s/step", *word.span(1), partial(_inverse, factor)
        else:
            yield f"{_AMOUNTS[amount[:2]]}/s", *word.span(1), _scaled(factor)


def _scaled(*factors: float) -> Callable[[str], float | None]:
    """Return a function that reads a number and multiplies it by each factor."""
    others = [factor for factor in factors if factor != 1.0]

    def read_value(text: str) -> float | None:
        value = _number(text)
        for factor in others:
            value = None if value is None else value * factor
        return value

    return read_value if others else _number


def _inverse(factor: float, text: str) -> float | None:
    """Return the inverse of a number times a factor; 0 for 0."""
    value = _number(text)
    return 1 / (value * factor) if value else value


def _meter_fields(line: str) -> tuple[list[Field], int]:
    """Return epoch, step, and values of a line such as `Epoch: [0][10/500] Time 0.3 (0.4)`.

    A value is that of the last step or steps, and its mean over the epoch in parentheses is left
    out. The start of the line's values comes second.
    """
    position = _METER_POSITION.search(line)
    if position is None:
        return [], len(line)
    fields: list[Field] = [
        ("epoch", *position.span(1), float),
        ("step", *position.span(2), float),
        (f"{BAR}{position[3]}", 0, 0, _zero),
    ]
    meters = _METER.finditer(line, position.end())
    return fields + [(each[1], *each.span(2), _number) for each in meters], position.start()


def _bar_fields(line: str, bar: re.Match[str]) -> list[Field]:
    """Return what a progress bar counts; nothing for one that counts no training steps."""
    description = line[: bar.start()]
    if _OTHER_BAR.search(description) or _EPOCHS_ONLY.search(description):
        return []
    clock = next(group for group in (3, 4, 5) if bar[group])
    fields: list[Field] = [
        ("step", *bar.span(1), float),
        ("elapsed", *bar.span(clock), _clock_seconds),
        (f"{BAR}{bar[2]}", 0, 0, _zero),
    ]
    if epoch := _EPOCH_NUMBER.search(description):
        fields.append(("epoch", *epoch.span(1), float))
    if loss := _BAR_LOSS.search(line):
        fields.append(("loss", *loss.span(1), _number))
    return fields


def _zero(_: str) -> float:
    return 0.0


def _seconds_since_1970(text: str) -> float:
    """Return a date in seconds; 0 for an impossible one."""
    try:
        return (
            float(np.datetime64(text.replace(",", ".").replace(" ", "T"), "us").astype(int)) / 1e6
        )
    except ValueError:
        return 0.0


_AMOUNTS = {"to": "tokens", "sa": "samples"}
_DECIMAL_COMMA = re.compile(r"^\s*(-?\d+),(\d+)\s*$")
_GROUPED = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


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
