"""Why a printed cell does not follow: the change of one input under which it would.

Changes come in a fixed order of plausibility. One explains a cell when the changed input, taken at
its full value, gives the printed digits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from paceline.audit.cells.derivation import Cell, Inputs, Relation, RowSpeed, judge, relation
from paceline.core.printed import exactly, misprints
from paceline.core.units import percent

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
