"""Reader of logs whose format is declared as a table."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import pairwise
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from paceline.core.layout import MODEL_AXES
from paceline.core.steps import FloatColumn, IntColumn
from paceline.engines.log_reading.log_content import (
    LARGEST,
    Fact,
    LogContent,
    LogFormat,
    excerpt,
    numbers,
    whole_numbers,
)
from paceline.engines.log_reading.printed_values import printed_digit, values_of, without_commas
from paceline.engines.log_reading.records import (
    LARGEST_SETTING,
    Records,
    RunningTotals,
    nan_if_negative,
    product,
    product_of,
    ratio,
    required_literal,
    store_total_steps,
    watch_end,
    whole_setting,
    without_colors,
)
from paceline.engines.log_reading.table_format import (
    FACTORS,
    MEMORY,
    PLACEHOLDER,
    SETTINGS,
    TEXTS,
    FormatTable,
    compile_pattern,
    is_timed,
    placeholders,
)
from paceline.files.log_file import RECORD_BYTES

PRECEDENCE = 7
"""Tables come after formats with a reader of their own."""
COLUMNS = frozenset(
    {
        *("step_time_s", "loss", "grad_norm", "tokens", "global_batch", "samples_per_s"),
        *("tokens_per_s_per_device", "flops_per_s_per_device", "mfu"),
        *("allocated_bytes", "reserved_bytes"),
    }
)
"""Columns that are stored as they are; the others serve to compute these."""
PER_RANK = "tokens/s per GPU are those of a data-parallel rank: the log has no World size"
MAX_DEVICES = 1 << 20
CLOCKS = ("timestamp", "elapsed_s", "elapsed_ms", "elapsed_min", "interval_s", "micro_step_ms")
PRINTED_TIMES = ("step_time_s", "step_time_ms", "step_time_us", "forward_ms", "steps_per_s")
AXES = (*MODEL_AXES, "ep")
MAX_SIZE_DIGITS = 9
MEAN_RATE_STEP = 0.01
"""Resolution of a printed mean rate since the start, in tokens/s."""
SLOWEST = 1e-9
"""Steps per second below which a printed rate is damage."""
RATE_ERROR = 1e-4
"""Relative rounding of a printed rate of samples."""
MIN_WHOLE = 0.9
"""Minimum share of lines whose rate and time give a whole batch."""
ROWS_AT_ONCE = 1 << 16
MAX_RECORD_BYTES = RECORD_BYTES // 2
"""Maximum size of a record over several lines without colors, which a block never splits."""
INTERVAL_RATES = {"samples_per_s", "steps_per_s", "tokens_per_s", "tokens_per_s_per_device"}
SUBTRACTED = "evaluations between step lines are subtracted from their times, by their own lines"
NOT_TIMED = (
    "the first step line after an evaluation has no time, because it includes the evaluation"
)
MAX_RATE_ERROR = 0.1
"""Relative difference between a rate and the elapsed time from which the rate counts as wrong."""
MIN_CLOCK_SHARE = 0.5
"""Minimum share of lines between which the elapsed time advances, to compare rates with it."""
MICRO_STEPS = "step times are those of the micro-steps in the log, times the micro-steps per step"


def table_format(table: FormatTable) -> LogFormat:
    """Return the log format that a table declares."""
    # Most formats only look for their marks; patterns are compiled for a log that has them.
    reader = cache(partial(_Reader, table))
    return LogFormat(
        title=table.title,
        marks=tuple(mark.encode() for mark in table.mark),
        step_line=_step_line(table),
        read=lambda blocks, log: _read(reader(), blocks, log),
        example=f"`{table.example}`",
        numbering=table.numbering,
        precedence=PRECEDENCE,
        convention=table.convention,
        end_marker=table.end_marker if table.always_ends else None,
        begins=table.mark[0].encode() if table.several_lines else None,
    )


def _step_line(table: FormatTable) -> re.Pattern[bytes]:
    """Return the pattern that only step lines match: the line, and what makes it timed."""
    if table.recognition:
        return compile_pattern(table.recognition, "plain")[0]
    line = compile_pattern(table.line, "plain")[0]
    if table.several_lines or not table.timed_fields or is_timed(placeholders(table.line)):
        return line
    return _followed_by(line.pattern, table.timed_fields, rb"(?=[^\r\n]{0,2000}?(?:%s))")


def _followed_by(start: bytes, fields: Iterable[str], condition: bytes) -> re.Pattern[bytes]:
    either = b"|".join(compile_pattern(text, "plain")[0].pattern for text in fields)
    return re.compile(b"(?:" + start + b")" + condition % either, re.MULTILINE)


class _Reader:
    """Compiled patterns of a table."""

    def __init__(self, table: FormatTable) -> None:
        self.table = table
        self.marks = [mark.encode() for mark in table.mark]
        self.line, kinds = compile_pattern(table.line)
        names = placeholders(table.line)
        self.line_groups: dict[tuple[str, str], list[int]] = {}
        for group, key in enumerate(zip(names, kinds, strict=True), start=1):
            self.line_groups.setdefault(key, []).append(group)
        self._record = re.compile(b"(?:" + self.line.pattern + rb")([^\n]*)()", self.line.flags)
        """A step line with the rest of its record; two groups make each match a tuple."""
        self._literal = required_literal(self.line)
        self._step_groups = [n for n, name in enumerate(names) if name == "step"]
        self.fields = [_field(text) for text in table.fields]
        self.settings = [_statement(text) for text in table.settings]
        self.figures = [_statement(text) for text in table.figures]
        self.flags = {text.encode(): facts for text, facts in table.flags.items()}
        self.names = {*names, *(name for name, _, _ in self.fields)}
        has_clock = not self.names.isdisjoint(CLOCKS) and self.names.isdisjoint(PRINTED_TIMES)
        self.times_by_rate = has_clock and {"tokens_per_s", "tokens"} <= self.names
        """True if rates give the step times, which the clock can then confirm."""
        self.times_by_clock = has_clock and not self.times_by_rate
        self.summed = {FACTORS[name][0] for name in self.names & {"interval_s", "micro_step_ms"}}
        header = {"tokens", *(["num_devices"] if "tokens_per_s_per_rank" in self.names else [])}
        self._headers = [
            pattern for pattern, names, _ in self.settings if not header.isdisjoint(names)
        ]
        """Patterns of settings and evaluations that apply to the steps after them only."""
        self._evaluation = compile_pattern(table.evaluation)[0] if table.evaluation else None
        if self._evaluation:
            self._headers.append(self._evaluation)
        self.incomplete = _incomplete(table)

    def rows(self, text: bytes) -> list[tuple[bytes, ...]]:
        """Return the groups of each step line with a number, and the rest of its record.

        The number may be optional in the pattern.
        """
        records = self._records(text)
        rows = self._record.findall(records)
        if not rows:
            return []
        # The rest of a torn line may hold another step, which then starts a line of its own.
        if not self._literal or records.count(self._literal) != len(rows):
            rests = b"\n".join(row[-2] for row in rows)
            if self._literal in rests and self.line.search(rests):
                rows = self._record.findall(self.line.sub(rb"\n\g<0>", records))
        groups = self._step_groups
        if groups and not all(map(itemgetter(groups[0]), rows)):
            rows = [row for row in rows if any(map(row.__getitem__, groups))]
        return rows

    def _records(self, text: bytes) -> bytes:
        """Return the lines with a mark; for records over several lines, each with those after it.

        A record over several lines ends before the line of the next mark, where blocks are split.
        """
        marks = [mark for mark in self.marks if mark in text]
        if not marks:
            return b""
        if self.table.several_lines:
            starts = dict.fromkeys(text.rfind(b"\n", 0, at) + 1 for at in _places(text, marks[0]))
            records = (_record(text[start:end]) for start, end in pairwise([*starts, len(text)]))
            return b"\n".join([record.replace(b"\n", b" ") for record in records])
        lines = text.split(b"\n")
        # The line that ends the text has no line end; all others must keep theirs.
        lines[:-1] = [line + b"\n" for line in lines[:-1]]
        if len(marks) == 1:
            return b"".join([line for line in lines if marks[0] in line])
        return b"".join([line for line in lines if any(mark in line for mark in marks)])

    def evaluation_s(self, part: bytes) -> float:
        """Return the seconds of the evaluation that a part starts with, NaN if unknown; 0 if none.

        The next step line includes them.
        """
        match = self._evaluation.match(part) if self._evaluation else None
        if match is None:
            return 0.0
        seconds = numbers(match.groups() or [b""]).item()
        return seconds if 0 <= seconds < LARGEST else math.nan

    def without_colors(self, block: bytes) -> bytes:
        """Return a block without color codes, except in lines where that would create a mark.

        Blocks are split at the marks of the file, so only those begin records over several lines.
        """
        text, (mark, *_) = without_colors(block), self.marks
        if not self.table.several_lines or text.count(mark) == block.count(mark):
            return text
        lines = ((line, without_colors(line)) for line in block.split(b"\n"))
        return b"\n".join(old if new.count(mark) > old.count(mark) else new for old, new in lines)

    def parts(self, text: bytes) -> Iterator[bytes]:
        """Yield a text in parts that start with what applies to the steps after it."""
        starts = sorted(
            {
                match.start()
                for pattern in self._headers
                if required_literal(pattern) in text
                for match in pattern.finditer(text)
            }
        )
        for start, end in zip([0, *starts], [*starts, len(text)], strict=True):
            yield text[start:end]


def _record(text: bytes) -> bytes:
    """Return a record over several lines without what may be in another block."""
    if len(text) <= MAX_RECORD_BYTES:
        return text
    end = text.find(b"\n", MAX_RECORD_BYTES)
    return text if end < 0 else text[:end]


def _places(text: bytes, literal: bytes) -> Iterator[int]:
    """Yield the places of a literal in a text."""
    at = text.find(literal)
    while at >= 0:
        yield at
        at = text.find(literal, at + len(literal))


def _statement(text: str) -> tuple[re.Pattern[bytes], list[str], list[str]]:
    """Return pattern, names and kinds of a setting or figure."""
    pattern, kinds = compile_pattern(text)
    return pattern, placeholders(text), kinds


def _field(text: str) -> tuple[str, re.Pattern[bytes], str]:
    """Return name, pattern and kind of a field; the pattern takes the rest of the record."""
    pattern, kinds = compile_pattern(text)
    return placeholders(text)[0], re.compile(b"(?:" + pattern.pattern + rb")[^\n]*"), kinds[0]


def _incomplete(table: FormatTable) -> re.Pattern[bytes] | None:
    """Return the pattern of a last line that lacks its times; None if it is unknown."""
    if table.timed_fields:
        start = compile_pattern(table.line, "plain")[0].pattern
        return _followed_by(start, table.timed_fields, rb"(?!.{0,60000}?(?:%s))")
    place = next((p for p in PLACEHOLDER.finditer(table.line) if is_timed([p[1]])), None)
    if place is None or not place.start():
        return None
    try:
        start = compile_pattern(table.line[: place.start()], "plain")[0].pattern
        return _followed_by(start, [table.line[place.start() :]], rb"(?!%s)")
    except re.error:  # The time is within a group.
        return None


def mismatch(table: FormatTable, line: bytes) -> tuple[int, str] | None:
    """Return how much of a line a table matches, and what it lacks; None if it matches."""
    if _step_line(table).search(line):
        return None
    if match := compile_pattern(table.line)[0].search(line):
        fields = " or ".join(map(repr, table.timed_fields))
        return len(match[0]), f"there is no {fields}" if fields else "more is expected"
    ends = [place.end() for place in PLACEHOLDER.finditer(table.line)]
    for end in reversed(ends[:-1]):
        try:
            part = compile_pattern(table.line[:end])[0].search(line)
        except re.error:  # The placeholder is within a group.
            continue
        if part:
            prefix, expected = excerpt(part[0]), table.line[end:]
            return len(part[0]), f"only {prefix!r} matches; expected next: {expected!r}"
    return 0, f"nothing matches {table.line!r}"


class _Settings:
    """Settings of a log, and the facts that follow from them at its end."""

    def __init__(self, reader: _Reader, log: LogContent) -> None:
        self._reader, self._log = reader, log
        self._flags: dict[str, Fact] = {}
        self._peak_flops, self._part, self._part_mfu = 0.0, "", (0.0, "")
        self._values: dict[str, int] = {}
        """Settings from which facts are computed."""

    @property
    def tokens(self) -> int | None:
        """Tokens of a step over all devices."""
        return self._values.get("tokens")

    def read(self, text: bytes) -> None:
        """Read the settings in `text`; a restart repeats them."""
        for pattern, names, kinds in self._reader.settings:
            if required_literal(pattern) not in text:
                continue
            # Records may repeat a setting; of equal ones the last counts.
            printed = reversed(
                dict.fromkeys(reversed([m.groups() for m in pattern.finditer(text)]))
            )
            for values in printed:
                for name, kind, value in zip(names, kinds, values, strict=True):
                    if value:
                        self._store(name, kind, value)
        for mark, facts in self._reader.flags.items():
            if mark in text:
                self._flags |= facts
        for pattern, (name, *_), _ in self._reader.figures:
            for value in numbers(pattern.findall(text)):
                if 0 < value < LARGEST:
                    self._log.figures[name] = float(value)

    def _store(self, name: str, kind: str, text: bytes) -> None:
        log = self._log
        if name == "part":
            self._part = excerpt(text)
            return
        if name in TEXTS:
            log.facts[name] = excerpt(text.lower() if name == "dtype" else text)
            return
        value = values_of(kind, [text]).item()
        if name in MEMORY:
            column, factor = MEMORY[name]
            if value > 0:
                log.peak(column.removesuffix("_bytes"), value * factor)
        elif name == "part_mfu":
            self._part_mfu = max(self._part_mfu, (value if value < 1e9 else 0.0, self._part))
        elif name == "peak_flops":
            self._peak_flops = value if 0 < value < LARGEST else self._peak_flops
        else:
            is_rounded = kind == "suffix" and 0 < value < LARGEST
            digits = b"%d" % round(value) if is_rounded else text
            index = name == "last_device" and digits.isdigit() and len(digits) < MAX_SIZE_DIGITS
            number = int(digits) + 1 if index else whole_setting(digits)
            if number is not None:
                (self._values if name in SETTINGS else log.facts)[name] = number

    def finish(self) -> None:
        """Store the facts that follow from the settings."""
        log, values = self._log, self._values
        if "dp" in values:
            ranks = product(values["dp"], *(log.facts.get(axis, 1) for axis in AXES))
            if ranks is not None and ranks < LARGEST_SETTING:
                log.facts["num_devices"] = ranks
            factors = (log.facts.get("micro_batch"), log.facts.get("gradient_accumulation", 1))
            batch = product(values["dp"], *factors)
            if batch is not None and batch < LARGEST_SETTING:
                log.facts.setdefault("global_batch", batch)
        elif "last_device" in values:
            log.facts["num_devices"] = values["last_device"]
        length, micro = log.facts.get("seq_len"), log.facts.get("micro_batch")
        for total, name, per in (
            (values.get("micro_batch_tokens"), "num_devices", product(length, micro)),
            (values.get("batch_tokens"), "global_batch", length),
            (values.get("tokens"), "global_batch", length),
        ):
            if total and isinstance(per, int) and total % per == 0:
                log.facts[name] = total // per
        log.facts.update(self._flags)
        mfu, part = self._part_mfu
        if mfu > 1:
            log.remark(
                f"the log prints an MFU of {mfu:.1%} for {part}, more than a device can reach: its "
                "FLOPs or its peak are wrong"
            )
        if self._peak_flops:
            log.remark(f"the log's MFU is relative to a peak of {self._peak_flops:.4g} FLOP/s")


class _Totals(RunningTotals):
    """Running totals of a log: a clock, tokens, and samples."""

    def __init__(self, times_by_rate: bool) -> None:
        super().__init__(3)
        self.times_by_rate = times_by_rate
        self._first_date: float | None = None
        self._last_count, self._sum_s = 0, 0.0
        self._num_steps, self._position = 0, -1
        self.clock_step_s = 1.0
        """Resolution of the clock in seconds."""
        self.evaluation_s = 0.0
        """Seconds of evaluations since the last step line; NaN if unknown."""
        self.times_by_clock: list[FloatColumn] = []
        """Step times by the clock of each block, if the log's rates give its step times."""

    def subtract_evaluations(self, columns: dict[str, FloatColumn], log: LogContent) -> None:
        """Subtract evaluations from the interval of the first line, whose rates include them."""
        if self.evaluation_s == 0.0:
            return
        for name in INTERVAL_RATES & columns.keys():
            columns[name][0] = math.nan
        if "interval_s" in columns:
            columns["interval_s"][0] -= self.evaluation_s
        is_known = "interval_s" in columns and not math.isnan(self.evaluation_s)
        log.remark(SUBTRACTED if is_known else NOT_TIMED)
        self.evaluation_s = 0.0

    def since_first_line(self, dates: FloatColumn) -> FloatColumn:
        """Return the seconds since the first date of the log."""
        if (np.mod(dates[np.isfinite(dates)], 1.0) > 0).any():
            self.clock_step_s = 0.001
        if self._first_date is None:
            finite = dates[np.isfinite(dates)]
            self._first_date = float(finite[0]) if len(finite) else None
        return dates - (self._first_date or 0.0)

    def count(self, positions: IntColumn) -> IntColumn:
        """Return step numbers from 1, which grow where a position differs from the one before."""
        changes = np.diff(positions, prepend=self._position) != 0
        index = self._num_steps + np.cumsum(changes)
        self._num_steps, self._position = int(index[-1]), int(positions[-1])
        return index

    def sum_of(self, seconds: FloatColumn, counter: IntColumn, per_count: bool) -> FloatColumn:
        """Return the running sum of times, to which a line that repeats the one before adds none.

        A time is that since the line before, or with `per_count` that of one count of `counter`.
        """
        counts = np.maximum(np.diff(counter, prepend=self._last_count), 0)
        counts = counts if per_count else np.minimum(counts, 1)
        sound = np.isfinite(seconds) & (seconds > 0)
        sums = np.cumsum(np.append(self._sum_s, np.where(sound, seconds, 0.0) * counts))
        self._last_count, self._sum_s = int(counter[-1]), float(sums[-1])
        return np.where(sound, sums[1:], np.nan)


