"""What a training log says, gathered while it is read: columns that grow, settings, figures.

Millions of steps must cost little memory: no object is kept for a step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.core.axes import AXIS
from paceline.core.layout import AXIS_FIELDS
from paceline.core.steps import FLOATS, FloatColumn, IntColumn, Steps
from paceline.engines.log_reading.column import REPAIRS, GrowingColumn, Rows, grows, restarts

EXACT = {"step_time_s", "tokens"}
"""Columns kept in 64 bit; of the others a log prints no more than 32 bit hold."""

LARGEST = 1e100
"""What a log prints beyond this is not a number that anything can be made of."""

EXACT_INTEGERS = 2.0**53
"""Whole numbers below this are exact in 64-bit floats."""

SHORTEST_STEP_S = 1e-9
"""What is shorter is a zero that was printed, or damage."""

MOST_ATTEMPTS = 1000
MOST_REMARKS = 20
MOST_CHARACTERS = 200
MOST_DIGITS = 40

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_DECIMAL = re.compile(rb"[+-]?(?=\.?\d)\d*+\.?(\d*+)(?:[eE]([+-]?\d{1,4}))?")

Fact = int | float | str


@dataclass
class LogContent:
    """A log as its log format reads it; nothing is said until a line says it."""

    facts: dict[str, Fact] = field(default_factory=dict[str, Fact])
    """Settings that the log states, by the names of FACT_NAMES."""
    figures: dict[str, float] = field(default_factory=dict[str, float])
    """What the log prints once for the whole run, in base units, by the names of FIGURE_NAMES."""
    memory_bytes: dict[str, float] = field(default_factory=dict[str, float])
    """Largest printed peak by kind: allocated, reserved, used."""
    resolution_s: float = 0.0
    """Step of the printed step times."""
    remarks: list[str] = field(default_factory=list[str])
    """Sentences for the reader: what was passed over, joined or repaired."""
    ended: str | None = None
    """The line with which the program says that it came to its end, or None."""
    torn: str | None = None
    """Why the log is only a part of what was written, or None."""
    out_of_memory: str | None = None
    """The line that tells of it."""
    _num_odd: int = 0
    """Step times that are no time."""
    _in_order: bool = False
    _earlier_facts: list[dict[str, Fact]] = field(default_factory=list[dict[str, Fact]])
    """Settings of the attempts before the last one."""
    _attempt: GrowingColumn = field(default_factory=lambda: GrowingColumn(np.int64))
    """In which of the attempts a step was made."""
    _index: GrowingColumn = field(default_factory=lambda: GrowingColumn(np.int64))
    _columns: dict[str, GrowingColumn] = field(default_factory=dict[str, GrowingColumn])

    def __len__(self) -> int:
        return len(self._index)

    def add_steps(self, index: IntColumn, **columns: FloatColumn) -> None:
        """Append steps: their numbers as the log prints them, and columns of equal length.

        NaN = the line does not say; infinity = it printed NaN (`numbers` makes that so). Names are
        those of Step. A step time of zero or less says nothing.
        """
        before = len(self._index)
        unsaid = np.broadcast_to(np.nan, len(index))
        self._index.extend(index)
        self._attempt.extend(np.broadcast_to(np.int64(len(self._earlier_facts)), len(index)))
        for name, values in columns.items():
            assert len(values) == len(index), name
            if name not in self._columns:
                self._columns[name] = _unsaid_column(name, before)
            if name == "step_time_s":
                self._num_odd += int(((values < SHORTEST_STEP_S) | np.isinf(values)).sum())
                values = np.where(values >= SHORTEST_STEP_S, values, np.nan)
            self._columns[name].extend(values)
        for name in self._columns.keys() - columns.keys():
            self._columns[name].extend(unsaid)

    def column(self, name: str) -> FloatColumn:
        """Return what all steps so far say, in the order in which they were added; NaN: nothing."""
        column = self._columns.get(name)
        return column.read() if column else np.broadcast_to(np.nan, len(self))

    def set_column(self, name: str, values: Iterable[FloatColumn]) -> None:
        """Replace what the steps so far say by `values`, one for each, which come in pieces."""
        column = _unsaid_column(name, 0)
        for piece in values:
            column.extend(piece)
        assert len(column) == len(self), name
        self._columns[name] = column

    def begin_attempt(self) -> None:
        """What is stated from now on is of the steps to come, not of those so far."""
        if len(self) and len(self._earlier_facts) < MOST_ATTEMPTS:
            self._earlier_facts.append(self.facts)
            self.facts = {}

    @property
    def has_attempts(self) -> bool:
        """True when settings were stated anew between the steps."""
        return bool(self._earlier_facts)

    def facts_of(self, row: int) -> dict[str, Fact]:
        """The facts of the attempt in which the step in this row was made."""
        if not self._earlier_facts:
            return self.facts
        attempt = int(self._attempt.read()[row])
        return [*self._earlier_facts, self.facts][attempt]

    def take_steps(self, other: LogContent, without: Collection[str] = ()) -> None:
        """Take over the steps of `other` in place of its own; `other` must not be used again."""
        self._index, self._attempt = other._index, other._attempt
        self._columns = {
            name: column for name, column in other._columns.items() if name not in without
        }
        self._num_odd = other._num_odd
        self.resolution_s = other.resolution_s or self.resolution_s

    def remark(self, sentence: str) -> None:
        """Keep a sentence for the reader, once, and no more than a screen of them."""
        if sentence not in self.remarks and len(self.remarks) < MOST_REMARKS:
            self.remarks.append(sentence)

    def peak(self, kind: str, value_bytes: float) -> None:
        """Keep the largest memory figure of a kind; what is no finite number is passed over."""
        if value_bytes < LARGEST:
            self.memory_bytes[kind] = max(value_bytes, self.memory_bytes.get(kind, 0.0))

    def add_rank(self, other: LogContent) -> None:
        """Take what another rank of the run says beside its steps: settings, memory, the end."""
        self.facts = {**other.facts, **self.facts}
        for kind, value_bytes in other.memory_bytes.items():
            self.peak(kind, value_bytes)
        self.ended = self.ended or other.ended

    def steps(self) -> Steps:
        """Everything so far as columns, in the order of training; restarts stand one after another.

        Nothing may be appended afterwards.
        """
        self._put_in_order()
        n = len(self)
        if self._num_odd:
            self.remark(f"step times that are zero, negative or no number: {self._num_odd:,}")
        return Steps(
            self._index.read(),
            np.broadcast_to(np.int64(1), n),
            np.broadcast_to(np.bool_(False), n),
            {name: column.read() for name, column in self._columns.items()},
        )

    def _put_in_order(self) -> None:
        if self._in_order or grows(self._index.read()):
            return
        self._in_order = True
        for repair in REPAIRS:
            if change := repair(self._index.read(), self.column("step_time_s")):
                rows, why = change
                self._keep(rows)
                self.remark(why)
        if again := restarts(self._index.read()):
            self.remark(
                f"the step numbers start again, {again:,} x (a restart, or several runs in one "
                "log): figures come from one stretch in which they go on"
            )

    def _keep(self, rows: Rows) -> None:
        for column in (self._index, self._attempt, *self._columns.values()):
            column.keep(rows)


@dataclass(frozen=True)
class LogFormat:
    """How one framework writes its log, and how that is read."""

    title: str
    """What the framework calls itself: `Megatron-LM`."""
    marks: tuple[bytes, ...]
    """Literals of which every log of this kind has one: looked for before anything else."""
    step_line: re.Pattern[bytes]
    """What only a step (or the one figure) of this log format looks like."""
    read: Callable[[Iterable[bytes], LogContent], None]
    """Reads blocks of whole lines; must neither raise nor slow down on any bytes."""
    example: str
    """What a step line looks like, in Markdown."""
    numbered: str
    """How its steps are numbered: `from 1`."""
    precedence: int = 5
    """Lower wins where the lines of several log formats stand in one log."""
    convention: str | None = None
    """How the FLOP/s that it prints are counted; None when it prints none or it depends."""
    whole_run: bool = False
    """True when the framework's own figure for the whole run goes before its step lines."""
    end_marker: str | None = None
    """What the program prints when it has come to its end, for people; None when it is nothing."""
    begins: bytes | None = None
    """A literal that begins a record which may go on in the next lines: it is not torn apart."""


