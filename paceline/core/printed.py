"""Printed numbers: the interval of values that the digits of a cell allow.

A table prints a few digits of an exact number. `14.8` stands for 14.75 to 14.85 if the author
rounded, and for up to 14.9 if the author truncated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from math import inf, isfinite

_NUMBER = re.compile(
    r"(?<![\w.])[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?(?:e[+-]?\d+)?", re.IGNORECASE
)
_AT_LEAST = re.compile(r"(?:over|above|more than|at least|>=?|≥)\s*$", re.IGNORECASE)
_AT_MOST = re.compile(r"(?:under|below|less than|at most|up to|<=?|≤)\s*$", re.IGNORECASE)
_SLACK = 1e-12
"""Tolerance for binary rounding when a value is exactly at the edge of an interval."""


@dataclass(frozen=True)
class Interval:
    """Closed interval from `low` to `high`."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """Mean of both ends, or the finite end of a one-sided interval."""
        if not isfinite(self.high):
            return self.low
        return (self.low + self.high) / 2

    @property
    def relative_width(self) -> float:
        """Width over middle, (high - low) / middle; 0 for a single value."""
        return (self.high - self.low) / self.middle if self.middle else inf

    def meets(self, other: Interval) -> bool:
        """Return True if both intervals share a value."""
        slack = _SLACK * max(abs(self.low), abs(other.low))
        return self.low <= other.high + slack and other.low <= self.high + slack

    def common(self, other: Interval) -> Interval | None:
        """Return the intersection of both intervals; None if it is empty."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        if self.meets(other):
            return Interval(min(low, high), max(low, high))
        return None

    def times(self, factor: float) -> Interval:
        """Return the interval multiplied by a positive factor."""
        return Interval(self.low * factor, self.high * factor)


def exactly(value: float) -> Interval:
    """Return the interval that contains only `value`."""
    return Interval(value, value)


@dataclass(frozen=True)
class Printed:
    """A number as printed."""

    text: str
    """Text of the whole cell."""
    digits: str
    """Digits of the number, as printed."""
    value: float
    step: float
    """Value of one unit in the last printed digit."""
    bound: str = ""
    """`at least` or `at most` if the cell says `over 98%` or the like; otherwise empty."""

    def rounding_interval(self) -> Interval:
        """Return the values that round to these digits."""
        if self.bound:
            return (
                Interval(self.value, inf) if self.bound == "at least" else Interval(0, self.value)
            )
        return Interval(self.value - self.step / 2, self.value + self.step / 2)

    def truncation_interval(self) -> Interval:
        """Return the values that truncate to these digits."""
        return (
            self.rounding_interval() if self.bound else Interval(self.value, self.value + self.step)
        )

    @property
    def resolution(self) -> float:
        """One unit of the last digit over the value: the smallest visible relative change."""
        return self.step / abs(self.value) if self.value else inf


def read_printed(text: str, step: float | None = None) -> Printed | None:
    """Return the first number of a cell; None if there is none.

    Formats such as `51.20%`, `3.94E+15`, `136,902`, `over 98%` and `16GB borderline` are supported.
    Words around the number are not interpreted. `step` overrides the resolution of the last printed
    digit, for figures that are known to be multiples of a larger number.
    """
    match = _NUMBER.search(text)
    if match is None:
        return None
    try:
        number = Decimal(match[0].replace(",", ""))
    except InvalidOperation:  # Exponents of more than 18 digits fail.
        return None
    if not isfinite(float(number)):
        return None
    last_digit = float(f"1e{number.as_tuple().exponent}")
    before = text[: match.start()]
    bound = "at least" if _AT_LEAST.search(before) else "at most" if _AT_MOST.search(before) else ""
    return Printed(text, match[0], float(number), max(last_digit, step or 0.0), bound)


def like(value: float, pattern: Printed) -> str:
    """Format `value` with the decimals and thousands separators of a printed number."""
    mantissa = pattern.digits.lower().partition("e")[0]
    decimals = len(mantissa.partition(".")[2])
    if "e" in pattern.digits.lower():
        return f"{value:.{decimals}E}"
    return f"{value:{',' if ',' in mantissa else ''}.{decimals}f}"


def misprints(printed: Printed) -> Iterator[tuple[str, Printed]]:
    """Yield (typographical error, correct number) pairs that could have led to this number.

    Transposed digits come before replaced digits, because a transposition is the rarer coincidence.
    """
    digits = printed.digits
    places = [at for at, sign in enumerate(digits.lower().partition("e")[0]) if sign.isdigit()]
    for at, after in pairwise(places):
        if digits[at] != digits[after]:
            characters = list(digits)
            characters[at], characters[after] = digits[after], digits[at]
            yield from _other(printed, "two digits swapped", "".join(characters))
    for at in places:
        for digit in "0123456789":
            if digit != digits[at]:
                other = digits[:at] + digit + digits[at + 1 :]
                yield from _other(printed, "one digit misprinted", other)


def _other(printed: Printed, how: str, digits: str) -> Iterator[tuple[str, Printed]]:
    value = float(Decimal(digits.replace(",", "")))
    leading_zero = re.match(r"[+-]?0(?!\.)", digits)
    if value and not leading_zero:
        yield how, Printed(digits, digits, value, printed.step, printed.bound)
