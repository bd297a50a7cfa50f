"""Generic reader: step numbers and step times of any log that names them.

It reads lines with `name: value` pairs, progress bars, JSON lines and CSV. Records with the same
names form one table. The step column is a whole number that grows and is called step, iteration or
alike; the time column is found by its name and unit. If several columns could be meant and differ,
nothing is read and the candidates are named.
"""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import chain, islice, pairwise
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from paceline.core.errors import UserError
from paceline.core.steps import FloatColumn
from paceline.core.units import pluralize
from paceline.engines.log_reading.generic_records import (
    BAR,
    EVALUATION,
    STAMP,
    UNIT_WORDS,
    UNITS,
    named_records,
    normal_name,
    step_name,
)
from paceline.engines.log_reading.log_content import LARGEST, LogContent, LogFormat
from paceline.engines.log_reading.records import ratio, watch_end

NAME = "generic"
MAX_RECORDS = 1_000_000
MIN_RECORDS = 3
MIN_GROWING = 0.9
"""Minimum share of records whose step number is above the one before."""
SAME = 0.05
"""Maximum relative difference of the medians of two columns that mean the same."""
MAX_STEP = 2.0**53
_MICRO_STEPS = ("iter", "iteration", "it", "batch", "batches", "batch_idx", "n_iter", "micro_step")
_STEP_LINE = re.compile(
    rb"(?i)(?<![a-z])(?:step|iter|iteration|update|batch)s?[\W_]{1,4}\d"
    rb"|\d/[\d?]{1,12} \[\d\d?:\d\d<"
)
"""Sign that a line is about a step, after which an error of NaN was survived."""
_NOT_OF_A_STEP = re.compile(
    r"(?:^|[_/ .])(?:data|load\w*|eval\w*|val\w*|test|f(?:or)?wa?r?d\w*|b(?:ack)?wa?r?d\w*|comm\w*"
    r"|optim\w*|save|saving|ckpt|checkpoint|wait|eta|remaining|total|avg|average|mean|running|max"
    r"|min|warmup|startup|compile|peak|sched\w*|lr|lrate|epoch|generation|rollout|inference|prompt"
    r"|response|cumulative)(?:$|[_/ .(])"
)
_BEGIN = r"(?:^|[_/ .(|])"
_STEP_NOUN = r"(?:step|iter|iteration|batch|it|update)s?"
_END_UNIT = rf"(?:[_ ]?\(?(?:{UNIT_WORDS})\)?)?$"
_TIME_NOUN = rf"(?:time|duration|dt|{UNIT_WORDS})"
_PER = r"(?:/|[_ ]?per[_ ]?)"
_PER_S = _PER + r"s(?:ec|econd)?"
_PER_DEVICE_NOUN = _PER + r"(?:gpu|device|rank|npu|chip)"
_TIME = re.compile(
    f"{_BEGIN}(?:{_STEP_NOUN}[_ ]?{_TIME_NOUN}|{_TIME_NOUN}{_PER}{_STEP_NOUN}|dt|time|duration"
    rf"|elapsed[_ ]per[_ ]\w+){_END_UNIT}"
)
_SINCE_START = (
    r"(?:elapsed(?:[_ ]time)?|wall[_ ]?(?:clock|time)|_?runtime|_?timestamp|relative[_ ]time"
    r"|time[_ ]elapsed|train(?:ing)?[_ ]time)"
)
_CLOCK_ONLY = re.compile(f"{_BEGIN}{_SINCE_START}{_END_UNIT}")
"""Names of the time since the start, which is never that of a step."""
_CLOCK = re.compile(f"{_BEGIN}(?:{_SINCE_START}|time){_END_UNIT}")
_STEP_RATE = re.compile(rf"{_BEGIN}(?:{_STEP_NOUN}|iters|batches){_PER_S}\)?$")
_TOKEN_RATE = re.compile(
    rf"{_BEGIN}(?:(?:toks?|tokens?){_PER_S}|tps|tgs|wps)(?:{_PER_DEVICE_NOUN})?\)?$"
    rf"|{_BEGIN}(?:toks?|tokens?){_PER_DEVICE_NOUN}{_PER_S}\)?$"
)
_SAMPLE_RATE = re.compile(rf"{_BEGIN}(?:samples?|sequences|examples|imgs|images){_PER_S}\)?$")
_PER_DEVICE = re.compile(r"gpu|device|rank|npu|chip|tgs")
_UNIT = re.compile(rf"(?:[_ (]|^)({'|'.join(sorted(UNITS, key=len, reverse=True))})\)?$")
_LOSSES = ("loss", "train_loss", "train/loss", "training_loss", "lm_loss", "lm loss", "step_loss")


