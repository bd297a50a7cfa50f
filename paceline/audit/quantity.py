"""Published figures of speed as people write them: `54.1%`, `1249TFLOP/s`, `12.5s`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isfinite
from typing import Literal

from paceline.core.errors import UserError

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
            raise UserError(where, "is more than the peak", remedy="more than 100 % is no MFU")
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
