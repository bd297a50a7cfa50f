"""Convert a published MFU, FLOP/s or step time to another FLOPs convention or peak."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core import rates
from paceline.core.errors import UserError, did_you_mean
from paceline.core.flops import (
    CONVENTIONS,
    FRAMEWORK_CONVENTIONS,
    RECOMPUTE_SUFFIX,
    FlopsInput,
    flops_per_token,
    with_recompute,
    without_recompute,
)
from paceline.core.hardware import Dtype
from paceline.core.quantity import FIGURE_FORMS, SpeedFigure, parse_count, parse_figure
from paceline.files import catalog


def parse_quantity(text: str, where: str) -> SpeedFigure:
    """Parse a figure with its unit.

    Raises UserError for a number without a unit, because it could be any of the kinds.
    """
    try:
        figure = parse_figure(text)
    except ValueError as error:
        what = str(error).removeprefix(repr(text)).strip()
        raise UserError(where, what, allowed=FIGURE_FORMS) from error
    if figure.kind == "mfu" and figure.value > 1:
        raise UserError(where, "is more than 100% of the peak", allowed="an MFU up to 100%")
    return figure


def read_flops_per_s(text: str, where: str) -> float:
    """Parse FLOP/s such as `989e12`, `989TFLOP/s` or `1.979 PFLOPS`.

    Raises UserError for any other text.
    """
    allowed = "989e12 or 989TFLOP/s"
    try:
        value = parse_count(text)
    except ValueError:
        try:
            figure = parse_figure(text)
        except ValueError as error:
            raise UserError(where, "is not in FLOP/s", allowed=allowed) from error
        if figure.kind != "flops_per_s_per_device":
            raise UserError(where, "is not in FLOP/s", allowed=allowed) from None
        value = figure.value
    if value < 1e9:
        raise UserError(where, "is too small for a peak in FLOP/s", allowed=allowed)
    return value


CONVENTION_NAMES = (
    f"a framework ({', '.join(FRAMEWORK_CONVENTIONS)}) or a convention ({', '.join(CONVENTIONS)})"
)
WITHOUT_ADAPTERS = ("palm", "six-n", "narayanan", "megatron-deepspeed")


@dataclass(frozen=True)
class StatedFigure:
    """The figure under one FLOPs convention."""

    convention: str
    flops_per_token: float
    peak_flops_per_s: float | None
    flops_per_s_per_device: float | None
    mfu: float | None
    share: str
    """Name of the fraction: MFU, or HFU where recomputed work is counted."""
    formula: str
    source: str


@dataclass(frozen=True)
class Conversion:
    """The published and the converted figure; `ratio` is converted over published."""

    published: StatedFigure
    converted: StatedFigure
    ratio: float
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Peaks:
    """Peak FLOP/s of the published and of the converted figure; None if unknown."""

    published: float | None
    target: float | None


def convert(
    figure: SpeedFigure, from_convention: str, to_convention: str, x: FlopsInput, peaks: Peaks
) -> Conversion:
    """Convert a figure from one FLOPs convention to another.

    FLOP/s scale with the FLOPs per token, `F_to / F_from`. MFU also scales with the ratio of the
    peaks. Raises UserError for a convention that does not apply and for a result above the peak.
    """
    flops_from, flops_to = _flops(from_convention, x, "--from"), _flops(to_convention, x, "--to")
    rate = figure.value
    if figure.kind == "mfu":
        if peaks.published is None:
            share = _checked_mfu(figure.value * flops_to / flops_from)
            return Conversion(
                _stated_figure(from_convention, flops_from, None, None, figure.value),
                _stated_figure(to_convention, flops_to, None, None, share),
                flops_to / flops_from,
                ("Both figures assume the same, unknown peak, so FLOP/s cannot be given.",),
            )
        rate = figure.value * peaks.published
    converted_rate = rate * flops_to / flops_from
    share_before, share_after = (
        rates.mfu(rate, peaks.published),
        rates.mfu(converted_rate, peaks.target),
    )
    ratio = (
        share_after / share_before
        if figure.kind == "mfu" and share_before and share_after
        else flops_to / flops_from
    )
    return Conversion(
        _stated_figure(from_convention, flops_from, peaks.published, rate, share_before),
        _stated_figure(
            to_convention,
            flops_to,
            peaks.target,
            converted_rate,
            _checked_mfu(share_after, converted_rate, peaks.target),
        ),
        ratio,
        (),
    )


def from_tokens_per_s(
    tokens_per_s_per_device: float, target: str, x: FlopsInput, peaks: Peaks
) -> Conversion:
    """Return FLOP/s per device and MFU of a training speed in tokens/s per device."""
    flops = _flops(target, x, "--to")
    rate = flops * tokens_per_s_per_device
    share = rates.mfu(rate, peaks.target)
    if share is not None and share > 1:
        raise UserError(
            f"{tokens_per_s_per_device:,.0f} tokens/s/GPU",
            f"takes {_tera(rate)} per GPU ({target}), {share:.1f} times the peak of "
            f"{_tera(peaks.target or 0)}: impossible",
            remedy="check the model and the sequence length; is it the rate of all GPUs, or of a "
            "lower precision (--dtype fp8)?",
        )
    side = _stated_figure(target, flops, peaks.target, rate, share)
    return Conversion(side, side, 1.0, ())


def _tera(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:,.5g} TFLOP/s"


def resolve_peaks(
    device: str | None, dtype: Dtype | None, published: float | None, target: float | None
) -> Peaks:
    """Return the given peaks, or those of the device's data sheet.

    A published figure may be based on a sparse peak, but the target may not. Raises UserError for
    a sparse target peak, a device without a peak, and a dtype that the device does not support.
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
    """Return FLOPs per token.

    Raises UserError for a convention that is unknown or does not apply to the model.
    """
    convention = without_recompute(name)
    if convention not in CONVENTIONS:
        raise UserError(
            f"{option} {name}",
            "is not a FLOPs convention",
            allowed=f"{CONVENTION_NAMES}; append {RECOMPUTE_SUFFIX} for hardware FLOPs",
            remedy=did_you_mean(convention, [*CONVENTIONS, *FRAMEWORK_CONVENTIONS]) or None,
        )
    if x.lora and convention in WITHOUT_ADAPTERS:
        others = ", ".join(name for name in CONVENTIONS if name not in WITHOUT_ADAPTERS)
        raise UserError(f"{option} {name}", "does not count LoRA's frozen weights", allowed=others)
    applicable = x.shape.conventions
    if applicable and convention not in applicable:
        raise UserError(
            f"{option} {name}",
            "does not apply to this kind of model",
            allowed=", ".join(applicable),
        )
    if name != convention and x.recompute == "none":
        raise UserError(
            f"{option} {name}",
            "needs the activation checkpointing mode",
            remedy=f"add --recompute selective or --recompute full, or use {convention}",
        )
    return flops_per_token(name, x)