@dataclass(frozen=True)
class ColumnChoice:
    """Columns that the user names, in place of those found by name and unit."""

    step: str | None = None
    time: str | None = None
    rate: str | None = None


class _Table:
    """Records with the same names."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.places = array("q")
        """Number of the line of each record in the log."""
        self._columns = [array("d") for _ in names]

    def __len__(self) -> int:
        return len(self.places)

    def extend(self, places: Iterable[int], columns: Iterable[Iterable[float]]) -> None:
        """Append records."""
        self.places.extend(array("q", places))
        for column, values in zip(self._columns, columns, strict=True):
            column.extend(array("d", values))

    def sort(self) -> None:
        """Put the records in the order of the log."""
        places = np.array(self.places)
        if (places[1:] < places[:-1]).any():
            order = np.argsort(places)
            self.places = array("q", places[order].tobytes())
            self._columns = [array("d", np.array(each)[order].tobytes()) for each in self._columns]

    def column(self, name: str) -> FloatColumn:
        """Return the values of a name, without a copy. The table cannot be extended afterwards."""
        values = self._columns[self.names.index(name)]
        return np.frombuffer(values) if values else np.empty(0)

    def union(self, others: Iterable[_Table]) -> _Table:
        """Return the records of this table and the same columns of others, which have more."""
        table = _Table(self.names)
        for other in (self, *others):
            table.extend(other.places, map(other.column, self.names))
        table.sort()
        return table


def generic_format(choice: ColumnChoice) -> LogFormat:
    """Return the generic log format, which is never detected by a single line."""
    return LogFormat(
        title="any program",
        marks=(),
        step_line=_STEP_LINE,
        read=partial(read, choice),
        example="`step: 10 | loss 2.3 | iter_time 0.52s`",
        numbering="as printed",
        precedence=99,
    )


def column_choice(name: str) -> ColumnChoice | None:
    """Return the columns in `generic:step=it,time=dt`; None for another name.

    Commas and other signs in the name of a column are written as in a URL. Raises UserError for a
    part that is not `step=`, `time=` or `rate=`.
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
    return ColumnChoice(**{key: unquote(value) for key, _, value in parts})


def chosen_format(choice: ColumnChoice) -> str:
    """Return the name of the generic format with a choice of columns, as `column_choice` reads."""
    parts = [f"{key}={quote(value, safe='')}" for key, value in asdict(choice).items() if value]
    return f"{NAME}:{','.join(parts)}" if parts else NAME


def read(choice: ColumnChoice, blocks: Iterable[bytes], log: LogContent) -> None:
    """Read the steps of the most frequent kind of record that has step numbers and times.

    If there is none, `log.refusal` says why.
    """
    # Nothing else holds the tables: they are released before the steps are copied into the log.
    reading = _first_reading(_with_joined_tables(_tables(watch_end(blocks, log), log)), choice)
    if isinstance(reading, str):
        log.refusal = f"no step line of a known log format; the generic reader: {reading}"
    else:
        _store(reading, log)


def _first_reading(tables: Iterable[_Table], choice: ColumnChoice) -> _Reading | str:
    """Return the columns of the largest table that has steps and times, or why there is none."""
    by_size = sorted(tables, key=lambda table: -len(table))[:MAX_TRIES]
    refusals: list[str] = []
    for table in sorted(
        by_size, key=lambda table: any(_surrounds(other, table) for other in by_size)
    ):
        reading = _reading(table, choice)
        if not isinstance(reading, str):
            return reading
        refusals.append(reading)
    return refusals[0] if refusals else "no line has a step number and a time"


def _tables(blocks: Iterable[bytes], log: LogContent) -> list[_Table]:
    """Return the records of a log by their names, in the order of the log."""
    tables: dict[tuple[str, ...], _Table] = {}
    num_records = 0
    for groups in named_records(blocks):
        num_before = num_records
        num_records += sum(len(group.places) for group in groups)
        end = None
        if num_records > MAX_RECORDS:
            end = sorted(chain(*(group.places for group in groups)))[MAX_RECORDS - num_before]
        for group in groups:
            places, columns = group.places, group.columns
            if end is not None:
                places = places[: bisect_left(places, end)]
                columns = [islice(column, len(places)) for column in columns]
            if places and (group.names in tables or len(tables) < MAX_TABLES):
                tables.setdefault(group.names, _Table(group.names)).extend(places, columns)
        if end is not None:
            log.remark(f"only the first {MAX_RECORDS:,} records are read")
            break
    for table in tables.values():
        table.sort()
    return list(tables.values())


