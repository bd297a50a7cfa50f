"""What the cells of a published row follow from, and the changed input under which one would.

With everything else of a row fixed, tokens/s, MFU or days are `coefficient x t^power`, t the step
time. A cell follows when some t inside the rounding interval of the row's own speed gives it.

Changes of an input come in a fixed order of plausibility. One explains a cell when the changed
input, taken at its full value, gives the printed digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from paceline.core import rates
from paceline.core.printed import Interval, Printed, exactly, misprints
from paceline.core.units import percent

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


FACTORS = (2, 4, 8)
"""Batches and devices are miscounted in powers of two."""
NUANCE = 0.05
MIN_DIGITS = 3
"""With fewer digits some misprint always fits."""


@dataclass(frozen=True)
class Options:
    """Other values that a row's inputs could have had, by what a cause calls them."""

    peaks_flops_per_s: Mapping[str, float] = field(default_factory=dict[str, float])
    flops_per_sample: Mapping[str, float] = field(default_factory=dict[str, float])
    bases: Mapping[str, Inputs] = field(default_factory=dict[str, Inputs])
    """The row's inputs with another base for its speed-ups."""


@dataclass(frozen=True)
class Change:
    """A changed input: its words, and the inputs and speed that it leads to."""

    words: str
    inputs: Inputs
    speed: RowSpeed
    only_speed: bool = False
    """True when the inputs are the row's own."""
    of_column: bool = False
    """True for a nuance of what a table states once: other cells of the column must bear it too."""
    of_row: bool = False
    """True for a count that the row states: its other cells must bear it too."""


def other_speeds(
    inputs: Inputs, step_times_s: Mapping[str, float], options: Options
) -> Iterator[Change]:
    """Step times of other rows, alone and then together with another peak."""
    alone = [
        Change(f"follows from {t:.10g} s, the step time of {name}", inputs, _at(t), True)
        for name, t in step_times_s.items()
    ]
    yield from alone
    for change in alone:
        for peak in other_peaks(inputs, change.speed, options):
            words = f"{change.words}, {peak.words.removeprefix('follows ')}"
            yield replace(peak, words=words, of_column=False)


def other_inputs(inputs: Inputs, speed: RowSpeed, options: Options) -> Iterator[Change]:
    """Every change of an input other than the step time."""
    yield from other_peaks(inputs, speed, options)
    yield from _other_flops(inputs, speed, options)
    for words, based in options.bases.items():
        yield Change(words, based, speed)
    yield from _rounded_flops(inputs, speed)
    yield from _miscounts(inputs, speed)


def other_peaks(inputs: Inputs, speed: RowSpeed, options: Options) -> Iterator[Change]:
    """Peaks that the row does not declare."""
    declared = inputs.peak_flops_per_s
    for name, peak in options.peaks_flops_per_s.items() if declared else ():
        if declared and peak != declared:
            words = (
                f"follows with a peak of {_tera(peak)}, {name}, not the {_tera(declared)} stated"
            )
            changed = replace(inputs, peak_flops_per_s=peak)
            yield Change(words, changed, speed, of_column=_is_nuance(peak, declared))


def rounded_speeds(inputs: Inputs, speed: RowSpeed) -> Iterator[Change]:
    """The row's step time with fewer decimals."""
    for decimals in (2, 1, 0):
        t = round(speed.step_time_s, decimals)
        if t > 0 and abs(t / speed.step_time_s - 1) > 1e-9:
            words = f"follows from the step time rounded to {t:.{decimals}f} s"
            yield Change(words, inputs, _at(t), True)


def explains(change: Change, cell: Cell, how: Relation, within_rounding: bool = False) -> bool:
    """True when the change enters the cell and makes it follow, rounded or cut.

    With `within_rounding` from any step time that rounds to the printed one.
    """
    changed = relation(cell.column, change.inputs)
    if changed is None or (changed == how and not change.only_speed):
        return False
    values = exactly(changed.at(change.speed.step_time_s))
    if within_rounding:
        values = changed.over(change.speed.interval)
    return cell.rounded().meets(values) or cell.cut().meets(values)


def slip_of_digits(cell: Cell, how: Relation, step_time_s: float = 1.0) -> str | None:
    """The slip in the cell's own digits after whose repair it follows exactly, as a phrase."""
    speed = _at(step_time_s) if how.power else None
    figures = sum(sign.isdigit() for sign in cell.printed.digits)
    for slip, meant in misprints(cell.printed) if figures >= MIN_DIGITS else ():
        # A last digit that is off by one is an author's rounding, not a misprint.
        only_last = meant.digits[:-1] == cell.printed.digits[:-1]
        repaired = Cell(cell.column, meant, cell.unit)
        if not only_last and judge(repaired, how, speed) == "follows":
            return f"{slip}: {meant.digits} would follow"
    for power in (-3, -2, -1, 1, 2, 3):
        moved = Cell(cell.column, cell.printed, cell.unit * 10.0**power)
        if judge(moved, how, speed) == "follows":
            return f"the decimal point is {abs(power)} too far to the {_side(power)}"
    return None


def _other_flops(inputs: Inputs, speed: RowSpeed, options: Options) -> Iterator[Change]:
    stated = inputs.flops_per_sample
    for name, flops in options.flops_per_sample.items() if stated else ():
        if stated and abs(flops / stated.middle - 1) > 1e-9:
            size = percent(flops / stated.middle - 1)
            words = f"follows with {name}, which is {size} in FLOPs"
            changed = replace(inputs, flops_per_sample=exactly(flops))
            nuance = _is_nuance(flops, stated.middle)
            yield Change(words, changed, speed, of_column=nuance)


def _rounded_flops(inputs: Inputs, speed: RowSpeed) -> Iterator[Change]:
    flops = inputs.flops_per_sample
    for digits in (3, 2) if flops else ():
        assert flops
        rounded = float(f"{flops.middle:.{digits - 1}e}")
        words = f"follows with the FLOPs of a sequence rounded to {rounded:.{digits - 1}E}"
        changed = replace(inputs, flops_per_sample=exactly(rounded))
        yield Change(words, changed, speed, of_column=True)


def _miscounts(inputs: Inputs, speed: RowSpeed) -> Iterator[Change]:
    stated = {"global batch": inputs.global_batch, "number of devices": inputs.num_devices}
    for factor in FACTORS:
        for name, count in stated.items():
            for value in (count / factor, count * factor) if count else ():
                if value >= 1 and value % 1 == 0:
                    words = f"follows with a {name} of {value:g}, not the {count:g} stated"
                    yield Change(words, _counted(inputs, name, value), speed, of_row=True)


def _is_nuance(value: float, stated: float) -> bool:
    """True for a change so small that a single cell would not be computed with it by mistake."""
    return abs(value / stated - 1) < NUANCE


def _counted(inputs: Inputs, name: str, value: float) -> Inputs:
    if name == "global batch":
        return replace(inputs, global_batch=value)
    return replace(inputs, num_devices=value)


def _at(step_time_s: float) -> RowSpeed:
    return RowSpeed(step_time_s, exactly(step_time_s))


def _tera(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:.10g} TFLOP/s"


def _side(power: int) -> str:
    return "right" if power < 0 else "left"
