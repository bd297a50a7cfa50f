"""Derive the cells of a published row from its step time, and find inputs that explain a mismatch.

For a fixed row, tokens/s, MFU and days are `coefficient x t^power` with step time t. A cell follows
if some t inside the rounding interval of the row's own speed gives the printed digits.

Changed inputs are tried in a fixed order of plausibility. A change explains a cell if the changed
input gives the printed digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from paceline.core import rates
from paceline.core.printed import Interval, Printed, exactly, misprints
from paceline.core.units import percent

State = Literal["follows", "cut", "fails"]
"""`cut`: the cell follows only if its digits were truncated instead of rounded."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of a row's figures other than its step time; None if unknown."""

    seq_len: float | None = None
    global_batch: float | None = None
    num_devices: float | None = None
    flops_per_sample: Interval | None = None
    peak_flops_per_s: float | None = None
    total_tokens: float | None = None
    timed_steps: float | None = None
    base_num_devices: float | None = None
    base_samples_per_s: Interval | None = None
    """Throughput of the base row of speed-ups."""
    settings: Mapping[str, Interval] = field(default_factory=dict[str, Interval])
    """Columns that do not depend on the step time (replicas, nodes, FLOPs per token)."""

    def value(self, name: str) -> float:
        """Return a known input as one number."""
        value = getattr(self, name)
        assert value is not None, name
        return value.middle if isinstance(value, Interval) else float(value)


@dataclass(frozen=True)
class Relation:
    """A cell's value in base units: coefficient x (step time)^power."""

    coefficient: Interval
    power: Literal[-1, 0, 1]

    def at(self, step_time_s: float) -> float:
        """Return the value at one step time, with the middle of the coefficient."""
        return self.coefficient.middle * step_time_s**self.power

    def over(self, step_time_s: Interval) -> Interval:
        """Return all values at step times of an interval."""
        ends = sorted((step_time_s.low**self.power, step_time_s.high**self.power))
        return Interval(self.coefficient.low * ends[0], self.coefficient.high * ends[1])

    def step_times(self, values: Interval) -> Interval | None:
        """Return the step times that give `values`; None if the value has no step time in it."""
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

    def rounding_interval(self) -> Interval:
        """Return the values in base units that round to the printed figure."""
        return self.printed.rounding_interval().times(self.unit)

    def truncation_interval(self) -> Interval:
        """Return the values in base units that truncate to the printed figure."""
        return self.printed.truncation_interval().times(self.unit)


@dataclass(frozen=True)
class RowSpeed:
    """Step time given by a row's own speed: as printed, and its rounding interval."""

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
"""Columns that depend on the step time: power, required inputs, and value at one second.

The first of these columns that a row prints gives its speed.
"""


SPEEDS = (
    "step_time_s",
    "samples_per_s_unrounded",
    "samples_per_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "flops_per_s_per_device",
)
"""Columns that are measured; authors compute the others from them."""


def missing(column: str, inputs: Inputs) -> tuple[str, ...]:
    """Return the inputs that `column` needs and the row does not give."""
    _, needs, _ = COLUMNS[column]
    return tuple(name for name in needs if getattr(inputs, name) is None)


def relation(column: str, inputs: Inputs) -> Relation | None:
    """Return how `column` follows from a step time; None if inputs are missing."""
    if column in inputs.settings:
        return Relation(inputs.settings[column], 0)
    if column not in COLUMNS or missing(column, inputs):
        return None
    power, needs, coefficient = COLUMNS[column]
    ends = [coefficient(corner) for corner in _corners(inputs, needs)]
    return Relation(Interval(min(ends), max(ends)), power)


def _corners(inputs: Inputs, needs: tuple[str, ...]) -> list[Inputs]:
    """Return the inputs with every required interval at each of its ends."""
    corners = [inputs]
    for name in needs:
        value = getattr(inputs, name)
        if isinstance(value, Interval) and value.low != value.high:
            ends = (exactly(value.low), exactly(value.high))
            corners = [replace(corner, **{name: end}) for corner in corners for end in ends]
    return corners


def speed_of(cells: Mapping[str, Cell], inputs: Inputs) -> tuple[str, RowSpeed] | None:
    """Return the column that determines a row's other figures, and the step times it allows."""
    for column in COLUMNS:
        cell = cells.get(column)
        how = relation(column, inputs) if cell else None
        if cell is None or how is None or cell.value <= 0 or cell.printed.bound:
            continue
        exact, allowed = (
            how.step_times(exactly(cell.value)),
            how.step_times(cell.rounding_interval()),
        )
        if exact and allowed:
            return column, RowSpeed(exact.middle, allowed)
    return None