MAX_TABLES = 2000
MAX_TRIES = 20


@dataclass(frozen=True)
class _Reading:
    """Columns taken from a table."""

    index: Any
    columns: dict[str, FloatColumn]
    sentence: str
    resolution_s: float


def _with_joined_tables(tables: Iterable[_Table]) -> Iterator[_Table]:
    """Yield the tables, and those whose names contain a smaller one's joined with it.

    A program that prints a value only sometimes makes two tables of one.
    """
    with_steps = [table for table in tables if step_name(table.names)]
    training = [table for table in with_steps if not any(map(EVALUATION.search, table.names))]
    by_step: dict[str, list[_Table]] = defaultdict(list)
    for table in training or filter(_trains, with_steps):
        by_step[step_name(table.names) or ""].append(table)
    for group in by_step.values():
        largest = max(group, key=len)
        names = set(largest.names)
        others = [other for other in group if other is not largest and names <= set(other.names)]
        if others:
            yield largest.union(others)
        yield from group


def _surrounds(outer: _Table, inner: _Table) -> bool:
    """Return whether a bar advances by several steps between the starts of another one.

    The inner bar is then that of evaluations.
    """
    if outer is inner or not (_is_bar(outer) and _is_bar(inner)):
        return False
    steps, inner_steps = outer.column("step"), inner.column("step")
    starts = np.array(inner.places)[1:][np.diff(inner_steps) < 0]
    if len(outer) < MIN_RECORDS or not len(starts) or (np.diff(steps) < 0).any():
        return False
    at_starts = np.searchsorted(outer.places, starts)
    if at_starts.min() < 1:
        return False
    steps_at_starts = steps[np.minimum(at_starts, len(steps)) - 1]
    return steps_at_starts[0] > 1 and bool((np.diff(steps_at_starts) > 1).all())


def _is_bar(table: _Table) -> bool:
    return any(name.startswith(BAR) for name in table.names)


def _trains(table: _Table) -> bool:
    """Return whether a table with columns of evaluations also has those of training."""
    return any(normal_name(name) in _LOSSES or "train" in name.lower() for name in table.names)


def _reading(table: _Table, choice: ColumnChoice) -> _Reading | str:
    """Return the columns of a table, or why it has none that can be used."""
    for name_of_user in (choice.step, choice.time, choice.rate):
        if name_of_user is not None and name_of_user not in table.names:
            return f"there is no column {name_of_user!r}; the columns are {', '.join(table.names)}"
    step = choice.step or step_name(table.names)
    if step is None:
        return f"no column is a step number: {', '.join(table.names)}"
    index = table.column(step)
    if len(index) < MIN_RECORDS:
        lines = pluralize(len(index), "line")
        return f"only {lines} with the columns {', '.join(table.names)}"
    whole = np.isfinite(index) & (index >= 0) & (index < MAX_STEP) & (index == np.floor(index))
    refusal = f"column {step!r} does not grow like a step number"
    if not whole.all():
        return refusal
    index, sentence = _over_epochs(table, index)
    first = np.append(True, np.diff(index) != 0)
    if first.sum() < MIN_RECORDS or (np.diff(index[first]) > 0).mean() < MIN_GROWING:
        return refusal
    # Redrawn bars and other ranks repeat a step: the first line has the time, the last the loss.
    losses = {name: table.column(name) for name in table.names if normal_name(name) in _LOSSES}
    last = np.append(first[1:], True)
    speed = _speed(table, index, choice)
    if isinstance(speed, str):
        return speed
    columns, speed_sentence, resolution_s = speed
    index, columns = index[first], {name: values[first] for name, values in columns.items()}
    sentence = f"steps are column {step!r}{sentence}; {speed_sentence}"
    if losses:
        loss, values = next(iter(losses.items()))
        values = values[last]
        columns["loss"] = np.where(np.isnan(values), math.inf, np.clip(values, -LARGEST, LARGEST))
        sentence += f"; losses are column {loss!r}"
    return _Reading(index.astype(np.int64), columns, sentence, resolution_s)


