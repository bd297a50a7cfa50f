"""Log formats as data: a YAML file with the pattern of a step line and its fields.

    title: MMEngine
    source: runner/loops.py and hooks/logger_hook.py of open-mmlab/mmengine, v0.10
    mark: Iter(train)
    line: 'Iter\\(train\\) +\\[ *{step}/ *{total_steps}\\]'
    fields: [' time: {step_time_s}', ' loss: {loss}', ' memory: {reserved_mib:count}']
    example: 'Iter(train) [  10/1000] ... time: 2.7510 ... loss: 1.3000'

Patterns are regular expressions. A placeholder `{NAME}` stands for a number, whose name gives its
meaning and unit; `{NAME:KIND}` for another way to print it. Without `{step}` in `line`, the lines
are counted from 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, StringConstraints, model_validator

from paceline.core.steps import FloatColumn
from paceline.core.units import GIB, MIB, TERA
from paceline.core.value import PositiveInt, Value
from paceline.engines.log_reading.log_content import (
    FACT_NAMES,
    LARGEST,
    LogContent,
    LogFormat,
    decimal_step,
    excerpt,
    numbers,
    whole_numbers,
)
from paceline.engines.log_reading.records import (
    NUMBER,
    Records,
    RunningTotals,
    product_of,
    ratio,
    store_total_steps,
    store_whole_numbers,
    watch_end,
    without_colors,
)
from paceline.files.user_file import settings_folder
from paceline.files.yaml_file import read_model, read_shipped

PRECEDENCE = 7
"""Tables come after formats with a reader of their own."""
GIGA = 1e9
CLOCK_FACTORS = (1.0, 60.0, 3600.0)
"""Seconds in the parts of a clock, from the last one."""
SUFFIXES = {b"K": 1e3, b"M": 1e6, b"B": 1e9, b"G": 1e9, b"T": 1e12}
FACTORS: dict[str, tuple[str, float]] = {
    "step_time_s": ("step_time_s", 1.0),
    "step_time_ms": ("step_time_s", 1e-3),
    "forward_ms": ("forward", 1e-3),
    "backward_ms": ("backward", 1e-3),
    "optimizer_ms": ("optimizer", 1e-3),
    "steps_per_s": ("steps_per_s", 1.0),
    "elapsed_s": ("elapsed_s", 1.0),
    "elapsed_min": ("elapsed_s", 60.0),
    "timestamp": ("timestamp", 1.0),
    "loss": ("loss", 1.0),
    "grad_norm": ("grad_norm", 1.0),
    "tokens": ("tokens", 1.0),
    "total_tokens": ("total_tokens", 1.0),
    "total_giga_tokens": ("total_tokens", GIGA),
    "global_batch": ("global_batch", 1.0),
    "samples_per_s": ("samples_per_s", 1.0),
    "tokens_per_s": ("tokens_per_s", 1.0),
    "tokens_per_s_per_device": ("tokens_per_s_per_device", 1.0),
    "tflops_per_device": ("flops_per_s_per_device", TERA),
    "mfu": ("mfu", 1.0),
    "mfu_percent": ("mfu", 0.01),
    **{
        f"{kind}_{unit}": (f"{kind}_bytes", factor)
        for kind in ("allocated", "reserved")
        for unit, factor in {"mb": 1e6, "mib": MIB, "gb": GIGA, "gib": GIB}.items()
    },
}
"""Fields of a step line: the column of each, and the factor to its base unit."""
COLUMNS = frozenset(
    {
        *("step_time_s", "loss", "grad_norm", "tokens", "global_batch", "samples_per_s"),
        *("tokens_per_s_per_device", "flops_per_s_per_device", "mfu"),
        *("allocated_bytes", "reserved_bytes"),
    }
)
"""Columns that are stored as they are; the others serve to compute these."""
KINDS: dict[str, bytes] = {
    "number": NUMBER,
    "count": rb"([0-9,]{1,24})",
    "suffix": rb"([0-9.]{1,24}[KMBGT]?)",
    "clock": rb"((?:\d{1,4}:)?\d{1,2}:\d{2})",
    "date": rb"(\d{4}[-/]\d\d[-/]\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)",
    "text": rb"([^\s,|]{1,80})",
}
"""Ways to print a value: 1.5e-3; 12,000; 131.07K; 01:02:03; 2026-01-31 12:00:00; a word."""
CLOCKS = ("timestamp", "elapsed_s", "elapsed_min")
PRINTED_TIMES = ("step_time_s", "step_time_ms", "forward_ms", "steps_per_s")
MAX_DEVICES = 1 << 20
RATES = ("samples_per_s", "steps_per_s", "tokens_per_s")
"""Rates of the whole run, over all devices."""
_PLACEHOLDER = re.compile(r"\{([a-z_]+)(?::([a-z]+))?\}")
_COUNTERS = ("step", "total_steps")


def _pattern(text: str) -> str:
    try:
        expression, _ = _compile(text, "capture")
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from error
    if expression.match(b""):
        raise ValueError(f"{text!r} matches an empty line")
    if expression.groups != len(_placeholders(text)):
        raise ValueError(f"{text!r} has groups of its own; write (?:...)")
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]


class FormatTable(Value):
    """Log format as a user's file declares it."""

    title: Annotated[str, StringConstraints(min_length=1)]
    """Name of the program that writes the log."""
    source: str = ""
    """Part of the program that prints the line, and its versions."""
    mark: Annotated[str, StringConstraints(min_length=4)]
    """Text that every step line contains. It is searched first, which is fast."""
    line: Pattern
    """Pattern of a step line or of its start."""
    fields: tuple[Pattern, ...] = ()
    """Patterns of further values in the rest of the line, with one placeholder each."""
    settings: tuple[Pattern, ...] = ()
    """Patterns of settings anywhere in the log, with one placeholder each."""
    figures: tuple[Pattern, ...] = ()
    """Patterns of rates of the whole run, with one placeholder each."""
    several_lines: bool = False
    """True if the fields of a step are on the lines up to the next step."""
    numbering: Literal["from 0", "from 1"] = "from 1"
    steps_per_line: PositiveInt | None = None
    """Steps over which a line averages; by default the distance of the step numbers."""
    end_marker: str | None = None
    """Text of the line with which the program reports its end."""
    convention: str | None = None
    """FLOPs convention of printed FLOP/s."""
    example: Annotated[str, StringConstraints(min_length=1)]
    """Example of a step line."""

    @model_validator(mode="after")
    def _check_placeholders(self) -> FormatTable:
        for text in (self.line, *self.fields):
            names_allowed = {*FACTORS, *(_COUNTERS if text == self.line else ())}
            for name in _placeholders(text):
                if name not in names_allowed:
                    raise ValueError(
                        f"{{{name}}} is unknown; allowed: {', '.join(sorted(names_allowed))}"
                    )
        for text in self.settings:
            for name in _placeholders(text):
                if name not in FACT_NAMES:
                    allowed = ", ".join(FACT_NAMES)
                    raise ValueError(f"settings: {{{name}}} is unknown; allowed: {allowed}")
        for text in self.figures:
            for name in _placeholders(text):
                if name not in RATES:
                    raise ValueError(f"figures: {{{name}}} is unknown; allowed: {', '.join(RATES)}")
        for text in (*self.fields, *self.settings, *self.figures):
            if len(_placeholders(text)) != 1:
                raise ValueError(f"{text!r} must have one placeholder")
        return self


