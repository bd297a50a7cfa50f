"""What the cells of a published row follow from: every figure of speed is a power of the step time.

With everything else of a row fixed, tokens/s, MFU or days are `coefficient x t^power`, t the step
time. A cell follows when some t inside the rounding interval of the row's own speed gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from paceline.core import rates
from paceline.core.printed import Interval, Printed, exactly

State = Literal["follows", "cut", "fails"]
"""`cut`: only if digits were dropped where the others are rounded."""


@dataclass(frozen=True)
class Inputs:
    """What a row's figures are computed from besides its step time; None is not known."""

    seq_len: float | None = None
    global_batch: float | None = None
    num_devices: float | None = None
    flops_per_sample: Interval | None = None
    peak_flops_per_s: float | None = None
    total_tokens: float | None = None
    timed_steps: float | None = None
    base_num_devices: float | None = None
    base_samples_per_s: Interval | None = None
    """Throughput of the row that speed-ups relate to."""
    settings: Mapping[str, Interval] = field(default_factory=dict[str, Interval])
    """Columns without a step time in them (replicas, nodes, FLOPs of a token), with their value."""

    def value(self, name: str) -> float:
        """An input that is known, as one number."""
        value = getattr(self, name)
        assert value is not None, name
        return value.middle if isinstance(value, Interval) else float(value)


@dataclass(frozen=True)
class Relation:
    """A cell's value in base units: coefficient x (step time)^power."""

    coefficient: Interval
    power: Literal[-1, 0, 1]

    def at(self, step_time_s: float) -> float:
        """The value at one step time, with the middle of the coefficient."""
        return self.coefficient.middle * step_time_s**self.power

    def over(self, step_time_s: Interval) -> Interval:
        """All values at step times of an interval."""
        ends = sorted((step_time_s.low**self.power, step_time_s.high**self.power))
        return Interval(self.coefficient.low * ends[0], self.coefficient.high * ends[1])

    def step_times(self, values: Interval) -> Interval | None:
        """The step times at which the value lies in `values`; None when none enters."""
        if self.power == 0 or values.low <= 0:
            return None
        if self.power == 1:
            return Interval(values.low / self.coefficient.high, values.high / self.coefficient.low)
        return Interval(self.coefficient.low / values.high, self.coefficient.high / values.low)


@dataclass(frozen=True)
class Cell:
    """One printed figure; `unit` is the size of its unit in base units (`%`: 0.01)."""

    column: str
    printed: Printed
    unit: float = 1.0

    @property
    def value(self) -> float:
        """The figure in base units."""
        return self.printed.value * self.unit

    def rounded(self) -> Interval:
        """The values in base units that round to it."""
        return self.printed.rounded().times(self.unit)

    def cut(self) -> Interval:
        """The values in base units that are cut to it."""
        return self.printed.cut().times(self.unit)


@dataclass(frozen=True)
class RowSpeed:
    """The step time that a row's own speed gives: as printed, and what rounding leaves open."""

    step_time_s: float
    interval: Interval


Coefficient = Callable[[Inputs], float]


def _flops_per_s(x: Inputs) -> float:
    return rates.flops_per_s_per_device(
        x.value("flops_per_sample"), x.value("global_batch"), 1.0, int(x.value("num_devices"))
    )


def _mfu(x: Inputs) -> float:
    return rates.mfu(_flops_per_s(x), x.value("peak_flops_per_s")) or 0.0


def _tokens_per_s(x: Inputs) -> float:
    return rates.tokens_per_s(x.value("seq_len"), x.value("global_batch"), 1.0)


def _samples_per_s(x: Inputs) -> float:
    return rates.samples_per_s(x.value("global_batch"), 1.0)


def _speedup(x: Inputs) -> float:
    return _samples_per_s(x) / x.value("base_samples_per_s")


def _efficiency(x: Inputs) -> float:
    return rates.scaling_efficiency(
        _samples_per_s(x),
        int(x.value("num_devices")),
        x.value("base_samples_per_s"),
        int(x.value("base_num_devices")),
    )


_SAMPLES = ("global_batch",)
_TOKENS = ("seq_len", "global_batch")
_FLOPS = ("flops_per_sample", "global_batch", "num_devices")
_BASE = ("base_samples_per_s",)