def judge(cell: Cell, how: Relation, speed: RowSpeed | None) -> State:
    """Check a cell against the printed step time, then against any that rounds to it."""
    if speed is None:
        exact = allowed = how.coefficient
    else:
        exact, allowed = exactly(how.at(speed.step_time_s)), how.over(speed.interval)
    for values in (exact, allowed):
        if cell.rounding_interval().meets(values):
            return "follows"
        if cell.truncation_interval().meets(values):
            return "cut"
    return "fails"


def implied_step_times(cell: Cell, how: Relation) -> Interval | None:
    """Return the step times from which the cell follows, rounded or truncated."""
    if_rounded, if_truncated = (
        how.step_times(cell.rounding_interval()),
        how.step_times(cell.truncation_interval()),
    )
    if if_rounded is None or if_truncated is None:
        return None
    return Interval(min(if_rounded.low, if_truncated.low), max(if_rounded.high, if_truncated.high))


PER_DEVICE = frozenset({"tokens_per_s_per_device", "flops_per_s_per_device", "mfu"})
WHOLE_JOB = frozenset({"tokens_per_s", "samples_per_s", "samples_per_s_unrounded", "days"})
"""Columns that describe the whole job and therefore scale with its number of devices."""
FACTORS = (2, 4, 8)
"""Typical miscounts of batches and devices are powers of two."""
MAX_NUANCE = 0.05
MIN_DIGITS = 3
"""With fewer digits, some misprint always fits."""


@dataclass(frozen=True)
class AlternativeInputs:
    """Alternative values of a row's inputs, keyed by their description."""

    peaks_flops_per_s: Mapping[str, float] = field(default_factory=dict[str, float])
    flops_per_sample: Mapping[str, float] = field(default_factory=dict[str, float])
    bases: Mapping[str, Inputs] = field(default_factory=dict[str, Inputs])
    """Inputs of the row with another base for its speed-ups."""


@dataclass(frozen=True)
class Change:
    """A changed input: its description, and the resulting inputs and speed."""

    words: str
    inputs: Inputs
    speed: RowSpeed
    only_speed: bool = False
    """True if only the step time changes."""
    of_column: bool = False
    """True for a small change of a table-wide input that other cells of the column must support."""
    of_row: bool = False
    """True for a count of the row, which its other cells must support."""
    columns: frozenset[str] | None = None
    """Columns that it changes; None for all that the inputs determine."""


def other_speeds(
    inputs: Inputs, step_times_s: Mapping[str, float], options: AlternativeInputs
) -> Iterator[Change]:
    """Yield step times of other rows, first alone and then together with another peak."""
    alone = [
        Change(f"follows from {t:.10g} s, the step time of {name}", inputs, _at(t), True)
        for name, t in step_times_s.items()
    ]
    yield from alone
    for change in alone:
        for peak in other_peaks(inputs, change.speed, options):
            words = f"{change.words}, {peak.words.removeprefix('follows ')}"
            yield replace(peak, words=words, of_column=False)


def other_inputs(inputs: Inputs, speed: RowSpeed, options: AlternativeInputs) -> Iterator[Change]:
    """Yield every change of an input other than the step time."""
    yield from other_peaks(inputs, speed, options)
    yield from _other_flops(inputs, speed, options)
    for words, base_inputs in options.bases.items():
        yield Change(words, base_inputs, speed)
    yield from other_divisors(inputs, speed)
    yield from _rounded_flops(inputs, speed)
    yield from _miscounts(inputs, speed)


def other_peaks(inputs: Inputs, speed: RowSpeed, options: AlternativeInputs) -> Iterator[Change]:
    """Yield peaks other than the declared one."""
    declared_peak = inputs.peak_flops_per_s
    for name, peak in options.peaks_flops_per_s.items() if declared_peak else ():
        if declared_peak and peak != declared_peak:
            words = f"follows with a peak of {_tera(peak)}, {name}, "
            words += f"not the declared {_tera(declared_peak)}"
            changed_inputs = replace(inputs, peak_flops_per_s=peak)
            yield Change(words, changed_inputs, speed, of_column=_is_nuance(peak, declared_peak))


def rounded_speeds(inputs: Inputs, speed: RowSpeed) -> Iterator[Change]:
    """Yield the row's step time with fewer decimals."""
    for decimals in (2, 1, 0):
        t = round(speed.step_time_s, decimals)
        if t > 0 and abs(t / speed.step_time_s - 1) > 1e-9:
            words = f"follows from the step time rounded to {t:.{decimals}f} s"
            yield Change(words, inputs, _at(t), True)


