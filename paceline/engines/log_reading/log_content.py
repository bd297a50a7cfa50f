"""Contents of a training log, collected during reading: columns, settings, figures.

Millions of steps must fit in little memory, so there is no object per step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.core.axes import AXIS
from paceline.core.layout import AXIS_FIELDS
from paceline.core.steps import FLOATS, FloatColumn, IntColumn, Steps
from paceline.core.units import pluralize
from paceline.engines.log_reading.column import REPAIRS, GrowingColumn, Rows, grows, restarts

EXACT = {"step_time_s", "tokens"}
"""Columns in 64-bit precision; 32 bits are enough for every other printed value."""

LARGEST = 1e100
"""Largest usable absolute value; larger printed numbers count as infinite."""

EXACT_INTEGERS = 2.0**53
"""Bound below which whole numbers are exact in 64-bit floats."""

SHORTEST_STEP_S = 1e-9
"""Shortest plausible step time in seconds; anything shorter is a printed zero or damage."""

MAX_ATTEMPTS = 1000
MAX_REMARKS = 20
MAX_CHARACTERS = 200
MAX_DIGITS = 40

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_DECIMAL = re.compile(rb"[+-]?(?=\.?\d)\d*+\.?(\d*+)(?:[eE]([+-]?\d{1,4}))?")

Fact = int | float | str


@dataclass
class LogContent:
    """Contents of a log as read by its log format; empty until lines are read."""

    facts: dict[str, Fact] = field(default_factory=dict[str, Fact])
    """Settings in the log, by the names of FACT_NAMES."""
    figures: dict[str, float] = field(default_factory=dict[str, float])
    """Figures for the whole run, in base units, by the names of FIGURE_NAMES.
    """
    other_rates: dict[str, float] = field(default_factory=dict[str, float])
    """Samples per second of all devices that include other times, by what they include."""
    memory_bytes: dict[str, float] = field(default_factory=dict[str, float])
    """Largest printed memory peak by kind: allocated, reserved, used."""
    resolution_s: float = 0.0
    """Resolution of the printed step times, in seconds."""
    remarks: list[str] = field(default_factory=list[str])
    """Sentences for the reader about skipped, joined or repaired lines."""
    end_line: str | None = None
    """Line in which the program reports its end, or None."""
    incomplete_reason: str | None = None
    """Reason why the log is incomplete, or None."""
    refusal: str | None = None
    """Reason why the log has no step line of its log format, or None."""
    out_of_memory: str | None = None
    """Line that reports running out of memory, or None."""
    not_a_number: str | None = None
    """Line of the error that a NaN stopped the program, or None."""
    _num_invalid: int = 0
    """Number of invalid step times."""
    _in_order: bool = False
    _earlier_facts: list[dict[str, Fact]] = field(default_factory=list[dict[str, Fact]])
    """Settings of the attempts before the last one."""
    _attempt: GrowingColumn = field(default_factory=lambda: GrowingColumn(np.int64))
    """Attempt of each step."""
    _index: GrowingColumn = field(default_factory=lambda: GrowingColumn(np.int64))
    _columns: dict[str, GrowingColumn] = field(default_factory=dict[str, GrowingColumn])

    def __len__(self) -> int:
        return len(self._index)

    def add_steps(self, index: IntColumn, **columns: FloatColumn) -> None:
        """Append steps: their numbers as printed, and columns of equal length with names of Step.

        NaN means absent, infinity means a printed NaN (see `numbers`). Step times of zero or less
        count as absent.
        """
        before = len(self._index)
        missing = np.broadcast_to(np.nan, len(index))
        self._index.extend(index)
        self._attempt.extend(np.broadcast_to(np.int64(len(self._earlier_facts)), len(index)))
        for name, values in columns.items():
            assert len(values) == len(index), name
            if name not in self._columns:
                self._columns[name] = _empty_column(name, before)
            if name == "step_time_s":
                self._num_invalid += int(((values < SHORTEST_STEP_S) | np.isinf(values)).sum())
                values = np.where(values >= SHORTEST_STEP_S, values, np.nan)
            self._columns[name].extend(values)
        for name in self._columns.keys() - columns.keys():
            self._columns[name].extend(missing)

    def column(self, name: str) -> FloatColumn:
        """Return the values of all steps so far, in the order of addition; NaN if absent."""
        column = self._columns.get(name)
        return column.read() if column else np.broadcast_to(np.nan, len(self))

    def set_column(self, name: str, values: Iterable[FloatColumn]) -> None:
        """Replace the values of the steps so far by `values`, one per step, supplied in pieces."""
        column = _empty_column(name, 0)
        for piece in values:
            column.extend(piece)
        assert len(column) == len(self), name
        self._columns[name] = column

    def begin_attempt(self) -> None:
        """Start an attempt: later settings apply to later steps only."""
        if len(self) and len(self._earlier_facts) < MAX_ATTEMPTS:
            self._earlier_facts.append(self.facts)
            self.facts = {}

    @property
    def has_attempts(self) -> bool:
        """True if settings were repeated between steps."""
        return bool(self._earlier_facts)

    def facts_of(self, row: int) -> dict[str, Fact]:
        """Return the facts of the attempt that made the step in this row."""
        if not self._earlier_facts:
            return self.facts
        attempt = int(self._attempt.read()[row])
        return [*self._earlier_facts, self.facts][attempt]

    def take_steps(self, other: LogContent, without: Collection[str] = ()) -> None:
        """Replace the steps by those of `other`, which must not be used afterwards."""
        self._index, self._attempt = other._index, other._attempt
        self._columns = {
            name: column for name, column in other._columns.items() if name not in without
        }
        self._num_invalid = other._num_invalid
        self.resolution_s = other.resolution_s or self.resolution_s

    def remark(self, sentence: str) -> None:
        """Store a sentence for the reader once, up to a maximum number of sentences."""
        if sentence not in self.remarks and len(self.remarks) < MAX_REMARKS:
            self.remarks.append(sentence)

    def peak(self, kind: str, value_bytes: float) -> None:
        """Store the largest memory value of a kind; values that are not finite are ignored."""
        if value_bytes < LARGEST:
            self.memory_bytes[kind] = max(value_bytes, self.memory_bytes.get(kind, 0.0))

    def add_rank(self, other: LogContent) -> None:
        """Add what another rank of the run reports apart from steps: settings, memory, the end."""
        self.facts = {**other.facts, **self.facts}
        for kind, value_bytes in other.memory_bytes.items():
            self.peak(kind, value_bytes)
        self.end_line = self.end_line or other.end_line

    def steps(self) -> Steps:
        """Return all steps as columns in training order; restarts follow one another.

        Nothing may be appended afterwards.
        """
        self._restore_order()
        n = len(self)
        if self._num_invalid:
            self.remark(f"invalid step times (zero, negative or NaN): {self._num_invalid:,}")
        return Steps(
            self._index.read(),
            np.broadcast_to(np.int64(1), n),
            np.broadcast_to(np.bool_(False), n),
            {name: column.read() for name, column in self._columns.items()},
        )

    def _restore_order(self) -> None:
        if self._in_order or grows(self._index.read()):
            return
        self._in_order = True
        for repair in REPAIRS:
            if change := repair(self._index.read(), self.column("step_time_s")):
                rows, why = change
                self._keep(rows)
                self.remark(why)
        if num_restarts := restarts(self._index.read()):
            self.remark(
                f"the step numbers start over {pluralize(num_restarts, 'time')} (restarts, or "
                "several runs in one log); the figures are those of one continuous stretch"
            )

    def _keep(self, rows: Rows) -> None:
        for column in (self._index, self._attempt, *self._columns.values()):
            column.keep(rows)


@dataclass(frozen=True)
class LogFormat:
    """Log format of one framework and its reader."""

    title: str
    """Display name of the framework, such as `Megatron-LM`."""
    marks: tuple[bytes, ...]
    """Literals of which every log of this format has at least one; searched first."""
    step_line: re.Pattern[bytes]
    """Pattern that matches only a step (or the whole-run figure) of this log format."""
    read: Callable[[Iterable[bytes], LogContent], None]
    """Reader of blocks of whole lines; it must neither raise nor slow down on any bytes."""
    example: str
    """Example of a step line in Markdown."""
    numbering: str
    """Numbering of the steps, such as `from 1`."""
    precedence: int = 5
    """Priority if one log has lines of several formats; the lowest wins."""
    convention: str | None = None
    """FLOPs convention of printed FLOP/s; None if none are printed or the convention varies."""
    whole_run: bool = False
    """True if the framework's own figure for the whole run takes precedence over its step lines."""
    end_marker: str | None = None
    """Text that the program prints at its end, for users; None without one."""
    begins: bytes | None = None
    """Literal at the start of a record that may span several lines and must not be split."""


