"""Log format of Hugging Face's Trainer: loss dictionaries, one run summary, a progress bar.

The dictionaries have no step number; the progress bar, redrawn after each, does. Their file form,
`trainer_state.json`, contains both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from itertools import compress, repeat

import numpy as np

from paceline.core.steps import FloatColumn
from paceline.core.units import GIB
from paceline.engines.log_reading.hf_settings import (
    LONGEST_RECORD,
    RUNNING,
    TrainSummaries,
    complete_settings,
    pieces,
    read_settings,
)
from paceline.engines.log_reading.log_content import Fact, LogContent, LogFormat, numbers
from paceline.engines.log_reading.records import (
    RecordColumn,
    Records,
    column,
    last_match,
    product_of,
    ratio,
    required_literal,
    significant_step,
    watch_end,
)

ENDS = b"Training completed. Do not forget"
LARGEST_STEP = 2.0**53
LARGEST_RATE = 1e9
BAR_UNIT = 0.01
"""Resolution of a bar's printed rate."""
RUN_TIME_UNIT = 1e-4
"""Resolution of a run time that is printed as a number."""

_EVENT = re.compile(
    rb"[{|](?:(?<=\{)([^{}]{2,8000}+)\}"
    rb"|(?<=\|) (\d{1,12}+)/(\d{1,12}+) \[[^\[\]{}<\r\n]{1,24}<[^\[\]{},\r\n]{1,24}, {1,4}"
    rb"([0-9.]{1,12}+|\?)(s/it|it/s))"
)
_RESUMED = re.compile(rb"Continuing training from global step (\d{1,12})(?!\d)")
_RECORD = re.compile(rb"\{([^{}]{2,8000}+)\}")
_INCOMPLETE = re.compile(rb"\{['\"](?:loss|train_runtime)['\"]: [^{}]{0,8000}\Z")
_LOSS = re.compile(rb"'loss': '?(-?(?:[Nn]a[Nn]|[Ii]nf)|[-+0-9.eE]{1,24})[^\n]*")
_FIELDS = {
    "loss": RecordColumn((_LOSS,)),
    "grad_norm": RecordColumn((re.compile(_LOSS.pattern.replace(b"loss", b"grad_norm")),)),
    "tokens": column(rb"'(?:num_input_tokens_seen|num_tokens|tokens/total)': '?"),
    "step": column(rb"'step': '?", rb"'global_step/max_steps': '"),
    "run_time_s": column(rb"'train_runtime': '?"),
    "step_time_s": column(rb"'iteration_time_s': '?", rb"'step_time': '?"),
    "tokens_per_s": column(rb"'step_tokens_per_second': '?"),
}
"""Fields of a dictionary.

The Trainer itself, TRL and axolotl use these names for the total of tokens since the run's start.
"""
_MEAN_SPEEDS = {
    "steps_per_s": column(rb"'train_speed\(iter/s\)': '?"),
    "step_time_s": column(rb"'train_speed\(s/it\)': '?"),
}
"""Speeds of ms-swift, which are those of all steps so far."""

_MEMORY = re.compile(rb"['\"]memory/max_allocated \(GiB\)['\"]: ['\"]?([0-9.]{1,16})")
_TRAINED_TOKENS = re.compile(rb"'tokens/train_per_sec_per_gpu': '?([0-9]{1,15}(?:\.[0-9]{1,9})?)")
"""Rate of axolotl, which counts the tokens of the loss only; some versions sum all devices."""
STEP_TIME_REMARK = (
    "step times are TRL's `step_time`: generation, forward and backward pass, without the optimizer"
)


def read(blocks: Iterable[bytes], log: LogContent) -> None:
    """Read steps as counted by the progress bar, from 1, and the figures of the whole run.

    If the dictionaries have `train_runtime`, a running total, step times are its differences. Else
    the bar's moving average is used, as printed. Rates of the whole run cover all devices.
    """
    run = _Run(log)
    for text in _whole_records(watch_end(blocks, log, ENDS, _INCOMPLETE)):
        for part in pieces(text):
            if part.startswith(RUNNING):
                run.begin()
            run.read(part)
    run.end()