FACT_NAMES = {
    "global_batch": "samples a step over all devices",
    "micro_batch": "samples a device and micro-batch",
    "gradient_accumulation": "micro-batches a device and step",
    "seq_len": "token positions a sample",
    "num_devices": "ranks",
    **{axis: AXIS[axis].size_name for axis in AXIS_FIELDS},
    "zero_stage": "ZeRO stage",
    "num_parameters": "parameters of the whole model",
    "total_steps": "steps that the run is to do",
    "log_interval": "steps that one step line averages",
    "num_layers": "transformer blocks",
    "hidden_size": "width of the model",
    "num_heads": "attention heads",
    "num_kv_heads": "key and value heads",
    "ffn_size": "width of the feed-forward layer",
    "vocab_size": "rows of the embedding",
    "dtype": "number format of the matrix products",
    "device": "the accelerator's name as the log writes it",
    "model": "the model's name as the log writes it",
    "framework_version": "version of the framework",
    "lora_rank": "rank of the adapters",
    "loss_on": "`text` where masks leave targets out of the loss, and so out of the token counts",
    "profiled": "which profiler was attached",
    "submitter": "who submitted the run as a result, as the log writes it",
    "platform": "the system's name as the log writes it",
}
"""Settings that a log format may report."""

LAYOUT_FACTS = (*AXIS_FIELDS, "zero_stage", "micro_batch")
"""Those of the settings that make up a layout."""

