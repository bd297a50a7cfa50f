"""Quantities as people write them: 15T, 8k, $2.5, 30 days, 10,500 tokens/s/GPU, 400 TFLOP/s."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf, isfinite
from typing import Literal

from paceline.core.units import SECONDS_PER_DAY

FigureKind = Literal["mfu", "flops_per_s_per_device", "step_time_s", "tokens_per_s_per_device"]

SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12, "p": 1e15, "e": 1e18}
WORDS = {"thousand": "k", "million": "m", "billion": "b", "trillion": "t"}
SECONDS = {
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 1e-3),
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), float(SECONDS_PER_DAY)),
    **dict.fromkeys(("w", "week", "weeks"), 7.0 * SECONDS_PER_DAY),
    **dict.fromkeys(("month", "months"), 30.0 * SECONDS_PER_DAY),
    **dict.fromkeys(("y", "year", "years"), 365.0 * SECONDS_PER_DAY),
}
"""Seconds of the units of durations."""
CURRENCIES = "$€£"
COUNT_FORMS = "15T, 8k, 10,500 or 1.5e12"
MONEY_FORMS = "2.5, $2.5 or $1M"
DURATION_FORMS = "30 days, 12h, 10m or 600s"
FIGURE_FORMS = "54.1%, 1249TFLOP/s, 10,500 tokens/s/GPU or 12.5s"
_TEXT = re.compile(
    r"(?P<currency>[$€£]?)\s*(?P<number>\d[\d,_]*(?:\.\d*)?|\.\d+)(?P<power>e[+-]?\d+)?\s*"
    r"(?P<unit>\D.*)?",
    re.IGNORECASE | re.DOTALL,
)
_RATE = re.compile(
    r"(?P<scale>[kmgtpe]?)(?P<what>flops?|tokens?|tok)(?:/s(?:ec)?|ps)?(?P<each>/.+)?"
)
_PER_DEVICE = {"/gpu", "/device", "/accelerator", "/chip"}


@dataclass(frozen=True)
class SpeedFigure:
    """One figure in base units: a fraction, FLOP/s or tokens/s per device, or seconds per step."""

    kind: FigureKind
    value: float


def _split(text: str) -> tuple[float, str, str]:
    """Return number, unit in lower case and currency; raise ValueError for another text."""
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a quantity")
    value = float(re.sub("[,_]", "", match["number"]) + (match["power"] or ""))
    if not isfinite(value):
        raise ValueError(f"{text!r} is too large")
    return value, " ".join((match["unit"] or "").lower().split()), match["currency"]


def parse_count(text: str, *things: str) -> float:
    """Return a count such as `15T`, `8k` or `10,500`; `things` are words that may follow it.

    Raises ValueError for any other text.
    """
    value, unit, currency = _split(text)
    for thing in things:
        unit = unit.removesuffix(f"{thing}s").removesuffix(thing).strip()
    unit = WORDS.get(unit, unit)
    if unit not in SCALES or currency:
        raise ValueError(f"{text!r} is not a number")
    return value * SCALES[unit]


def parse_money(text: str) -> tuple[float, str]:
    """Return an amount such as `$1M` and its currency sign, which may be missing.

    Raises ValueError for any other text.
    """
    value, unit, currency = _split(text)
    sign = next((sign for sign in CURRENCIES if unit.endswith(sign)), "")
    unit = unit.removesuffix(sign).strip() if sign else unit
    unit = WORDS.get(unit, unit)
    if unit not in SCALES:
        raise ValueError(f"{text!r} is not an amount of money")
    return value * SCALES[unit], currency or sign


def parse_duration(text: str, unit_s: float) -> float:
    """Return the seconds of a duration such as `30 days`; a plain number has units of `unit_s`.

    Raises ValueError for any other text.
    """
    value, unit, currency = _split(text)
    if not currency and unit in SECONDS:
        return value * SECONDS[unit]
    unit = WORDS.get(unit, unit)
    if currency or unit not in SCALES:
        raise ValueError(f"{text!r} is not a duration")
    return value * SCALES[unit] * unit_s


def parse_figure(text: str) -> SpeedFigure:
    """Return a figure of speed with its unit: MFU, FLOP/s, tokens/s per device, or a step time.

    Raises ValueError for any other text, and for a number whose unit is missing.
    """
    value, unit, currency = _split(text)
    unit = unit.replace(" ", "").removesuffix("mfu")
    if currency or not value:
        raise ValueError(f"{text!r} is not a positive figure with a unit")
    if not unit:
        raise ValueError(f"{text!r} has no unit")
    if unit == "%":
        return SpeedFigure("mfu", value / 100)
    if unit in SECONDS:
        return SpeedFigure("step_time_s", value * SECONDS[unit])
    rate = _RATE.fullmatch(unit)
    if rate is None:
        raise ValueError(f"{text!r} has an unknown unit")
    each = rate["each"]
    if rate["what"].startswith("flop"):
        if each is None or each in _PER_DEVICE:
            return SpeedFigure("flops_per_s_per_device", value * SCALES[rate["scale"]])
    elif each in _PER_DEVICE:
        return SpeedFigure("tokens_per_s_per_device", value * SCALES[rate["scale"]])
    elif each is None:
        raise ValueError(f"{text!r} could be of one GPU or of all: write tokens/s/GPU")
    raise ValueError(f"{text!r} has an unknown unit")


BYTE_FORMS = "1073741824, 500MB, 1.5GiB"
_BYTE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(text: str) -> int:
    """Return `1.5GiB`, `500MB` or `1024` in bytes; raise ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?|)b?", text.strip().lower())
    size = float(match[1]) * _BYTE_UNITS[match[2]] if match else inf
    if not isfinite(size):
        raise ValueError(text)
    return int(size)