COLUMNS: dict[str, tuple[Literal[-1, 1], tuple[str, ...], Coefficient]] = {
    "step_time_s": (1, (), lambda x: 1.0),
    "samples_per_s_unrounded": (-1, _SAMPLES, _samples_per_s),
    "samples_per_s": (-1, _SAMPLES, _samples_per_s),
    "tokens_per_s": (-1, _TOKENS, _tokens_per_s),
    "tokens_per_s_per_device": (
        -1,
        (*_TOKENS, "num_devices"),
        lambda x: _tokens_per_s(x) / x.value("num_devices"),
    ),
    "flops_per_s_per_device": (-1, _FLOPS, _flops_per_s),
    "mfu": (-1, (*_FLOPS, "peak_flops_per_s"), _mfu),
    "days": (
        1,
        (*_TOKENS, "total_tokens"),
        lambda x: rates.days(x.value("total_tokens"), _tokens_per_s(x)),
    ),
    "execution_time_s": (1, ("timed_steps",), lambda x: x.value("timed_steps")),
    "speedup": (-1, (*_SAMPLES, *_BASE), _speedup),
    "scaling_efficiency": (-1, (*_SAMPLES, *_BASE, "num_devices", "base_num_devices"), _efficiency),
}
"""Columns that a step time enters: its power, the inputs needed, the value at one second.

The order is also the order in which a printed column serves as the row's speed.
"""


SPEEDS = (
    "step_time_s",
    "samples_per_s_unrounded",
    "samples_per_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "flops_per_s_per_device",
)
"""Columns that are measured; the others are computed by whoever prints them."""


def missing(column: str, inputs: Inputs) -> tuple[str, ...]:
    """The inputs that `column` needs and the row does not give."""
    _, needs, _ = COLUMNS[column]
    return tuple(name for name in needs if getattr(inputs, name) is None)


def relation(column: str, inputs: Inputs) -> Relation | None:
    """How `column` follows from a step time; None when inputs are missing or nothing gives it."""
    if column in inputs.settings:
        return Relation(inputs.settings[column], 0)
    if column not in COLUMNS or missing(column, inputs):
        return None
    power, needs, coefficient = COLUMNS[column]
    ends = [coefficient(corner) for corner in _corners(inputs, needs)]
    return Relation(Interval(min(ends), max(ends)), power)


def _corners(inputs: Inputs, needs: tuple[str, ...]) -> list[Inputs]:
    """The inputs with every needed interval at each of its ends."""
    corners = [inputs]
    for name in needs:
        value = getattr(inputs, name)
        if isinstance(value, Interval) and value.low != value.high:
            ends = (exactly(value.low), exactly(value.high))
            corners = [replace(corner, **{name: end}) for corner in corners for end in ends]
    return corners


def speed_of(cells: Mapping[str, Cell], inputs: Inputs) -> tuple[str, RowSpeed] | None:
    """The column that a row's other figures are computed from, and the step times it allows."""
    for column in COLUMNS:
        cell = cells.get(column)
        how = relation(column, inputs) if cell else None
        if cell is None or how is None or cell.value <= 0 or cell.printed.bound:
            continue
        exact, allowed = how.step_times(exactly(cell.value)), how.step_times(cell.rounded())
        if exact and allowed:
            return column, RowSpeed(exact.middle, allowed)
    return None


def judge(cell: Cell, how: Relation, speed: RowSpeed | None) -> State:
    """Whether a cell follows: from the printed step time first, then from any that rounds to it."""
    if speed is None:
        exact = allowed = how.coefficient
    else:
        exact, allowed = exactly(how.at(speed.step_time_s)), how.over(speed.interval)
    for values in (exact, allowed):
        if cell.rounded().meets(values):
            return "follows"
        if cell.cut().meets(values):
            return "cut"
    return "fails"


def implied(cell: Cell, how: Relation) -> Interval | None:
    """The step times from which the cell follows, rounded or cut."""
    rounded, cut = how.step_times(cell.rounded()), how.step_times(cell.cut())
    if rounded is None or cut is None:
        return None
    return Interval(min(rounded.low, cut.low), max(rounded.high, cut.high))