def _read(reader: _Reader, blocks: Iterable[bytes], log: LogContent) -> None:
    """Read the steps of a log by a table."""
    table = reader.table
    if table.steps_per_line:
        log.facts["log_interval"] = table.steps_per_line
    end = table.end_marker.encode() if table.end_marker else None
    settings, totals, example = _Settings(reader, log), _Totals(reader.times_by_rate), b""
    count = 0
    for block in watch_end(blocks, log, end, reader.incomplete):
        text = reader.without_colors(block).replace(b"\r", b"\n")
        for part in reader.parts(text):
            settings.read(part)
            totals.evaluation_s += reader.evaluation_s(part)
            if rows := reader.rows(part):
                count += _add_steps(reader, rows, log, totals, settings, count)
        if not count and not example:
            example = _line_with_mark(text, reader.marks)
    settings.finish()
    if count and reader.times_by_clock:
        log.resolution_s = totals.clock_step_s / totals.distance
    if count and reader.times_by_rate:
        _check_rate_by_clock(log, totals)
    if count and "tokens_per_s_per_device" in reader.names:
        _count_devices(log, reader.times_by_clock)
    if count and "rolling_tokens_per_s" in reader.names:
        _spread_tokens(log)
    if count and {"global_batch", "total_samples"}.isdisjoint(reader.names):
        _derive_batches(log)
    if not count:
        log.refusal = f"no line matches the pattern of {table.title}; " + (
            f"the first line with the mark is: {excerpt(example)}"
            if example
            else f"no line has its mark {' or '.join(map(repr, table.mark))} either"
        )


