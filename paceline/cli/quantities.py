"""Options whose values are quantities as people write them."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, TypeVar

import typer

from paceline.core.quantity import (
    BYTE_FORMS,
    COUNT_FORMS,
    DURATION_FORMS,
    MONEY_FORMS,
    parse_bytes,
    parse_count,
    parse_duration,
    parse_money,
)
from paceline.core.units import SECONDS_PER_DAY

T = TypeVar("T")
HOUR_S = 3600.0


def _parser(
    parse: Callable[[str], T], allowed: str, lowest: float = 0.0, highest: float = inf
) -> Callable[[Any], Any]:
    """Return a parser of an option's text; other values are defaults."""

    def quantity(text: Any) -> Any:
        if not isinstance(text, str):
            return text
        if text.strip().lower().lstrip("-") in ("inf", "nan", "infinity"):
            return float(text)  # VerbCommand refuses it, as for every option.
        try:
            value = parse(text)
        except (ValueError, OverflowError) as error:
            raise typer.BadParameter(f"{text!r} is not a quantity; allowed: {allowed}") from error
        number = value[0] if isinstance(value, tuple) else value
        if isinstance(number, int | float) and number < lowest:
            raise typer.BadParameter(f"{text!r} is too small; allowed: {lowest:g} or more")
        if isinstance(number, int | float) and number > highest:
            raise typer.BadParameter(f"{text!r} is too large; allowed: up to {highest:,}")
        return value

    return quantity


def _whole(text: str) -> int:
    value = parse_count(text, "GPU", "gpu", "sequence", "sample")
    if value % 1:
        raise ValueError(text)
    return int(value)


def _length(text: str) -> int:
    """Return tokens of a sequence; `8k` is 8,192, as sequence lengths are written."""
    lower = text.strip().lower()
    return int(lower[:-1]) * 1024 if lower.endswith("k") and lower[:-1].isdigit() else _whole(text)


whole_number = _parser(_whole, "16, 1,024 or 1k", 1)
sequence_length = _parser(_length, "8192, 8,192 or 8k", 1)
payload = _parser(parse_bytes, BYTE_FORMS, 4, 2**34)
tokens = _parser(lambda text: parse_count(text, "token"), COUNT_FORMS, 1)
parameters = _parser(lambda text: parse_count(text, "parameter"), "1.3B, 1,300,000,000 or 1.3e9", 1)
money = _parser(parse_money, MONEY_FORMS)
days = _parser(
    lambda text: parse_duration(text, SECONDS_PER_DAY) / SECONDS_PER_DAY, DURATION_FORMS, 1e-6
)
hours = _parser(lambda text: parse_duration(text, HOUR_S) / HOUR_S, "50k, 5 years or 400h", 1)
seconds = _parser(lambda text: parse_duration(text, 1.0), DURATION_FORMS)
step_seconds = _parser(lambda text: parse_duration(text, 1.0), "7.79, 7.79s or 360ms", 1e-6)


def _list(text: str) -> tuple[int, ...]:
    """Return numbers of devices.

    Commas separate them, and thousands in a number such as 1,024 or 8,192: one with a zero behind
    the comma, or that is a power of two.
    """
    parts = text.replace(" ", "").split(",")
    digits = "".join(parts)
    groups = len(parts) > 1 and all(len(part) == 3 and part.isdigit() for part in parts[1:])
    power = digits.isdigit() and int(digits) & (int(digits) - 1) == 0
    is_one = groups and (power or any(part.startswith("0") for part in parts[1:]))
    values = tuple(map(_whole, [digits] if is_one else parts))
    if min(values) < 1:
        raise ValueError(text)
    return values


whole_numbers = _parser(_list, "64, or a list: 64,128,256")