def _whole_records(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the blocks, split so that dictionaries stay whole, even across lines."""
    pending = b""
    for block in blocks:
        text = pending + block
        at = text.rfind(b"{", -LONGEST_RECORD)
        pending = text[at:] if at >= 0 and text.find(b"}", at) < 0 else b""
        yield text[: len(text) - len(pending)]
    yield pending


Entry = tuple[float, float, float, float, float, float, float, float]
"""Values of one dictionary; NaN if absent.

They are loss, gradient norm, tokens of all devices since the run's start, step number, seconds
since the run's start, seconds per step, tokens/s since the entry before, and the resolution of the
run time in seconds.
"""


Place = tuple[int, bool, float, float]
"""Step of an entry, whether a bar or the entry itself states it, its run time and its tokens."""

START: Place = (0, True, 0.0, 0.0)


class _Run:
    """Reader of consecutive runs, event by event."""

    def __init__(self, log: LogContent) -> None:
        self._log = log
        self._summaries = TrainSummaries()
        self._previous_facts: dict[str, Fact] = {}
        self._rows = _Rows()
        self._uncounted = 0
        self._has_run_time = self._timed_by_bar = False
        self._resolution_s = 0.0
        self._begin()

    def begin(self) -> None:
        """Start a run."""
        self._settle(0)
        self._rows.add_to(self._log, all_of_it=True)
        self._summaries.begin()
        if self._is_over:
            self._previous_facts = {}
            self._log.figures.pop("timed_steps", None)
        self._begin()

    def read(self, text: bytes) -> None:
        """Read a piece of one run's log."""
        read_settings(text, self._log)
        if resume := last_match(_RESUMED, text):
            self._resumed_at = int(resume[1])
        if required_literal(_MEMORY) in text:
            for memory in _MEMORY.findall(text):
                self._log.peak("allocated", float(numbers([memory])[0]) * GIB)
        if rate := last_match(_TRAINED_TOKENS, text):
            self._log.figures["trained_tokens_per_s_per_device"] = float(rate[1])
        events = _events(text)
        if not events:
            return
        records = _plain([event[0] for event in events])
        with_loss = [b"'loss': " in record for record in records]
        entries = _entries(list(compress(records, with_loss)))
        for record, has_loss, event in zip(records, with_loss, events, strict=True):
            if has_loss:
                self._entry(next(entries))
            elif not record:
                _, count, total, rate, unit = event
                self._bar(int(count), int(total), rate, unit)
            elif b"'eval_runtime': " in record and (self._place or self._pending):
                self._summaries.add_evaluation(record)
            elif b"'train_runtime': " in record:
                self._summaries.add(record)
                self._end_run()
        self._rows.add_to(self._log)

    def end(self) -> None:
        """Finish at the end of the log."""
        log = self._log
        self._settle(0)
        self._rows.add_to(log, all_of_it=True)
        log.facts = {**self._previous_facts, **log.facts}
        if self._bar_total is not None:
            log.facts.setdefault("total_steps", self._bar_total)
        complete_settings(log)
        self._summaries.keep(log)
        self._keep_steps_done()
        log.resolution_s = self._resolution_s
        if self._timed_by_bar:
            log.resolution_s = log.resolution_s or self._bar_resolution_s
            log.facts.pop("log_interval", None)
            log.remark("step times are the progress bar's moving average, which hides variation")
        if self._uncounted > 1:
            log.remark(
                f"{self._uncounted:,} lines with a loss have no step number and are counted as one "
                "step each"
            )

    def _begin(self) -> None:
        self._bar_resolution_s = 0.0
        self._bar_total: int | None = None
        self._count = -1
        self._resumed_at = 0
        self._is_over = False
        self._ended_at: int | None = None
        self._pending: Entry | None = None
        self._place: Place | None = None
        self._distance: int | None = None
        self._last_tokens = 0, 0.0

    def _end_run(self) -> None:
        """Mark the run as finished: later settings may belong to another run."""
        if not self._is_over:
            self._is_over = True
            self._previous_facts, self._log.facts = self._log.facts, {}

    def _keep_steps_done(self) -> None:
        """Store the steps in the run time and their rate, since the printed rate has few digits."""
        figures, total = self._log.figures, self._log.facts.get("total_steps")
        if "run_time_s" not in figures:
            return
        last = figures.pop("timed_steps", None) or self._ended_at or total
        if isinstance(last, int | float) and last > self._resumed_at:
            figures["timed_steps"] = last - self._resumed_at
            seconds = figures["run_time_s"] - figures.get("evaluation_s", 0.0)
            figures["steps_per_s"] = figures["timed_steps"] / seconds

    def _entry(self, entry: Entry) -> None:
        if self._pending is not None:
            self._settle(0)
        if entry[4] == entry[4]:
            self._has_run_time = True
        if 0 <= entry[3] < LARGEST_STEP:
            self._add_entry(entry, int(entry[3]), True)
        else:
            self._pending = entry

    def _bar(self, count: int, total: int, rate: bytes, unit: bytes) -> None:
        """Read a bar; the first one after an entry is redrawn because of it and has its step."""
        if total != self._bar_total and not self._is_of_the_run(total):
            return
        if count < self._count:
            self._place = None
        last_count, self._count = self._count, count
        # After the run's summary, the bar is drawn once more with the last completed step.
        self._ended_at = count if self._is_over else None
        if self._pending is not None:
            self._settle(count)
        if self._has_run_time:
            return
        # The first steps of a run take longer than the others, and a redrawn bar has no new
        # information.
        if self._place is not None and count != last_count:
            time_s, self._bar_resolution_s = _bar_time(rate, unit)
            self._rows.add(count, time_s)
            self._timed_by_bar |= time_s == time_s

    def _is_of_the_run(self, total: int) -> bool:
        """Return whether a bar of `total` is the run's: as logged, else first after an entry."""
        if self._bar_total is not None:
            return False
        expected = self._log.facts.get("total_steps")
        if total != expected and (expected is not None or self._pending is None):
            return False
        self._bar_total = total
        return True

    def _settle(self, count: int) -> None:
        """Assign the pending entry to the step of a bar with `count`, or to the next step."""
        entry, self._pending = self._pending, None
        if entry is None:
            return
        last = self._place[0] if self._place else 0
        if count >= (last or 1):
            self._add_entry(entry, count, True)
        else:
            self._uncounted += 1
            self._add_entry(entry, last + self._log_interval(), False)

    def _log_interval(self) -> int:
        if self._distance is not None:
            return self._distance
        interval = self._log.facts.get("log_interval")
        return interval if isinstance(interval, int) and 0 < interval < 1 << 31 else 1

    def _add_entry(self, entry: Entry, index: int, certain: bool) -> None:
        loss, grad_norm, all_tokens, _, run_time_s, own_time_s, tokens_per_s, unit_s = entry
        before = self._place
        if before is None and certain and index == 1:
            before = START
        if before is None or index != before[0]:
            self._place = index, certain, run_time_s, all_tokens
        time_s = tokens = math.nan
        if before is not None and certain and before[1] and index > before[0]:
            steps = index - before[0]
            if before[0]:
                self._distance = steps
            if all_tokens > before[3]:
                tokens = (all_tokens - before[3]) / steps
            if math.inf > run_time_s > before[2]:
                time_s = (run_time_s - before[2]) / steps
                self._resolution_s = unit_s / steps
        if tokens_per_s == tokens_per_s and self._bar_total is None:
            tokens, time_s = self._tokens_and_time(index, all_tokens, tokens_per_s)
        if time_s != time_s and self._bar_total is None and math.inf > own_time_s > 0:
            time_s = own_time_s
            self._log.remark(STEP_TIME_REMARK)
        if certain or self._rows.can_take(index):
            self._rows.add(index, time_s, loss, grad_norm, tokens)
        else:
            self._rows.set_loss(loss)

    def _tokens_and_time(
        self, index: int, all_tokens: float, tokens_per_s: float
    ) -> tuple[float, float]:
        """Return tokens and seconds of a step from the total of tokens and the rate of an entry."""
        last_index, last_tokens = self._last_tokens
        self._last_tokens = index, all_tokens
        steps = index - last_index
        if not (steps > 0 and math.inf > all_tokens > last_tokens and tokens_per_s > 0):
            return math.nan, math.nan
        tokens = (all_tokens - last_tokens) / steps
        return tokens, tokens / tokens_per_s


ROW = ("step_time_s", "loss", "grad_norm", "tokens")


class _Rows:
    """Buffered steps; more values may follow for the last one."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, ...]] = []
        """Numbers of the steps, and their values by the names of `ROW`."""

    def can_take(self, index: int) -> bool:
        """Return whether `index` comes after every step so far."""
        return not self._rows or index > self._rows[-1][0]

    def add(
        self,
        index: int,
        time_s: float,
        loss: float = math.nan,
        grad_norm: float = math.nan,
        tokens: float = math.nan,
    ) -> None:
        """Add a step, or more values of the last step."""
        row = (index, time_s, loss, grad_norm, tokens)
        rows = self._rows
        if rows and rows[-1][0] == index:
            pairs = zip(row, rows[-1], strict=True)
            rows[-1] = tuple([new if new == new else old for new, old in pairs])
        else:
            rows.append(row)

    def set_loss(self, loss: float) -> None:
        """Store a NaN loss whose step is unknown."""
        if math.isinf(loss) and self._rows:
            index, time_s, _, *others = self._rows[-1]
            self._rows[-1] = index, time_s, loss, *others

    def add_to(self, log: LogContent, all_of_it: bool = False) -> None:
        """Move the steps into the log, except for the last one before the end of the log."""
        ready = len(self._rows) - (not all_of_it)
        if ready <= 0:
            return
        rows = self._rows[:ready]
        index = np.array([row[0] for row in rows], dtype=np.int64)
        table = np.array(rows, dtype=np.float64).T[1:]
        columns = {n: c for n, c in zip(ROW, table, strict=True) if not np.isnan(c).all()}
        log.add_steps(index, **columns)
        del self._rows[:ready]


def _events(text: bytes) -> list[tuple[bytes, ...]]:
    """Return dictionaries and bars in order: text, or count, total, rate, unit."""
    if b"s/it" in text or b"it/s" in text:
        return _EVENT.findall(text)
    return [(record, b"", b"", b"", b"") for record in _RECORD.findall(text)]


def _bar_time(rate: bytes, unit: bytes) -> tuple[float, float]:
    """Return a bar's seconds per step and the resolution of its last digit in seconds.

    tqdm prints `s/it` and `it/s` with two decimals; NaN if it does not know the rate yet.
    """
    try:
        value = float(rate)
    except ValueError:
        value = math.nan
    if not 0 < value < LARGEST_RATE:
        return math.nan, 0.0
    return (value, BAR_UNIT) if unit == b"s/it" else (1 / value, BAR_UNIT / value**2)


def _plain(records: list[bytes]) -> list[bytes]:
    """Return each dictionary on a single line with single quotes."""
    all_records = b"\0".join(records)
    if b'"' not in all_records and b"\n" not in all_records and b"\r" not in all_records:
        return records
    return [
        record.replace(b'"', b"'").replace(b"\n", b" ").replace(b"\r", b" ") for record in records
    ]


def _entries(records: list[bytes]) -> Iterator[Entry]:
    fields = Records(records)
    columns = fields.columns(_FIELDS)
    nothing: FloatColumn = np.broadcast_to(np.nan, len(records))
    speeds = fields.columns(_MEAN_SPEEDS) if "step" in columns else {}
    if speeds:
        for times in (
            ratio(columns["step"], speeds.get("steps_per_s", nothing)),
            product_of(columns["step"], speeds.get("step_time_s", nothing)),
        ):
            earlier = columns.get("run_time_s", nothing)
            columns["run_time_s"] = np.where(np.isnan(earlier), times, earlier)
    values = [columns.get(name, nothing).tolist() for name in _FIELDS]
    times = values[list(_FIELDS).index("run_time_s")]
    units: Iterable[float] = repeat(RUN_TIME_UNIT, len(records))
    if b"'train_runtime': '" in b"\n".join(records):
        units = map(_unit, records, times)
    return zip(*values, units, strict=True)


def _unit(record: bytes, time_s: float) -> float:
    """Return the resolution in seconds: 4 significant digits in quotes, else 4 decimals."""
    return significant_step(time_s, 4) if b"'train_runtime': '" in record else RUN_TIME_UNIT


LOG_FORMAT = LogFormat(
    title="Hugging Face Trainer",
    marks=(b"train_runtime", b"'loss': ", b'"loss": '),
    step_line=re.compile(
        rb"['\"]train_runtime['\"]: ['\"]?[0-9]"
        rb"|\{\s{0,40}(?:['\"]epoch['\"]: ['\"]?[0-9][^{}]{0,400}?)?['\"]loss['\"]: ['\"]?[0-9Nni-]"
        rb"[^{}]{1,2000}?['\"](?:learning_rate|epoch)['\"]: "
    ),
    read=read,
    example="`{'loss': ..., 'epoch': ...}`, `{'train_runtime': ...}`, and its progress bar",
    numbering="the progress bar's",
    end_marker="Training completed, or train_runtime",
    whole_run=True,
)
