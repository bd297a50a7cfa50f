"""A published MFU, FLOP/s or step time, read and converted to another convention or peak."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isfinite
from typing import Literal

from paceline.core import rates
from paceline.core.errors import UserError, did_you_mean
from paceline.core.flops import (
    CONVENTIONS,
    RECOMPUTED,
    FlopsInput,
    flops_per_token,
    with_recompute,
    without_recompute,
)
from paceline.core.hardware import Dtype
from paceline.files import catalog

Kind = Literal["mfu", "flops_per_s_per_device", "step_time_s"]
_QUANTITY = re.compile(
    r"([\d,]+(?:\.\d*)?(?:e[+-]?\d+)?)\s*(%|ms|s|[kmgtpe]?flops?(?:/s|ps)?(?:/(?:gpu|device))?)?",
    re.IGNORECASE,
)
_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15, "e": 1e18}
FORMS = "54.1%, 1249TFLOP/s or 12.5s"


@dataclass(frozen=True)
class Quantity:
    """One figure in base units: MFU as a fraction, FLOP/s of a device, seconds a step."""

    kind: Kind
    value: float


def read_quantity(text: str, where: str) -> Quantity:
    """A figure with its unit; raises UserError for a bare number, which could be any kind."""
    number, unit = _split(text, where, FORMS)
    if unit == "%":
        if number > 100:
            raise UserError(where, "is more than the peak", remedy="more than 100% is no MFU")
        return Quantity("mfu", number / 100)
    if unit in ("s", "ms"):
        return Quantity("step_time_s", number / (1000 if unit == "ms" else 1))
    if not unit:
        raise UserError(where, "has no unit", allowed=FORMS)
    return Quantity("flops_per_s_per_device", number * _scale(unit))


def read_flops_per_s(text: str, where: str) -> float:
    """FLOP/s of `989e12`, `989TFLOP/s` or `1.979 PFLOPS`; raises UserError for anything else."""
    allowed = "989e12 or 989TFLOP/s"
    number, unit = _split(text, where, allowed)
    if unit in ("%", "s", "ms"):
        raise UserError(where, "is not in FLOP/s", allowed=allowed)
    value = number * _scale(unit)
    if value < 1e9:
        raise UserError(where, "is too small for a peak in FLOP/s", allowed=allowed)
    return value


def _split(text: str, where: str, allowed: str) -> tuple[float, str]:
    """The positive number and the unit in lower case."""
    match = _QUANTITY.fullmatch(text.strip())
    digits = match[1].replace(",", "") if match else ""
    value = float(digits) if digits and digits != "." else 0.0
    if match is None or not value > 0 or not isfinite(value):
        raise UserError(where, "is not a positive figure with a unit", allowed=allowed)
    return value, (match[2] or "").lower()


def _scale(unit: str) -> float:
    return _SCALES[unit.partition("flop")[0]]


WITHOUT_ADAPTERS = ("palm", "six-n", "narayanan", "megatron-deepspeed")


@dataclass(frozen=True)
class StatedFigure:
    """One way to state the figure."""

    convention: str
    flops_per_token: float
    peak_flops_per_s: float | None
    flops_per_s_per_device: float | None
    mfu: float | None
    share: str
    """What `mfu` is: MFU, or HFU where recomputed work is counted."""
    formula: str
    source: str


@dataclass(frozen=True)
class Conversion:
    """The figure as published and as converted; `ratio` is the converted over the given one."""

    given: StatedFigure
    wanted: StatedFigure
    ratio: float
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Peaks:
    """The peaks of both sides in FLOP/s; None, on both sides, is not known."""

    published: float | None
    target: float | None


def convert(
    figure: Quantity, published: str, target: str, x: FlopsInput, peaks: Peaks
) -> Conversion:
    """A figure counted by the convention `published` as `target` counts it.

    FLOP/s scale with the FLOPs of a token: F_target / F_published; MFU with the peaks as well.
    Raises UserError for a convention that does not apply, or a result above the peak.
    """
    before, after = _flops(published, x, "--from"), _flops(target, x, "--to")
    rate = figure.value
    if figure.kind == "mfu":
        if peaks.published is None:
            share = _possible(figure.value * after / before)
            return Conversion(
                _side(published, before, None, None, figure.value),
                _side(target, after, None, None, share),
                after / before,
                ("the same peak is taken on both sides; without it there is no FLOP/s",),
            )
        rate = figure.value * peaks.published
    converted = rate * after / before
    share_before, share_after = rates.mfu(rate, peaks.published), rates.mfu(converted, peaks.target)
    ratio = (
        share_after / share_before
        if figure.kind == "mfu" and share_before and share_after
        else after / before
    )
    return Conversion(
        _side(published, before, peaks.published, rate, share_before),
        _side(target, after, peaks.target, converted, _possible(share_after)),
        ratio,
        (),
    )


def from_step_time(
    step_time_s: float, target: str, x: FlopsInput, peaks: Peaks, batch: int, devices: int
) -> Conversion:
    """FLOP/s of a device, and MFU, of a step of `batch` sequences on `devices` devices."""
    flops = _flops(target, x, "--to")
    rate = rates.flops_per_s_per_device(flops * x.seq_len, batch, step_time_s, devices)
    share = _possible(rates.mfu(rate, peaks.target))
    side = _side(target, flops, peaks.target, rate, share)
    return Conversion(side, side, 1.0, ())


def peaks_of(
    device: str | None, dtype: Dtype | None, published: float | None, target: float | None
) -> Peaks:
    """The stated peaks, else those of the device's data sheet.

    A published figure may rest on a sparse peak; one to convert to may not. Raises UserError for
    that, for a device without a peak, and for a dtype that it lacks.
    """
    if device is None:
        return Peaks(
            published if published is not None else target,
            target if target is not None else published,
        )
    entry = catalog.device(device)
    dense = entry.peak_flops_per_s(dtype or "bf16")
    if dense is None and (published is None or target is None):
        allowed = ", ".join(entry.peaks) or "a device with a data-sheet peak"
        raise UserError(f"{entry.name} in {dtype or 'bf16'}", "has no known peak", allowed=allowed)
    if target is not None and dense and abs(target / (2 * dense) - 1) < 0.005:
        raise UserError(
            "--peak",
            f"is the sparse peak of {entry.name}, which training does not reach",
            allowed=f"the dense {dense / 1e12:.10g}TFLOP/s",
        )
    return Peaks(
        published if published is not None else dense, target if target is not None else dense
    )


def _flops(name: str, x: FlopsInput, option: str) -> float:
    """FLOPs of a token; raises UserError for an unknown convention or one that does not apply."""
    convention = without_recompute(name)
    if convention not in CONVENTIONS:
        raise UserError(
            f"{option} {name}",
            "is not a convention",
            allowed=f"{', '.join(CONVENTIONS)}, each with {RECOMPUTED} for hardware FLOPs",
            remedy=did_you_mean(convention, CONVENTIONS) or None,
        )
    if x.lora and convention in WITHOUT_ADAPTERS:
        others = ", ".join(name for name in CONVENTIONS if name not in WITHOUT_ADAPTERS)
        raise UserError(f"{option} {name}", "does not count LoRA's frozen weights", allowed=others)
    applicable = x.shape.conventions
    if applicable and convention not in applicable:
        raise UserError(
            f"{option} {name}", "counts no model of this kind", allowed=", ".join(applicable)
        )
    if name != convention and x.recompute == "none":
        raise UserError(
            f"{option} {name}",
            "needs to know what is recomputed",
            remedy=f"add --recompute selective or --recompute full, or take {convention}",
        )
    return flops_per_token(name, x)


def _side(
    name: str,
    flops: float,
    peak: float | None,
    rate: float | None,
    share: float | None,
) -> StatedFigure:
    convention = without_recompute(name)
    formula, source = _formula_and_source(convention)
    if name == convention:
        return StatedFigure(name, flops, peak, rate, share, "MFU", formula, source)
    formula = f"{formula} Recomputation is counted as work."
    name = with_recompute(convention)
    return StatedFigure(name, flops, peak, rate, share, "HFU", formula, source)


def _formula_and_source(convention: str) -> tuple[str, str]:
    """The formula of a convention, and who uses it, as its definition tells them."""
    paragraphs = (CONVENTIONS[convention].per_token.__doc__ or "").strip().split("\n\n")
    lines = [" ".join(paragraph.split()) for paragraph in paragraphs]
    return lines[0].removeprefix("FLOPs per token: "), " ".join(lines[1:])


def _possible(share: float | None) -> float | None:
    """An MFU; raises UserError above 1, where the figure, the model or a peak cannot be right."""
    if share is not None and share > 1:
        raise UserError(
            f"{100 * share:.1f}%",
            "would come out, more than the peak",
            remedy="check the model, the sequence length and both peaks",
        )
    return share