def _over_epochs(table: _Table, index: FloatColumn) -> tuple[FloatColumn, str]:
    """Return step numbers that continue over epochs if each starts again, and what they are."""
    bar = next((name for name in table.names if name.startswith(BAR)), "")
    text = " of a progress bar, which may count micro-batches" if bar else ""
    epoch = next((name for name in table.names if normal_name(name) == "epoch"), None)
    if epoch is None:
        return index, text
    epochs, steps = table.column(epoch), np.diff(index)
    starts = np.append(False, (steps < 0) & (epochs[1:] > epochs[:-1]))
    if not starts.any():
        return index, text
    total = bar.removeprefix(BAR)
    distance = float(np.median(steps[steps > 0])) if (steps > 0).any() else 1.0
    before = np.append(0.0, index[:-1])
    length = float(total) if total.isdigit() else before + distance - index
    numbers = index + np.cumsum(np.where(starts, length, 0.0))
    return (numbers, f"{text}, over all epochs") if numbers.max() < MAX_STEP else (index, text)


def _speed(
    table: _Table, index: FloatColumn, choice: ColumnChoice
) -> tuple[dict[str, FloatColumn], str, float] | str:
    """Return the columns with the speed of the steps, what they are, and the resolution of times.

    If there are none, the reason is returned.
    """
    times = _column_of(table, choice.time) if choice.time else _times(table)
    rates = _column_of(table, choice.rate) if choice.rate else _step_rates(table)
    if choice.rate and not choice.time:
        times = {}
    if not times and rates:
        times = {name: 1 / np.where(rate > 0, rate, np.nan) for name, rate in rates.items()}
        times = {name: values for name, values in times.items() if np.isfinite(values).any()}
    clocks, resolution_s = ({}, 0.0) if times else _clocks(table, index)
    times = times or clocks
    columns: dict[str, FloatColumn] = {}
    parts: list[str] = []
    if times:
        if differing := _differing(times, " s"):
            return f"several columns may be the step time: {differing}; name one by --time-column"
        name = next(iter(times))
        factor, text = (1.0, "") if clocks else _per_step(table, index, name, times[name])
        columns["step_time_s"] = times[name] * factor
        parts.append(f"step times are {'differences of ' if clocks else ''}column {name!r}{text}")
    parts += _add_rates(table, columns)
    if not {"step_time_s", "samples_per_s", "tokens_per_s_per_device"} & columns.keys():
        return f"no column is a time or a rate: {', '.join(table.names)}"
    return columns, "; ".join(parts), resolution_s


def _per_step(
    table: _Table, index: FloatColumn, name: str, times: FloatColumn
) -> tuple[float, str]:
    """Return the factor from a printed time to that of a step, and what it is.

    A time of iterations counts all those of a step if the log has both numbers. A time that is as
    long as the time between the lines, by their time stamps, is that of all steps between them.
    """
    steps = np.diff(index)
    grows = steps > 0
    distance = float(np.median(steps[grows]))
    micro = next((each for each in table.names if normal_name(each) in _MICRO_STEPS), None)
    if micro and re.search("iter|it/s|batch", name) and "step" not in name:
        counts = table.column(micro)
        counts = np.diff(np.where(np.isfinite(counts), counts, 0.0))
        per_step = float(np.median(counts[grows])) / distance
        if per_step > 1 and micro not in (step_name(table.names), name):
            return per_step, f", times {per_step:g} of column {micro!r} per step"
    if STAMP in table.names and distance > 1:
        between = float(np.median(np.diff(table.column(STAMP))[grows]))
        time = float(np.nanmedian(times))
        if abs(between - time) <= max(0.1 * time, 1.0) < 0.5 * time:
            return 1 / distance, f", which is the time of {distance:g} steps by the time stamps"
    return 1.0, ""


def _differing(columns: Mapping[str, FloatColumn], unit: str) -> str:
    """Return the columns with their medians if these differ; an empty text if they agree."""
    medians = {name: float(np.nanmedian(values)) for name, values in columns.items()}
    if max(medians.values()) <= (1 + SAME) * min(medians.values()):
        return ""
    return ", ".join(f"{name!r} ({median:.4g}{unit})" for name, median in medians.items())