def _line_with_mark(text: bytes, marks: Iterable[bytes]) -> bytes:
    """Return the first line with a mark, empty without one."""
    at = min((at for at in map(text.find, marks) if at >= 0), default=-1)
    return text[text.rfind(b"\n", 0, at) + 1 :].partition(b"\n")[0] if at >= 0 else b""


def _add_steps(
    reader: _Reader,
    rows: list[tuple[bytes, ...]],
    log: LogContent,
    totals: _Totals,
    settings: _Settings,
    count: int,
) -> int:
    """Add the steps in `rows`, after `count` earlier ones; return their number."""
    table = reader.table
    groups = list(zip(*rows, strict=True))
    printed = {
        key: _first_printed(groups[n - 1] for n in numbers_of_groups)
        for key, numbers_of_groups in reader.line_groups.items()
    }
    records = Records(groups[-2])
    for name, pattern, kind in reader.fields:
        if (texts := records.texts(pattern)) is not None:
            earlier = printed.get((name, kind))
            printed[name, kind] = _first_printed([earlier, texts]) if earlier else texts
    index = np.arange(count + 1, count + 1 + len(rows), dtype=np.int64)
    columns, last_rows = dict[str, FloatColumn](), dict[str, int]()
    for (name, kind), texts in printed.items():
        if name == "step":
            index = whole_numbers(without_commas(texts))
        elif name == "total_steps":
            store_total_steps(log, texts)
        elif name == "position":
            index = totals.count(whole_numbers(texts))
        elif name == "micro_step":
            columns[name] = whole_numbers(texts).astype(np.float64)
        else:
            column, factor = FACTORS[name]
            values = values_of(kind, texts)
            values = values * factor if factor >= 1 else values / round(1 / factor)
            earlier = columns.get(column, values)
            columns[column] = np.where(np.isnan(earlier), values, earlier)
            row = next((n for n in reversed(range(len(texts))) if texts[n]), -1)
            if row >= last_rows.get(column, 0):
                last_rows[column], last = row, texts[row]
                digit = printed_digit(kind, last, table.digits) * factor
                if column == "step_time_s":
                    log.resolution_s = digit
                elif column in ("elapsed_s", "interval_s", "micro_step_s"):
                    # Without trailing zeros, whole seconds look as if they had more digits.
                    finite = values[np.isfinite(values)]
                    is_whole = table.digits is not None and not (finite % factor).any()
                    totals.clock_step_s = max(digit, factor) if is_whole else digit
                elif column == "steps_per_s":
                    rate = values_of(kind, [last]).item()
                    log.resolution_s = digit / rate**2 if SLOWEST < rate < LARGEST else 0.0
    # Sums need every line, also of a block in which no line has its time.
    for column in reader.summed:
        columns.setdefault(column, np.full(len(index), np.nan))
    # A row without any value is the head of a validation, or of a record without figures.
    has_value = [~np.isnan(values) for values in columns.values()]
    has_any = np.any([np.zeros(len(index), dtype=np.bool_), *has_value], axis=0)
    index, columns = index[has_any], {name: values[has_any] for name, values in columns.items()}
    names = {name for (name, _), texts in printed.items() if any(texts)}
    for name in table.notes.keys() & names:
        log.remark(table.notes[name])
    if len(index):
        totals.subtract_evaluations(columns, log)
        new = _complete(columns, index, totals, log, settings.tokens)
        if reader.times_by_rate:
            totals.times_by_clock.append(columns["time_by_clock"][new])
        new_columns = {name: values[new] for name, values in columns.items() if name in COLUMNS}
        log.add_steps(index[new], **new_columns)
    return len(rows)