FACT_NAMES = {
    "global_batch": "samples per step over all devices",
    "micro_batch": "samples per device and micro-batch",
    "gradient_accumulation": "micro-batches per device and step",
    "seq_len": "token positions per sample",
    "num_devices": "ranks",
    **{axis: AXIS[axis].size_name for axis in AXIS_FIELDS},
    "zero_stage": "ZeRO stage",
    "num_parameters": "parameters of the full model",
    "total_steps": "planned steps of the run",
    "log_interval": "steps averaged by one step line",
    "num_layers": "transformer blocks",
    "hidden_size": "width of the model",
    "num_heads": "attention heads",
    "num_kv_heads": "key and value heads",
    "ffn_size": "width of the feed-forward layer",
    "vocab_size": "rows of the embedding",
    "dtype": "data type of the GEMMs",
    "device": "accelerator name as printed",
    "model": "model name as printed",
    "framework_version": "version of the framework",
    "lora_rank": "rank of the adapters",
    "loss_on": "`text` if masks exclude targets from the loss and from the token counts",
    "profiled": "attached profiler",
    "routing": "choice of experts: `forced` or `learned from scratch`",
    "submitter": "submitter of the result as printed",
    "platform": "system name as printed",
}
"""Settings that a log format may report, with their meanings."""