def _add_rates(table: _Table, columns: dict[str, FloatColumn]) -> Iterator[str]:
    """Add token and sample rates to the columns; yield what was taken, or why not."""
    kinds = ("tokens/s of all devices", "tokens/s per device", "samples/s of all devices")
    rates_by_kind = {kind: dict[str, FloatColumn]() for kind in kinds}
    for name in table.names:
        normal, values = normal_name(name), table.column(name)
        if _NOT_OF_A_STEP.search(normal) or not (np.isfinite(values) & (values > 0)).any():
            continue
        is_per_device = _PER_DEVICE.search(normal) is not None
        if _TOKEN_RATE.search(normal):
            kind = "tokens/s per device" if is_per_device else "tokens/s of all devices"
            rates_by_kind[kind][name] = values
        elif _SAMPLE_RATE.search(normal) and not is_per_device:
            rates_by_kind["samples/s of all devices"][name] = values
    for kind, rates in rates_by_kind.items():
        if not rates:
            continue
        if differing := _differing(rates, ""):
            yield f"{kind} are not taken, because several columns differ: {differing}"
            continue
        name, values = next(iter(rates.items()))
        if kind == "tokens/s per device":
            columns["tokens_per_s_per_device"] = values
        elif kind == "samples/s of all devices":
            columns["samples_per_s"] = values
        elif "step_time_s" in columns:
            columns["tokens"] = values * columns["step_time_s"]
        else:
            continue
        yield f"{kind} are column {name!r}"


def _column_of(table: _Table, name: str) -> dict[str, FloatColumn]:
    return {name: table.column(name) * _factor(normal_name(name))}


def _times(table: _Table) -> dict[str, FloatColumn]:
    """Return columns with the time of a step in seconds; the best named ones if several are."""
    candidates: dict[str, FloatColumn] = {}
    for name in table.names:
        normal = normal_name(name)
        if not _TIME.search(normal) or _NOT_OF_A_STEP.search(normal) or _CLOCK_ONLY.search(normal):
            continue
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
    """Return whether values grow from line to line, as the time since the start does."""
    steps = np.diff(values)
    if len(steps) < MIN_RECORDS - 1 or values.min() > LATEST_CLOCK_S:
        return values.min() > LATEST_CLOCK_S
    # A clock of whole seconds repeats values.
    return (steps > 0).mean() >= MIN_GROWING or (
        (steps >= 0).mean() >= MIN_GROWING and (steps > 0).mean() >= 0.3
    )


COARSE_S = 100.0
"""Seconds in which a clock of whole seconds is precise enough: 1%."""
LATEST_CLOCK_S = 1e8
"""Seconds above which a time is a date since 1970."""


def _step_rates(table: _Table) -> dict[str, FloatColumn]:
    return {
        name: table.column(name)
        for name in table.names
        if _STEP_RATE.search(normal_name(name)) and not _NOT_OF_A_STEP.search(normal_name(name))
    }


def _clocks(table: _Table, index: FloatColumn) -> tuple[dict[str, FloatColumn], float]:
    """Return the times per step from the first clock, a time that grows from line to line.

    A clock or step number that goes back starts a new stretch, whose first step has no time. With a
    clock of whole seconds each step has the mean time of some lines, which take `COARSE_S` or more.
    The resolution of the times in seconds comes second.
    """
    trains = any("loss" in name.lower() for name in table.names)
    for name in table.names:
        normal = normal_name(name)
        is_stamp = name == STAMP and trains
        if not is_stamp and (not _CLOCK.search(normal) or _NOT_OF_A_STEP.search(normal)):
            continue
        values = table.column(name) * _factor(normal)
        if not np.isfinite(values).all():
            continue
        steps, seconds = np.diff(index), np.diff(values)
        if (seconds >= 0).mean() < MIN_GROWING:
            continue
        times, size, num_steps = np.full(len(index), np.nan), 1, [1.0]
        if (is_whole := bool((values % 1 == 0).all())) and (
            mean := np.clip(seconds, 0, None).mean()
        ):
            size = math.ceil(min(COARSE_S / mean, len(index)))
        starts = [0, *(np.flatnonzero((steps < 0) | (seconds < 0)) + 1).tolist(), len(index)]
        for first, end in pairwise(starts):
            bounds = np.arange(first, end - 1, size)
            bounds = np.append(bounds[: max(1, (end - 1 - first) // size)], end - 1)
            if len(bounds) > 1:
                means = ratio(np.diff(values[bounds]), np.diff(index[bounds]))
                times[first + 1 : end] = np.repeat(means, np.diff(bounds))
                num_steps.append(max(float(np.diff(index[bounds]).min()), 1.0))
        if np.isfinite(times).any():
            return {name: times}, is_whole / np.median(num_steps[1:]).item()
    return {}, 0.0


def _factor(normal: str) -> float:
    match = _UNIT.search(normal)
    return UNITS[match[1]] if match else 1.0


def _store(reading: _Reading, log: LogContent) -> None:
    for values in reading.columns.values():
        values[np.abs(values) > LARGEST] = np.inf
    log.add_steps(reading.index, **reading.columns)
    log.resolution_s = reading.resolution_s
    log.remark(f"read by the generic reader: {reading.sentence}")