def _first_printed(columns: Iterable[Sequence[bytes]]) -> Sequence[bytes]:
    """Return the first text that is not empty of each row of columns."""
    first, *others = columns
    for other in others:
        if all(first):
            break
        first = [text or second for text, second in zip(first, other, strict=True)]
    return first


def _complete(
    columns: dict[str, FloatColumn],
    index: IntColumn,
    totals: _Totals,
    log: LogContent,
    tokens: int | None,
) -> npt.NDArray[np.bool_]:
    """Compute step times and tokens from the other columns; return the rows with a new step.

    The printed time of a step comes first, then its rates, then a running clock, then the dates
    of the lines. `tokens` are those of each step as a setting.
    """
    nothing = np.full(len(index), np.nan)
    clock, token_totals, sample_totals = (
        columns.get(name, nothing) for name in ("elapsed_s", "total_tokens", "total_samples")
    )
    if "interval_s" in columns:
        clock = totals.sum_of(columns["interval_s"], index, per_count=False)
    elif "micro_step_s" in columns:
        micro_steps = columns["micro_step"].astype(np.int64)
        clock = totals.sum_of(columns["micro_step_s"], micro_steps, per_count=True)
        if (micro_steps > index).any():
            log.remark(MICRO_STEPS)
    if "timestamp" in columns:
        clock = totals.since_first_line(columns["timestamp"])
    if "mean_tokens_per_s" in columns:
        fine = ratio(token_totals, columns["mean_tokens_per_s"])
        clock = np.where(np.isnan(fine), clock, fine)
        clock_rows = np.flatnonzero(np.isfinite(clock))
        if len(clock_rows) and np.isfinite(fine[last := clock_rows[-1]]):
            rate = columns["mean_tokens_per_s"][last]
            totals.clock_step_s = MEAN_RATE_STEP * float(fine[last] / rate)
    new, (per_step, new_tokens, new_samples) = totals.rates(
        index, np.stack([clock, token_totals, sample_totals])
    )
    if "step_time_s" not in columns:
        parts = [columns[name] for name in ("forward", "backward", "optimizer") if name in columns]
        if parts:
            columns["step_time_s"] = np.sum(parts, axis=0)
        elif "steps_per_s" in columns:
            columns["step_time_s"] = ratio(np.ones(len(index)), columns["steps_per_s"])
    if "tokens" not in columns and "total_tokens" in columns:
        columns["tokens"] = _spread(new_tokens, new)
    if "total_samples" in columns:
        columns["global_batch"] = _spread(new_samples, new)
    total_rate = columns.get("tokens_per_s")
    if totals.times_by_rate:
        columns["time_by_clock"] = _spread(per_step, new)
    if total_rate is not None and "tokens" in columns:
        times = columns.get("step_time_s", nothing)
        by_rate = ratio(columns["tokens"], total_rate)
        columns["step_time_s"] = np.where(np.isnan(times), by_rate, times)
    if "step_time_s" not in columns and not totals.times_by_rate and not np.isnan(clock).all():
        columns["step_time_s"] = _spread(per_step, new)
    times = columns.get("step_time_s")
    if "tokens" not in columns and tokens:
        columns["tokens"] = np.full(len(index), float(tokens))
    if total_rate is not None and times is not None and "tokens" not in columns:
        columns["tokens"] = product_of(total_rate, times)
    if "rolling_tokens_per_s" in columns:
        columns["tokens"] = columns["rolling_tokens_per_s"]
    if "mfu" in columns:
        columns["mfu"] = nan_if_negative(columns["mfu"])
    devices, per_device = log.facts.get("num_devices"), "tokens_per_s_per_device"
    if isinstance(devices, int) and total_rate is not None and per_device not in columns:
        columns[per_device] = total_rate / devices
    elif not isinstance(devices, int) and "tokens_per_s_per_rank" in columns:
        columns[per_device] = columns["tokens_per_s_per_rank"]
        log.remark(PER_RANK)
    return new