def _stated_figure(
    name: str,
    flops: float,
    peak: float | None,
    rate: float | None,
    share: float | None,
) -> StatedFigure:
    convention = without_recompute(name)
    formula, source = _formula_and_source(convention)
    counts_recomputation = name != convention
    if counts_recomputation:
        formula = f"{formula} Recomputed work is counted."
        name = with_recompute(convention)
    return StatedFigure(
        convention=name,
        flops_per_token=flops,
        peak_flops_per_s=peak,
        flops_per_s_per_device=rate,
        mfu=share,
        share="HFU" if counts_recomputation else "MFU",
        formula=formula,
        source=source,
    )


def _formula_and_source(convention: str) -> tuple[str, str]:
    """Return the formula of a convention and who uses it, from the docstring of its definition."""
    paragraphs = (CONVENTIONS[convention].per_token.__doc__ or "").strip().split("\n\n")
    lines = [" ".join(paragraph.split()) for paragraph in paragraphs]
    return lines[0].removeprefix("FLOPs per token: "), " ".join(lines[1:])


def _checked_mfu(
    share: float | None, rate: float | None = None, peak: float | None = None
) -> float | None:
    """Return an MFU; raise UserError above 1, where the figure, the model or a peak is wrong."""
    if share is None or share <= 1:
        return share
    if rate is None or peak is None:
        raise UserError(
            f"MFU {100 * share:.1f}%",
            "is impossible: it exceeds the peak",
            remedy="check the model, the sequence length and both peaks",
        )
    causes = ["is it of a lower precision (--dtype fp8)"] if share <= 2 else []
    causes += ["of a whole node instead of one GPU" if causes else "is it of a whole node"]
    raise UserError(
        f"{_tera(rate)} per GPU",
        f"is {100 * share:.1f}% of the peak of {_tera(peak)}: an MFU above 100% is impossible",
        remedy=f"{', or '.join(causes)}, or with the sparse peak (--from-peak)? Check --model and "
        "--device as well",
    )