def table_format(table: FormatTable) -> LogFormat:
    """Return the log format that a table declares."""
    line, _ = _compile(table.line, "plain")
    time_fields = [text for text in table.fields if _is_timed(_placeholders(text))]
    if not table.several_lines and time_fields and not _is_timed(_placeholders(table.line)):
        either = b"|".join(_compile(text, "plain")[0].pattern for text in time_fields)
        line = re.compile(line.pattern + rb"(?=[^\r\n]{0,2000}?(?:" + either + rb"))")
    return LogFormat(
        title=table.title,
        marks=(table.mark.encode(),),
        step_line=line,
        read=partial(_read, _Reader(table)),
        example=f"`{table.example}`",
        numbering=table.numbering,
        precedence=PRECEDENCE,
        convention=table.convention,
        end_marker=table.end_marker,
        begins=table.mark.encode() if table.several_lines else None,
    )


def _is_timed(names: Iterable[str]) -> bool:
    """Return whether a step time follows from one of the fields."""
    rates = ("steps_per_s", "samples_per_s", "tokens_per_s", "tokens_per_s_per_device")
    clocks = ("step_time_s", "step_time_ms", "forward_ms", "elapsed_s", "elapsed_min", "timestamp")
    return not {*rates, *clocks}.isdisjoint(names)


def _placeholders(text: str) -> list[str]:
    return [name for name, _ in _PLACEHOLDER.findall(text)]