def _check_rate_by_clock(log: LogContent, totals: _Totals) -> None:
    """Use step times of the log's clock if it has no rate, or one of another number of steps.

    fairseq on TPUs, for example, divides the tokens of one step by the time of all steps between
    two lines. The clock counts if it advances between most lines.
    """
    by_clock = np.concatenate([*totals.times_by_clock, np.zeros(0)])
    by_rate = log.column("step_time_s").astype(np.float64)
    if not np.isfinite(by_rate).any():
        if np.isfinite(by_clock).any():
            log.set_column("step_time_s", [by_clock])
            log.resolution_s = totals.clock_step_s / totals.distance
        return
    # A line after an evaluation has no rate, and its clock includes the evaluation.
    by_clock = np.where(np.isfinite(by_rate), by_clock, np.nan)
    both = np.isfinite(by_clock) & np.isfinite(by_rate)
    clock_s, rate_s = float(by_clock[both].sum()), float(by_rate[both].sum())
    error_s = 2 * totals.clock_step_s / totals.distance
    is_running = both.sum() > max(1, MIN_CLOCK_SHARE * np.isfinite(by_rate).sum())
    if not is_running or abs(clock_s - rate_s) <= MAX_RATE_ERROR * clock_s + error_s:
        return
    log.remark(
        "step times follow from the elapsed time: the printed tokens/s imply steps "
        f"{rate_s / clock_s:.3g} times as long"
    )
    log.set_column("step_time_s", [by_clock])
    log.resolution_s = totals.clock_step_s / totals.distance


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