FIGURE_NAMES = {
    "samples_per_s": "samples a second over all devices, mean of the whole run",
    "steps_per_s": "steps a second, mean of the whole run",
    "tokens_per_s": "tokens a second over all devices, mean of the whole run",
    "flops_per_s_per_device": "FLOP/s of one device, mean of the whole run",
    "run_time_s": "seconds of the timed run",
    "init_time_s": "seconds from the start of the program to the start of the timed run",
    "timed_steps": "steps that the timed run did",
    "samples_to_target": "samples seen when the quality target was reached",
    "running_samples_per_s": "the log's own running average at its end, over all devices",
    "startup_s": "seconds of the first step or of what the log calls start-up",
    "power_w_per_device": "watts of one device, mean over the step lines",
}
"""Figures that a log format may report once for the whole run."""


def numbers(texts: Sequence[bytes]) -> FloatColumn:
    """The numbers in `texts`; an empty or odd text is NaN, a printed `nan` or `inf` is infinity.

    So is what lies beyond 1e100, lest any arithmetic overflow.
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
    """The integers in `texts`, which must be digits; beyond 64 bit they are cut to the largest."""
    try:
        return np.fromiter(map(int, texts), dtype=np.int64, count=len(texts))
    except (OverflowError, ValueError):
        largest = np.iinfo(np.int64).max
        return np.array([min(int(text[:MOST_DIGITS]), largest) for text in texts], dtype=np.int64)


def decimal_step(text: bytes) -> float:
    """The step of the last printed digit: 0.1 for `5690.4`, 1.0 for `29`, 10.0 for `1.25e+3`.

    0 for what is no number.
    """
    match = _DECIMAL.fullmatch(text)
    if match is None:
        return 0.0
    return 10.0 ** min(max(int(match[2] or 0) - len(match[1] or b""), -100), 100)


def excerpt(text: bytes) -> str:
    """One line of a log to show to the reader: its beginning, without colours and control codes."""
    line = _COLOUR.sub("", text[: 4 * MOST_CHARACTERS].decode("utf-8", "replace"))
    shown = "".join(c if c.isprintable() else " " for c in line)
    return " ".join(shown.split())[:MOST_CHARACTERS].rstrip()


def _number(text: bytes) -> float:
    if not text:
        return float("nan")
    try:
        value = float(text)
    except ValueError:
        return float("nan")
    return value if np.isfinite(value) else float("inf")


def _unsaid_column(name: str, length: int) -> GrowingColumn:
    if name not in FLOATS:
        raise KeyError(f"{name} is no column of Step")
    column = GrowingColumn(np.float64 if name in EXACT else np.float32)
    column.extend(np.broadcast_to(np.nan, length))
    return column