def _compile(text: str, groups: Literal["capture", "plain"]) -> tuple[re.Pattern[bytes], list[str]]:
    """Return a pattern with its placeholders filled in, and the kinds of their values.

    `plain` patterns have no groups. Raises re.error and ValueError.
    """
    kinds: list[str] = []

    def fill(match: re.Match[str]) -> str:
        name, kind = match[1], match[2] or ("date" if match[1] == "timestamp" else "number")
        if kind not in KINDS:
            raise ValueError(f"{{{name}:{kind}}}: allowed kinds: {', '.join(KINDS)}")
        kinds.append(kind)
        is_counter = name in _COUNTERS and kind == "number"
        value = rb"(\d{1,18})" if is_counter else KINDS[kind]
        if groups == "plain":
            value = re.sub(rb"^\((?!\?)", b"(?:", value)
        return value.decode()

    expression = _PLACEHOLDER.sub(fill, text)
    if groups == "plain":
        expression = re.sub(r"(?<!\\)\((?!\?)", "(?:", expression)
    return re.compile(expression.encode()), kinds


class _Reader:
    """Compiled patterns of a table."""

    def __init__(self, table: FormatTable) -> None:
        self.table = table
        self.line, self.line_kinds = _compile(table.line, "capture")
        self.line_names = _placeholders(table.line)
        self.fields = [_field(text) for text in table.fields]
        self.settings = [
            (_compile(text, "capture")[0], _placeholders(text)[0]) for text in table.settings
        ]
        self.figures = [
            (_compile(text, "capture")[0], _placeholders(text)[0]) for text in table.figures
        ]
        self._step_group = 1 + self.line_names.index("step") if "step" in self.line_names else 0
        self.mark = table.mark.encode()
        self.incomplete = _incomplete(table)

    def has_step(self, match: re.Match[bytes]) -> bool:
        """Return whether a line has its step number, which the pattern may make optional."""
        return bool((match[self._step_group] or b"").strip(b","))


def _field(text: str) -> tuple[str, re.Pattern[bytes], str]:
    """Return name, pattern and kind of a field; the pattern takes the rest of the record."""
    pattern, kinds = _compile(text, "capture")
    return _placeholders(text)[0], re.compile(pattern.pattern + rb"[^\n]*"), kinds[0]


def _incomplete(table: FormatTable) -> re.Pattern[bytes] | None:
    """Return the pattern of a last line that lacks its times; None if it is unknown."""
    time_fields = [text for text in table.fields if _is_timed(_placeholders(text))]
    if time_fields:
        start = _compile(table.line, "plain")[0].pattern
        remainder = (
            b".{0,2000}?(?:"
            + b"|".join(_compile(t, "plain")[0].pattern for t in time_fields)
            + b")"
        )
        return re.compile(start + rb"(?!" + remainder + rb")")
    place = next((p for p in _PLACEHOLDER.finditer(table.line) if _is_timed([p[1]])), None)
    if place is None or not place.start():
        return None
    try:
        start = _compile(table.line[: place.start()], "plain")[0].pattern
        remainder = _compile(table.line[place.start() :], "plain")[0].pattern
    except re.error:  # The time is within a group.
        return None
    return re.compile(start + rb"(?!" + remainder + rb")")


class _Totals(RunningTotals):
    """Running totals of a log: a clock, and tokens."""

    def __init__(self) -> None:
        super().__init__(2)
        self._first_date: float | None = None
        self.has_fractions = False
        """True if a date had a fraction of a second."""

    def since_first_line(self, dates: FloatColumn) -> FloatColumn:
        """Return the seconds since the first date of the log."""
        self.has_fractions |= bool((np.mod(dates[np.isfinite(dates)], 1.0) > 0).any())
        if self._first_date is None:
            finite = dates[np.isfinite(dates)]
            self._first_date = float(finite[0]) if len(finite) else None
        return dates - (self._first_date or 0.0)