def _spread_tokens(log: LogContent) -> None:
    """Replace rolling rates in the column of tokens by the mean tokens of a step.

    With times t and rates r they are sum(t) / sum(1 / r), because both sums cover the same steps.
    """
    rates, times = log.column("tokens"), log.column("step_time_s")
    per_token = ratio(np.ones(len(rates)), np.where(np.isfinite(times), rates, np.nan))
    total_s = float(times[np.isfinite(per_token)].sum())
    if total_s:
        tokens = total_s / float(np.nansum(per_token))
        log.set_column("tokens", [np.broadcast_to(tokens, len(log))])


def _derive_batches(log: LogContent) -> None:
    """Store the batch of each step as rate x time if both are precise enough for a whole number.

    A rate of another interval than the time gives numbers that are not whole.
    """
    pieces = list(map(partial(_batches, log), range(0, len(log), ROWS_AT_ONCE)))
    num_known = sum(num for num, _ in pieces)
    num_whole = sum(int(np.isfinite(batches).sum()) for _, batches in pieces)
    if num_whole and num_whole >= MIN_WHOLE * num_known:
        log.set_column("global_batch", [batches for _, batches in pieces])


def _batches(log: LogContent, start: int) -> tuple[int, FloatColumn]:
    """Return how many lines from `start` have a rate and a time, and their whole batches."""
    times = log.column("step_time_s")[start : start + ROWS_AT_ONCE]
    rates = log.column("samples_per_s")[start : start + ROWS_AT_ONCE].astype(np.float64)
    rates[np.isinf(rates)] = np.nan
    batches = product_of(rates, times)
    whole = np.round(batches)
    error = RATE_ERROR * batches + 0.5 * log.resolution_s * rates
    is_whole = (whole > 0) & (error < 0.5) & (np.abs(batches - whole) <= error)
    return int(np.isfinite(batches).sum()), np.where(is_whole, whole, np.nan)


def _spread(values: FloatColumn, new: npt.NDArray[np.bool_]) -> FloatColumn:
    """Return values of the new rows as a column of all rows."""
    column = np.full(len(new), np.nan)
    column[new] = values
    return column