LAYOUT_FACTS = (*AXIS_FIELDS, "zero_stage", "micro_batch")
"""Settings that make up a layout."""

FIGURE_NAMES = {
    "samples_per_s": "samples per second over all devices, mean of the whole run",
    "steps_per_s": "steps per second, mean of the whole run",
    "tokens_per_s": "tokens per second over all devices, mean of the whole run",
    "trained_tokens_per_s_per_device": "last printed tokens of the loss per second and device",
    "flops_per_s_per_device": "FLOP/s per device, mean of the whole run",
    "run_time_s": "duration of the timed run in seconds",
    "evaluation_s": "seconds of the evaluations in the timed run",
    "init_time_s": "seconds from program start to the start of the timed run",
    "timed_steps": "steps in the timed run",
    "samples_to_target": "samples until the quality target was reached",
    "running_samples_per_s": "last printed running average of samples per second over all devices",
    "startup_s": "seconds of the first step, or of the start-up phase as printed",
    "power_w_per_device": "power per device in watts, mean over the step lines",
}
"""Figures that a log format may report once for the whole run, with their meanings."""


def numbers(texts: Sequence[bytes]) -> FloatColumn:
    """Return the numbers in `texts`.

    Empty or invalid text becomes NaN; a printed `nan` or `inf`, and anything beyond 1e100, becomes
    infinity, so that arithmetic cannot overflow.
    """
    try:
        values = np.fromiter(map(float, texts), dtype=np.float64, count=len(texts))
    except ValueError:
        values = np.array([_number(text) for text in texts], dtype=np.float64)
    else:
        values[np.isnan(values)] = np.inf
    values[np.abs(values) > LARGEST] = np.inf
    return values


def whole_numbers(texts: Sequence[bytes]) -> IntColumn:
    """Return the integers in `texts`; the largest integer for others and beyond 64 bits."""
    try:
        return np.fromiter(map(int, texts), dtype=np.int64, count=len(texts))
    except (OverflowError, ValueError):
        largest = np.iinfo(np.int64).max
        return np.array([_integer(text, largest) for text in texts], dtype=np.int64)


def _integer(text: bytes, largest: int) -> int:
    return min(int(text[:MAX_DIGITS]), largest) if text.isdigit() else largest


def decimal_step(text: bytes) -> float:
    """Return the resolution of the last digit: 0.1 for `5690.4`, 1.0 for `29`, 10.0 for `1.25e+3`.

    Returns 0 for text that is not a number.
    """
    match = _DECIMAL.fullmatch(text)
    if match is None:
        return 0.0
    return 10.0 ** min(max(int(match[2] or 0) - len(match[1] or b""), -100), 100)


def excerpt(text: bytes) -> str:
    """Return the start of a log line for display, without colors and control codes."""
    line = _COLOUR.sub("", text[: 4 * MAX_CHARACTERS].decode("utf-8", "replace"))
    printable = "".join(c if c.isprintable() else " " for c in line)
    return " ".join(printable.split())[:MAX_CHARACTERS].rstrip()


def _number(text: bytes) -> float:
    if not text:
        return float("nan")
    try:
        value = float(text)
    except ValueError:
        return float("nan")
    return value if np.isfinite(value) else float("inf")


def _empty_column(name: str, length: int) -> GrowingColumn:
    if name not in FLOATS:
        raise KeyError(f"{name} is not a column of Step")
    column = GrowingColumn(np.float64 if name in EXACT else np.float32)
    column.extend(np.broadcast_to(np.nan, length))
    return column