def _read(reader: _Reader, blocks: Iterable[bytes], log: LogContent) -> None:
    """Read the steps of a log by a table."""
    table = reader.table
    if table.steps_per_line:
        log.facts["log_interval"] = table.steps_per_line
    end = table.end_marker.encode() if table.end_marker else None
    totals, count, example = _Totals(), 0, b""
    for block in watch_end(blocks, log, end, reader.incomplete):
        text = without_colors(block).replace(b"\r", b"\n")
        for pattern, name in reader.settings:
            for value in pattern.findall(text):
                if name in ("dtype", "device", "model", "framework_version"):
                    log.facts[name] = excerpt(value)
                else:
                    store_whole_numbers(log, {b"n": name}, [(b"n", value)])
        for pattern, name in reader.figures:
            for value in numbers(pattern.findall(text)):
                if 0 < value < LARGEST:
                    log.figures[name] = float(value)
        matches = [match for match in reader.line.finditer(text) if reader.has_step(match)]
        if matches:
            count += _add_steps(reader, text, matches, log, totals, count)
        elif not example and (at := text.find(reader.mark)) >= 0:
            example = text[text.rfind(b"\n", 0, at) + 1 :].partition(b"\n")[0]
    fields = {*reader.line_names, *(name for name, _, _ in reader.fields)}
    clock_times = not fields.isdisjoint(CLOCKS) and fields.isdisjoint(PRINTED_TIMES)
    if count and clock_times:
        fine = "timestamp" in fields and totals.has_fractions
        log.resolution_s = (0.001 if fine else 1.0) / totals.distance
    if count and "tokens_per_s_per_device" in fields:
        _count_devices(log, clock_times)
    if not count:
        where = (
            f"the first line with the mark is: {excerpt(example)}"
            if example
            else f"no line has its mark {table.mark!r} either"
        )
        log.refusal = f"no line matches the pattern of {table.title}; {where}"


def _add_steps(
    reader: _Reader,
    text: bytes,
    matches: list[re.Match[bytes]],
    log: LogContent,
    totals: _Totals,
    count: int,
) -> int:
    """Add the steps that start at `matches`, after `count` earlier ones; return their number."""
    table = reader.table
    printed: dict[str, tuple[str, list[bytes]]] = {
        name: (kind, [match[number] or b"" for match in matches])
        for number, (name, kind) in enumerate(
            zip(reader.line_names, reader.line_kinds, strict=True), start=1
        )
    }
    ends = _record_ends(text, matches, reader.mark if table.several_lines else None)
    rests = [
        text[match.end() : end].replace(b"\n", b" ")
        for match, end in zip(matches, ends, strict=True)
    ]
    records = Records(rests)
    for name, pattern, kind in reader.fields:
        if name not in printed and (texts := records.texts(pattern)) is not None:
            printed[name] = (kind, texts)
    if "step" in printed:
        index = whole_numbers([text.replace(b",", b"") for text in printed.pop("step")[1]])
    else:
        index = np.arange(count + 1, count + 1 + len(matches), dtype=np.int64)
    if "total_steps" in printed:
        store_total_steps(log, printed.pop("total_steps")[1])
    columns: dict[str, FloatColumn] = {}
    for name, (kind, texts) in printed.items():
        column, factor = FACTORS[name]
        values = PARSERS.get(kind, numbers)(texts) * factor
        earlier = columns.get(column, values)
        columns[column] = np.where(np.isnan(earlier), values, earlier)
        if column == "step_time_s" and (last := next(filter(None, reversed(texts)), b"")):
            log.resolution_s = 1.0 if kind == "clock" else decimal_step(last) * factor
    new = _complete(columns, index, totals, log)
    new_columns = {name: values[new] for name, values in columns.items() if name in COLUMNS}
    log.add_steps(index[new], **new_columns)
    return len(matches)


def _record_ends(text: bytes, matches: list[re.Match[bytes]], mark: bytes | None) -> list[int]:
    """Return where the record of each step ends: at the next one, or before that with its line.

    A record over several lines ends before the line of the next `mark`, where blocks are split.
    """
    ends: list[int] = []
    next_starts = [*(match.start() for match in matches[1:]), len(text)]
    for match, next_start in zip(matches, next_starts, strict=True):
        if mark is None:
            end = text.find(b"\n", match.end(), next_start)
        elif (at := text.find(mark, match.end())) >= 0:
            end = max(match.end(), text.rfind(b"\n", 0, at) + 1)
        else:
            end = len(text)
        ends.append(next_start if end < 0 else end)
    return ends