def explains(change: Change, cell: Cell, how: Relation, within_rounding: bool = False) -> bool:
    """Return whether the change affects the cell and makes it follow, rounded or truncated.

    With `within_rounding`, any step time that rounds to the printed one is accepted.
    """
    changed_relation = relation(cell.column, change.inputs)
    if change.columns is not None and cell.column not in change.columns:
        return False
    if changed_relation is None or (changed_relation == how and not change.only_speed):
        return False
    values = exactly(changed_relation.at(change.speed.step_time_s))
    if within_rounding:
        values = changed_relation.over(change.speed.interval)
    return cell.rounding_interval().meets(values) or cell.truncation_interval().meets(values)


def slip_of_digits(cell: Cell, how: Relation, step_time_s: float = 1.0) -> str | None:
    """Describe the misprint whose correction makes the cell follow exactly."""
    speed = _at(step_time_s) if how.power else None
    figures = sum(sign.isdigit() for sign in cell.printed.digits)
    for slip, corrected in misprints(cell.printed) if figures >= MIN_DIGITS else ():
        # A different last digit alone is rounding by the author, not a misprint.
        only_last = corrected.digits[:-1] == cell.printed.digits[:-1]
        corrected_cell = Cell(cell.column, corrected, cell.unit)
        if not only_last and judge(corrected_cell, how, speed) == "follows":
            return f"{slip}: {corrected.digits} would be consistent"
    for power in (-3, -2, -1, 1, 2, 3):
        shifted_cell = Cell(cell.column, cell.printed, cell.unit * 10.0**power)
        if judge(shifted_cell, how, speed) == "follows":
            side = "right" if power < 0 else "left"
            return f"the decimal point is {abs(power)} too far to the {side}"
    return None


def _other_flops(inputs: Inputs, speed: RowSpeed, options: AlternativeInputs) -> Iterator[Change]:
    declared_flops = inputs.flops_per_sample
    for name, flops in options.flops_per_sample.items() if declared_flops else ():
        if declared_flops and abs(flops / declared_flops.middle - 1) > 1e-9:
            size = percent(flops / declared_flops.middle - 1)
            words = f"follows with {name}, which is {size} in FLOPs"
            changed_inputs = replace(inputs, flops_per_sample=exactly(flops))
            nuance = _is_nuance(flops, declared_flops.middle)
            yield Change(words, changed_inputs, speed, of_column=nuance)


def _rounded_flops(inputs: Inputs, speed: RowSpeed) -> Iterator[Change]:
    flops = inputs.flops_per_sample
    for digits in (3, 2) if flops else ():
        assert flops
        rounded_value = float(f"{flops.middle:.{digits - 1}e}")
        words = f"follows with the FLOPs of a sequence rounded to {rounded_value:.{digits - 1}E}"
        changed_inputs = replace(inputs, flops_per_sample=exactly(rounded_value))
        yield Change(words, changed_inputs, speed, of_column=True)


def other_divisors(inputs: Inputs, speed: RowSpeed) -> Iterator[Change]:
    """Yield figures that are not divided by the devices, or divided although they are totals."""
    n, batch = int(inputs.num_devices or 1), inputs.global_batch
    if n == 1:
        return
    yield Change(
        f"is summed over all {n:,} devices, not divided by them",
        replace(inputs, num_devices=1),
        speed,
        columns=PER_DEVICE,
    )
    if batch:
        yield Change(
            f"is of one of the {n:,} devices, not of all",
            replace(inputs, global_batch=batch / n),
            speed,
            columns=WHOLE_JOB,
        )


def _miscounts(inputs: Inputs, speed: RowSpeed) -> Iterator[Change]:
    fields = {"global batch": "global_batch", "number of devices": "num_devices"}
    for factor in FACTORS:
        for name, field_name in fields.items():
            count = getattr(inputs, field_name)
            for value in (count / factor, count * factor) if count else ():
                if value >= 1 and value % 1 == 0:
                    words = f"follows with a {name} of {value:g}, not the declared {count:g}"
                    changed_inputs = replace(inputs, **{field_name: value})
                    yield Change(words, changed_inputs, speed, of_row=True)


def _is_nuance(value: float, declared_value: float) -> bool:
    """Return whether a change is too small to affect a single cell by mistake."""
    return abs(value / declared_value - 1) < MAX_NUANCE


def _at(step_time_s: float) -> RowSpeed:
    return RowSpeed(step_time_s, exactly(step_time_s))


def _tera(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:.10g} TFLOP/s"
