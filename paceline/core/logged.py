"""What a training log says, gathered while it is read: columns that grow, settings, figures.

Millions of steps must cost little memory, so a column is an array of machine numbers, and one whose
values are all equal is a single number.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.steps import FLOATS, FloatColumn, IntColumn, Steps

EXACT = {"step_time_s", "tokens"}
"""Columns kept in 64 bit; of the others a log prints no more than 32 bit hold."""

MOST_REMARKS = 20

Fact = int | float | str


class Column:
    """A growing column of numbers; a single value until the first one differs."""

    def __init__(self, typecode: str) -> None:
        self._values: array[float] = array(typecode)
        self._constant: float | None = None
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def extend(self, values: FloatColumn | IntColumn) -> None:
        """Append `values`."""
        if len(values) == 0:
            return
        if not self._length:
            self._constant = values[0].item()
        if self._constant is not None and not _all_equal(values, self._constant):
            self._values.frombytes(self._filled(self._length).tobytes())
            self._constant = None
        if self._constant is None:
            self._values.frombytes(values.astype(self._values.typecode).tobytes())
        self._length += len(values)

    def read(self) -> npt.NDArray[Any]:
        """The values so far, without a copy; nothing may be appended afterwards."""
        if self._constant is not None or not self._length:
            return self._filled(self._length)
        return np.frombuffer(self._values, dtype=self._values.typecode)

    def _filled(self, length: int) -> npt.NDArray[Any]:
        value = np.array(self._constant or 0, dtype=self._values.typecode)
        return np.broadcast_to(value, (length,))


@dataclass
class Logged:
    """A log as its dialect reads it; nothing is said until a line says it."""

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
    _index: Column = field(default_factory=lambda: Column("q"))
    _columns: dict[str, Column] = field(default_factory=dict[str, Column])

    def __len__(self) -> int:
        return len(self._index)

    def add_steps(self, index: IntColumn, **columns: FloatColumn) -> None:
        """Append steps: their numbers as the log prints them, and columns of equal length.

        NaN = the line does not say; infinity = it printed NaN (`numbers` makes that so). Names are
        those of Step.
        """
        before = len(self._index)
        self._index.extend(index)
        for name in columns.keys() | self._columns.keys():
            column = self._columns.setdefault(name, self._new_column(name, before))
            column.extend(columns.get(name, np.broadcast_to(np.nan, len(index))))

    def remark(self, sentence: str) -> None:
        """Keep a sentence for the reader, once, and no more than a screen of them."""
        if sentence not in self.remarks and len(self.remarks) < MOST_REMARKS:
            self.remarks.append(sentence)

    def peak(self, kind: str, value_bytes: float) -> None:
        """Keep the largest memory figure of a kind."""
        self.memory_bytes[kind] = max(value_bytes, self.memory_bytes.get(kind, 0.0))

    def steps(self) -> Steps:
        """Everything so far as columns; a number that comes again replaces what came from it on.

        That is what a restart from a checkpoint does, and it keeps one rank's line where several
        ranks print each step.
        """
        index = self._index.read()
        n = len(index)
        steps = Steps(
            index,
            np.broadcast_to(np.int64(1), n),
            np.broadcast_to(np.bool_(False), n),
            {name: column.read() for name, column in self._columns.items()},
        )
        if n < 2 or bool((index[1:] > index[:-1]).all()):
            return steps
        later = np.minimum.accumulate(index[::-1])[::-1]
        kept = np.append(index[:-1] < later[1:], True)
        self.remark(
            f"{n - int(kept.sum()):,} step lines come again later (a restart, or several ranks in "
            "one log): the later line of each step number is used"
        )
        return steps.select(kept)

    def _new_column(self, name: str, length: int) -> Column:
        if name not in FLOATS:
            raise KeyError(f"{name} is no column of Step")
        column = Column("d" if name in EXACT else "f")
        column.extend(np.broadcast_to(np.nan, length))
        return column


@dataclass(frozen=True)
class Dialect:
    """How one framework writes its log, and how that is read."""

    title: str
    """What the framework calls itself: `Megatron-LM`."""
    marks: tuple[bytes, ...]
    """Literals of which every log of this kind has at least one: looked for before anything else."""
    step_line: re.Pattern[bytes]
    """What only a step (or the one figure) of this dialect looks like."""
    read: Callable[[Iterable[bytes], Logged], None]
    """Reads blocks of whole lines; must neither raise nor slow down on any bytes."""
    precedence: int = 5
    """Lower wins where the lines of several dialects stand in one log."""
    convention: str | None = None
    """How the FLOP/s that it prints are counted; None when it prints none or it depends."""
    whole_run: bool = False
    """True when the framework's own figure for the whole run goes before its step lines."""
    begins: bytes | None = None
    """A literal that begins a record which may go on in the next lines: it is not torn apart."""


FACT_NAMES = {
    "global_batch": "samples a step over all devices",
    "micro_batch": "samples a device and micro-batch",
    "seq_len": "token positions a sample",
    "num_devices": "ranks",
    "tp": "tensor-parallel size",
    "pp": "pipeline-parallel size",
    "cp": "context-parallel size",
    "vp": "virtual pipeline stages a rank",
    "ep": "expert-parallel size",
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
}
"""Settings that a dialect may report."""

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
}
"""Figures that a dialect may report once for the whole run."""


def numbers(texts: Sequence[bytes]) -> FloatColumn:
    """The numbers in `texts`; an empty or odd text is NaN, a printed `nan` or `inf` is infinity."""
    try:
        values = np.array(list(map(float, texts)), dtype=np.float64)
    except ValueError:
        values = np.array([_number(text) for text in texts], dtype=np.float64)
    else:
        values[~np.isfinite(values)] = np.inf
    return values


def whole_numbers(texts: Sequence[bytes]) -> IntColumn:
    """The integers in `texts`, which must be digits; beyond 64 bit they are cut to the largest."""
    try:
        return np.array(list(map(int, texts)), dtype=np.int64)
    except OverflowError:
        largest = np.iinfo(np.int64).max
        return np.array([min(int(text), largest) for text in texts], dtype=np.int64)


def decimal_step(text: bytes) -> float:
    """The step of the last printed digit: 0.1 for `5690.4`, 1.0 for `29`, 10.0 for `1.25e+3`."""
    mantissa, _, exponent = text.lower().partition(b"e")
    decimals = len(mantissa.partition(b".")[2])
    return 10.0 ** min(max(int(exponent or 0) - decimals, -300), 300)


def _number(text: bytes) -> float:
    try:
        value = float(text)
    except ValueError:
        return float("nan")
    return value if np.isfinite(value) else float("inf")


def _all_equal(values: FloatColumn | IntColumn, constant: float) -> bool:
    if constant != constant:
        return bool(np.isnan(values).all())
    return bool((values == constant).all())