def _complete(columns: dict[str, FloatColumn], index: Any, totals: _Totals, log: LogContent) -> Any:
    """Compute step times and tokens from the other columns; return the rows with a new step.

    The printed time of a step comes first, then its rates, then a running clock, then the dates
    of the lines.
    """
    nothing = np.full(len(index), np.nan)
    clock = columns.get("elapsed_s", nothing)
    if "timestamp" in columns:
        clock = totals.since_first_line(columns["timestamp"])
    new, (per_step, tokens) = totals.rates(
        index, np.stack([clock, columns.get("total_tokens", nothing)])
    )
    if "step_time_s" not in columns:
        parts = [columns[name] for name in ("forward", "backward", "optimizer") if name in columns]
        if parts:
            columns["step_time_s"] = np.sum(parts, axis=0)
        elif "steps_per_s" in columns:
            columns["step_time_s"] = ratio(np.ones(len(index)), columns["steps_per_s"])
    if "tokens" not in columns and "total_tokens" in columns:
        columns["tokens"] = _spread(tokens, new)
    total_rate = columns.get("tokens_per_s")
    if "step_time_s" not in columns and total_rate is not None and "tokens" in columns:
        columns["step_time_s"] = ratio(columns["tokens"], total_rate)
    if "step_time_s" not in columns and not np.isnan(clock).all():
        columns["step_time_s"] = _spread(per_step, new)
    times = columns.get("step_time_s")
    if total_rate is not None and times is not None and "tokens" not in columns:
        columns["tokens"] = product_of(total_rate, times)
    if "samples_per_s" in columns and times is not None and "global_batch" not in columns:
        batches = product_of(columns["samples_per_s"], times)
        whole = np.round(batches)
        columns["global_batch"] = np.where(
            (whole > 0) & (np.abs(batches - whole) < 0.005 * whole), whole, np.nan
        )
    return new


def _count_devices(log: LogContent, clock_times: bool) -> None:
    """Store the number of devices that tokens, times and the rate per device imply.

    The rate has more digits than a clock of seconds, so it then gives the step times.
    """
    tokens, one = log.column("tokens"), log.column("tokens_per_s_per_device").astype(np.float64)
    quotients = ratio(ratio(tokens, log.column("step_time_s")), one)
    finite = quotients[np.isfinite(quotients)]
    if len(finite) and "num_devices" not in log.facts:
        quotient = float(np.median(finite))
        devices = round(quotient)
        if abs(quotient - devices) <= min(0.3, max(0.1, 0.03 * quotient)):
            log.facts.update({"num_devices": devices} if 1 <= devices <= MAX_DEVICES else {})
    count = log.facts.get("num_devices")
    if clock_times and len(finite) and isinstance(count, int):
        log.set_column("step_time_s", [ratio(tokens, one * count)])


def _spread(values: FloatColumn, new: Any) -> FloatColumn:
    """Return values of the new rows as a column of all rows."""
    column = np.full(len(new), np.nan)
    column[new] = values
    return column


def _numbers_with_suffix(texts: list[bytes]) -> FloatColumn:
    """Return numbers with a suffix K, M, B (or G) or T."""
    factors = np.array([SUFFIXES.get(text[-1:], 1.0) for text in texts])
    return numbers([text.rstrip(b"KMBGT") for text in texts]) * factors


def _clocks(texts: list[bytes]) -> FloatColumn:
    """Return the seconds of clocks such as 01:02:03."""
    return np.array([_clock(text) for text in texts])


def _clock(text: bytes) -> float:
    if not text:
        return float("nan")
    parts = reversed(text.split(b":"))
    return sum(int(part) * factor for part, factor in zip(parts, CLOCK_FACTORS, strict=False))


def _dates(texts: list[bytes]) -> FloatColumn:
    """Return dates as seconds since 1970 in the time zone of the log."""
    return np.array([_date(text) for text in texts])


def _date(text: bytes) -> float:
    digits = text.replace(b"/", b"-").replace(b",", b".").replace(b" ", b"T").decode()
    try:
        return float(np.datetime64(digits[:23], "ms").astype(np.int64)) / 1e3
    except ValueError:
        return float("nan")


def _counts(texts: list[bytes]) -> FloatColumn:
    return numbers([text.replace(b",", b"") for text in texts])


PARSERS: Mapping[str, Callable[[list[bytes]], FloatColumn]] = {
    "suffix": _numbers_with_suffix,
    "clock": _clocks,
    "date": _dates,
    "count": _counts,
}


def shipped_tables() -> dict[str, FormatTable]:
    """Return the tables of this package by name."""
    files = resources.files("paceline.files") / "log_formats"
    return {
        file.name.removesuffix(".yaml"): FormatTable.model_validate(read_shipped(file))
        for file in files.iterdir()
        if file.name.endswith(".yaml")
    }


def read_table(path: Path) -> FormatTable:
    """Return the table in a user's file; raise UserError with the line for an invalid one."""
    return read_model(FormatTable, path)[0]


def user_tables_folder() -> Path:
    """Return the folder whose tables are known by their names, like those of this package."""
    return settings_folder() / "log_formats"


def is_table_path(name: str) -> bool:
    """Return whether the name of a log format is the path of a file with a table."""
    return Path(name).suffix in (".yaml", ".yml")
