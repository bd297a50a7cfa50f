"""Generic reader: step numbers and step times of any log that names them.

It reads lines with `name: value` pairs, progress bars, JSON lines and CSV. Records with the same
names form one table. The step column is a whole number that grows and is called step, iteration or
alike; the time column is found by its name and unit. If several columns could be meant and differ,
nothing is read and the candidates are named.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, cast

import numpy as np

from paceline.core.errors import UserError
from paceline.core.steps import FloatColumn
from paceline.core.units import pluralize
from paceline.engines.log_reading.log_content import LARGEST, LogContent, LogFormat
from paceline.engines.log_reading.records import watch_end, without_colors

NAME = "generic"
MAX_RECORDS = 2_000_000
MAX_NAMES = 64
"""Maximum number of values in a record; longer ones are data, not step lines."""
MAX_LINE = 4_000
MAX_DEPTH = 3
MIN_RECORDS = 3
MIN_GROWING = 0.9
"""Minimum share of records whose step number is above the one before."""
SAME = 0.05
"""Maximum relative difference of the medians of two columns that mean the same."""
MAX_STEP = 2.0**53

_BAR = re.compile(
    r"(\d{1,12})/(\d{1,12}) \[((?:\d{1,4}:)?\d{1,2}:\d{2})<[^,\]]{1,24}, {0,4}"
    r"(?:[\d.]{1,16}|\?) ?(?:s/it|it/s|s/step|step/s)"
)
_PAIR = re.compile(
    r"(?<![\w.])([A-Za-z_][\w/%]{0,40}(?:[ .-][A-Za-z(][\w/%]{0,24}\)?){0,4}(?: ?\([\w/]{1,16}\))?)"
    r"\s{0,4}[:=]\s{0,4}(-?[\d][\d,]{0,20}(?:\.\d{1,18})?(?:[eE][-+]?\d{1,3})?|nan|NaN|inf)"
    r"(?:/\d{1,15})?(?:\s?(ms|us|s|secs?|seconds|min)(?![\w/]|\s{0,4}[:=]))?"
)
_STEP_WORD = re.compile(
    r"(?<![\w.])(?:[Ss]tep|STEP|[Ii]ter(?:ation)?|[Bb]atch|[Uu]pdate)s?[ #\[]{1,3}(\d{1,15})"
    r"(?![\d.]|:\d)"
)
_RATE_WORD = re.compile(
    r"(?<![\w.])([\d][\d,]{0,15}(?:\.\d{1,9})?)([kKMG]?) ?"
    r"(ms/step|ms/it|s(?:ec)?/(?:step|iter|it)|it/s|steps?/s(?:ec)?|tok(?:ens)?/s(?:ec)?"
    r"|samples?/s(?:ec)?)(?![\w/])"
)
_FACTORS = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}
_STEPS = (
    *("step", "global_step", "steps", "iteration", "iter", "it", "update", "trainer/global_step"),
    *("_step", "train/global_step", "train_step", "num_steps", "batch", "num_updates", "n_iter"),
)
"""Names of step numbers, most likely first."""
_NOT_OF_A_STEP = re.compile(
    r"(?:^|[_/ .])(?:data|load\w*|eval\w*|val\w*|test|f(?:or)?wa?r?d\w*|b(?:ack)?wa?r?d\w*|comm\w*"
    r"|optim\w*|save|saving|ckpt|checkpoint|wait|eta|remaining|total|avg|average|mean|running|max"
    r"|min|warmup|startup|compile|peak|sched\w*|lr|lrate)(?:$|[_/ .(])"
)
_BEGIN = r"(?:^|[_/ .(])"
_STEP_NOUN = r"(?:step|iter|iteration|batch|it|update)s?"
_TIME_NOUN = r"(?:time|duration|dt|secs?|seconds|ms|s)"
_PER = r"(?:/|[_ ]?per[_ ]?)"
_PER_S = _PER + r"s(?:ec|econd)?"
_PER_DEVICE_NOUN = _PER + r"(?:gpu|device|rank|npu|chip)"
_TIME = re.compile(
    f"{_BEGIN}(?:{_STEP_NOUN}[_ ]?{_TIME_NOUN}|{_TIME_NOUN}{_PER}{_STEP_NOUN}|dt|time|duration"
    r"|elapsed[_ ]per[_ ]\w+)(?:[_ ]?\(?(?:s|secs?|seconds|ms|milliseconds|us)\)?)?$"
)
_CLOCK = re.compile(
    f"{_BEGIN}(?:elapsed(?:[_ ]time)?|wall[_ ]?(?:clock|time)|_?runtime|_?timestamp"
    r"|relative[_ ]time|time[_ ]elapsed|train[_ ]time|time)"
    r"(?:[_ ]?\(?(?:s|secs?|seconds|ms|min|h)\)?)?$"
)
_STEP_RATE = re.compile(rf"{_BEGIN}(?:{_STEP_NOUN}|iters|batches){_PER_S}\)?$")
_TOKEN_RATE = re.compile(
    rf"{_BEGIN}(?:toks?|tokens?|tps|tgs|wps)(?:{_PER_S})?(?:{_PER_DEVICE_NOUN})?\)?$"
)
_SAMPLE_RATE = re.compile(rf"{_BEGIN}(?:samples?|sequences|examples|imgs|images){_PER_S}\)?$")
_PER_DEVICE = re.compile(r"(?:/|per|[_ ])[_ ]?(?:gpu|device|rank|npu|chip)|tgs")
_UNIT = re.compile(r"(?:[_ (]|^)(ms|milliseconds|us|min|h|s|sec|secs|seconds)\)?$")
_UNIT_FACTORS = {"ms": 1e-3, "milliseconds": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}
_LOSSES = ("loss", "train_loss", "train/loss", "training_loss", "lm_loss", "lm loss", "step_loss")

Record = dict[str, float]


@dataclass(frozen=True)
class ColumnChoice:
    """Columns that the user names, in place of those found by name and unit."""

    step: str | None = None
    time: str | None = None
    rate: str | None = None


@dataclass
class _Table:
    """Records with the same names."""

    names: tuple[str, ...]
    rows: list[tuple[float, ...]] = field(default_factory=list[tuple[float, ...]])

    def column(self, name: str) -> FloatColumn:
        at = self.names.index(name)
        return np.array([row[at] for row in self.rows], dtype=np.float64)


def generic_format(choice: ColumnChoice) -> LogFormat:
    """Return the generic log format, which is never detected by a single line."""
    return LogFormat(
        title="any program",
        marks=(),
        step_line=re.compile(rb"(?!)"),
        read=partial(read, choice),
        example="`step: 10 | loss 2.3 | iter_time 0.52s`",
        numbering="as printed",
        precedence=99,
    )


def column_choice(name: str) -> ColumnChoice | None:
    """Return the columns in `generic:step=it,time=dt`; None for another name.

    Raises UserError for a part that is not `step=`, `time=` or `rate=`.
    """
    head, _, text = name.partition(":")
    if head.lower() != NAME:
        return None
    parts = [part.partition("=") for part in text.split(",") if part]
    allowed = [each.name for each in fields(ColumnChoice)]
    for key, equals, value in parts:
        if key not in allowed or not equals or not value:
            raise UserError(
                f"--engine {name}",
                f"{key!r} is not a column's purpose with a name",
                allowed=", ".join(f"{each}=NAME" for each in allowed),
            )
    return ColumnChoice(**{key: value for key, _, value in parts})


def read(choice: ColumnChoice, blocks: Iterable[bytes], log: LogContent) -> None:
    """Read the steps of the most frequent kind of record that has step numbers and times.

    If there is none, `log.refusal` says why.
    """
    tables: dict[tuple[str, ...], _Table] = {}
    for count, record in enumerate(_records(watch_end(blocks, log))):
        if count >= MAX_RECORDS:
            log.remark(f"only the first {MAX_RECORDS:,} records are read")
            break
        names = tuple(record)
        table = tables.get(names)
        if table is None:
            if len(tables) >= MAX_TABLES:
                continue
            table = tables[names] = _Table(names)
        table.rows.append(tuple(record.values()))
    candidates = sorted(_with_joined_tables(tables.values()), key=lambda table: -len(table.rows))
    refusals: list[str] = []
    for table in candidates[:MAX_TRIES]:
        reading = _reading(table, choice)
        if isinstance(reading, str):
            refusals.append(reading)
            continue
        _store(reading, log)
        return
    reason = refusals[0] if refusals else "no line has a step number and a time"
    log.refusal = f"no step line of a known log format; the generic reader: {reason}"


MAX_TABLES = 2000
MAX_TRIES = 20


@dataclass(frozen=True)
class _Reading:
    """Columns taken from a table."""

    index: Any
    columns: dict[str, FloatColumn]
    sentence: str


def _with_joined_tables(tables: Iterable[_Table]) -> Iterator[_Table]:
    """Yield the tables, and those whose names contain a smaller one's joined with it.

    A program that prints a value only sometimes makes two tables of one.
    """
    by_step: dict[str, list[_Table]] = defaultdict(list)
    for table in tables:
        if len(table.rows) >= 1 and (step := _step_name(table.names)):
            by_step[step].append(table)
    for group in by_step.values():
        largest = max(group, key=lambda table: len(table.rows))
        names = largest.names
        rows = list(largest.rows)
        for other in group:
            if other is not largest and set(names) <= set(other.names):
                places = [other.names.index(name) for name in names]
                rows += [tuple(row[at] for at in places) for row in other.rows]
        if len(rows) > len(largest.rows):
            at = names.index(_step_name(names) or "")
            rows.sort(key=lambda row: row[at])
            yield _Table(names, rows)
        yield from group


def _step_name(names: Iterable[str]) -> str | None:
    normal = {_normal(name): name for name in reversed(list(names))}
    return next((normal[step] for step in _STEPS if step in normal), None)


def _normal(name: str) -> str:
    return " ".join(name.lower().split()).replace(" ", "_") if "/" not in name else name.lower()


def _reading(table: _Table, choice: ColumnChoice) -> _Reading | str:
    """Return the columns of a table, or why it has none that can be used."""
    for name_of_user in (choice.step, choice.time, choice.rate):
        if name_of_user is not None and name_of_user not in table.names:
            return f"there is no column {name_of_user!r}; the columns are {', '.join(table.names)}"
    step = choice.step or _step_name(table.names)
    if step is None:
        return f"no column is a step number: {', '.join(table.names)}"
    index = table.column(step)
    if len(index) < MIN_RECORDS:
        lines = pluralize(len(index), "line")
        return f"only {lines} with the columns {', '.join(table.names)}"
    whole = np.isfinite(index) & (index >= 0) & (index < MAX_STEP) & (index == np.floor(index))
    if not whole.all() or (np.diff(index) > 0).mean() < MIN_GROWING:
        return f"column {step!r} does not grow like a step number"
    speed = _speed(table, index, choice)
    if isinstance(speed, str):
        return speed
    columns, sentence = speed
    loss = next((name for name in table.names if _normal(name) in _LOSSES), None)
    if loss:
        values = table.column(loss)
        columns["loss"] = np.where(np.isnan(values), math.inf, np.clip(values, -LARGEST, LARGEST))
    return _Reading(index.astype(np.int64), columns, f"steps are column {step!r}; {sentence}")


def _speed(
    table: _Table, index: FloatColumn, choice: ColumnChoice
) -> tuple[dict[str, FloatColumn], str] | str:
    """Return the columns with the speed of the steps and what they are, or why there are none."""
    times = _column_of(table, choice.time) if choice.time else _times(table)
    rates = _column_of(table, choice.rate) if choice.rate else _step_rates(table)
    if choice.rate and not choice.time:
        times = {}
    if not times and rates:
        times = {name: 1 / np.where(rate > 0, rate, np.nan) for name, rate in rates.items()}
    clocks = {} if times else _clocks(table, index)
    times = times or clocks
    columns: dict[str, FloatColumn] = {}
    parts: list[str] = []
    if times:
        names, medians = list(times), [float(np.nanmedian(values)) for values in times.values()]
        if max(medians) > (1 + SAME) * min(medians):
            alternatives = ", ".join(
                f"{n!r} ({m:.4g} s)" for n, m in zip(names, medians, strict=True)
            )
            return (
                f"several columns may be the step time: {alternatives}; name one by --time-column"
            )
        columns["step_time_s"] = times[names[0]]
        source = "differences of column" if clocks else "column"
        parts.append(f"step times are {source} {names[0]!r}")
    tokens = {name: table.column(name) for name in table.names if _TOKEN_RATE.search(_normal(name))}
    for name, values in tokens.items():
        if _PER_DEVICE.search(_normal(name)):
            columns["tokens_per_s_per_device"] = values
            parts.append(f"tokens/s per device are column {name!r}")
        elif "step_time_s" in columns:
            columns["tokens"] = values * columns["step_time_s"]
            parts.append(f"tokens/s of all devices are column {name!r}")
    samples = [name for name in table.names if _SAMPLE_RATE.search(_normal(name))]
    if len(samples) == 1:
        columns["samples_per_s"] = table.column(samples[0])
        parts.append(f"samples/s of all devices are column {samples[0]!r}")
    if not {"step_time_s", "samples_per_s", "tokens_per_s_per_device"} & columns.keys():
        return f"no column is a time or a rate: {', '.join(table.names)}"
    return columns, "; ".join(parts)


def _column_of(table: _Table, name: str) -> dict[str, FloatColumn]:
    return {name: table.column(name) * _factor(_normal(name))}


def _times(table: _Table) -> dict[str, FloatColumn]:
    """Return columns with the time of a step in seconds; the best named ones if several are."""
    candidates: dict[str, FloatColumn] = {}
    for name in table.names:
        normal = _normal(name)
        if _TIME.search(normal) and not _NOT_OF_A_STEP.search(normal):
            values = table.column(name) * _factor(normal)
            sound = values[np.isfinite(values)]
            if len(sound) and (sound > 0).mean() > MIN_GROWING and not _is_clock(sound):
                candidates[name] = values
    best = {
        name: values
        for name, values in candidates.items()
        if re.search("step|iter|it$", name.lower())
    }
    return best or candidates


def _is_clock(values: FloatColumn) -> bool:
    """Return whether values always grow, as the time since the start does."""
    return (
        len(values) >= MIN_RECORDS
        and bool((np.diff(values) > 0).all())
        and values[-1] > 2 * values[0]
    )


def _step_rates(table: _Table) -> dict[str, FloatColumn]:
    return {
        name: table.column(name)
        for name in table.names
        if _STEP_RATE.search(_normal(name)) and not _NOT_OF_A_STEP.search(_normal(name))
    }


def _clocks(table: _Table, index: FloatColumn) -> dict[str, FloatColumn]:
    """Return the times per step from the first clock, a time that grows from line to line."""
    for name in table.names:
        normal = _normal(name)
        if not _CLOCK.search(normal):
            continue
        values = table.column(name) * _factor(normal)
        if not np.isfinite(values).all() or (np.diff(values) >= 0).mean() < MIN_GROWING:
            continue
        steps, seconds = np.diff(index), np.diff(values)
        times = np.full(len(index), np.nan)
        sound = (steps > 0) & (seconds > 0)
        times[1:][sound] = seconds[sound] / steps[sound]
        # A clock of whole seconds has differences of 0: the mean over all lines is exact.
        if not sound.any():
            return {}
        if not sound.all():
            times[1:] = (values[-1] - values[0]) / (index[-1] - index[0])
        return {name: times}
    return {}


def _factor(normal: str) -> float:
    match = _UNIT.search(normal)
    return _UNIT_FACTORS.get(match[1], 1.0) if match else 1.0


def _store(reading: _Reading, log: LogContent) -> None:
    columns = {
        name: np.where(np.abs(values) > LARGEST, np.inf, values)
        for name, values in reading.columns.items()
    }
    log.add_steps(reading.index, **columns)
    log.remark(f"read by the generic reader: {reading.sentence}")


def _records(blocks: Iterable[bytes]) -> Iterator[Record]:
    """Yield the named numbers of each line, in the order of the line."""
    header: list[str] = []
    delimiter, before = "", ""
    for number, line in enumerate(_lines(blocks)):
        if number == 1:
            header, delimiter = _header(before, line)
        elif number == 0:
            before = line
        if header:
            record = _csv_record(line, header, delimiter)
        else:
            record = _json_record(line) if line[0] == "{" else _text_record(line)
        if 2 <= len(record) <= MAX_NAMES:
            yield record


def _lines(blocks: Iterable[bytes]) -> Iterator[str]:
    for block in blocks:
        text = without_colors(block).decode("utf-8", "replace").replace("\r", "\n")
        yield from (line for line in text.split("\n") if line and len(line) <= MAX_LINE)


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
    return bool(re.fullmatch(r"[A-Za-z_][\w /().:%-]{0,80}", text)) and not re.search(
        r"[:=] ?\d", text
    )


def _csv_record(line: str, header: list[str], delimiter: str) -> Record:
    cells = next(csv.reader([line], delimiter=delimiter), list[str]())
    if len(cells) != len(header):
        return {}
    numbers = {name: _number(cell) for name, cell in zip(header, cells, strict=True)}
    return {name: value for name, value in numbers.items() if value is not None}


def _json_record(line: str) -> Record:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return _text_record(line)
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


def _text_record(line: str) -> Record:
    """Return the named numbers of a line of text; a progress bar counts its own steps."""
    if bar := _BAR.search(line):
        # Bars with another total are downloads or evaluations: they form tables of their own.
        return {"step": float(bar[1]), "elapsed": _clock_seconds(bar[3]), f"bar of {bar[2]}": 0.0}
    record: Record = {}
    for name, value, unit in _PAIR.findall(line):
        number = _number(value)
        if number is not None:
            full = name.strip()
            record.setdefault(f"{full} ({unit})" if unit else full, number)
    if not _step_name(record) and (word := _STEP_WORD.search(line)):
        record["step"] = float(word[1])
    for value, suffix, unit in _RATE_WORD.findall(line):
        number = _number(value)
        if number is not None:
            record.setdefault(unit, number * _FACTORS.get(suffix, 1.0))
    return record


def _clock_seconds(text: str) -> float:
    parts = [int(part) for part in text.split(":")]
    return float(sum(part * 60**power for power, part in enumerate(reversed(parts))))


def _number(text: str) -> float | None:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if abs(value) < LARGEST else math.inf
