"""Numbers from printed values of a log: counts, suffixes, clocks, dates; a column at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from paceline.core.steps import FloatColumn
from paceline.engines.log_reading.log_content import decimal_step, numbers
from paceline.engines.log_reading.records import significant_step

SUFFIXES = dict(zip(b"KMGBTPE", (b"e3", b"e6", b"e9", b"e9", b"e12", b"e15", b"e18"), strict=True))
CLOCK_FACTORS = np.array([36e6, 36e5, 36e4, 36e3, 3600, 0, 600, 60, 0, 10, 1])
"""Seconds of each digit of `HHHHH:MM:SS`."""
CLOCK_WIDTH = len(CLOCK_FACTORS)
DAY_S = 86400.0


def values_of(kind: str, texts: Sequence[bytes]) -> FloatColumn:
    """Return the numbers in texts of a kind of `table_format.KINDS`; NaN for an empty text."""
    return _PARSERS.get(kind, numbers)(texts)


def printed_digit(kind: str, text: bytes, digits: int | None) -> float:
    """Return the resolution of a printed value, which may have `digits` significant digits only."""
    if kind == "clock":
        return 1.0
    value = values_of(kind, [text]).item()
    mantissa = text.replace(b",", b"").rstrip(bytes(SUFFIXES))
    if digits and len(mantissa.replace(b".", b"")) <= digits:
        return significant_step(value, digits)
    scale = float(b"1" + SUFFIXES[text[-1]]) if text[-1] in SUFFIXES else 1.0
    return decimal_step(mantissa) * scale


def without_commas(texts: Sequence[bytes]) -> Sequence[bytes]:
    """Return texts without thousands separators."""
    text = b"\n".join(texts)
    return text.replace(b",", b"").split(b"\n") if b"," in text else texts


def _counts(texts: Sequence[bytes]) -> FloatColumn:
    return numbers(without_commas(texts))


def _numbers_with_suffix(texts: Sequence[bytes]) -> FloatColumn:
    """Return numbers with a suffix K, M, B (or G), T, P or E."""
    text = b"\n".join(texts) + b"\n"
    for suffix, exponent in SUFFIXES.items():
        text = text.replace(b"%c\n" % suffix, exponent + b"\n")
    return numbers(text[:-1].split(b"\n"))


def _clocks(texts: Sequence[bytes]) -> FloatColumn:
    """Return the seconds of clocks such as 01:02:03 and `1 day, 2:03:04`."""
    days = np.zeros(len(texts))
    if b"," in b"".join(texts):
        parts = [text.rpartition(b", ") for text in texts]
        days = np.array([DAY_S * int(head.split()[0]) if head else 0.0 for head, _, _ in parts])
        texts = [clock for _, _, clock in parts]
    digits = np.array([text.rjust(CLOCK_WIDTH, b"0") for text in texts], f"S{CLOCK_WIDTH}")
    values = digits.view(np.uint8).reshape(-1, CLOCK_WIDTH) - float(ord("0"))
    is_known = np.fromiter(map(bool, texts), np.bool_, len(texts))
    return np.where(is_known, values @ CLOCK_FACTORS + days, np.nan)


def _dates(texts: Sequence[bytes]) -> FloatColumn:
    """Return dates as seconds since 1970 in the time zone of the log."""
    text = b"\n".join(texts).translate(_DATE_SIGNS)
    dates = [text[:23] for text in text.decode().split("\n")]
    try:
        milliseconds = np.array([date or "NaT" for date in dates], "datetime64[ms]")
    except ValueError:  # A date such as 2026-02-30.
        milliseconds = np.array([_date(date) for date in dates], "datetime64[ms]")
    seconds = milliseconds.astype(np.int64) / 1e3
    return np.where(np.isnat(milliseconds), np.nan, seconds)


_DATE_SIGNS = bytes.maketrans(b"/, ", b"-.T")


def _date(text: str) -> np.datetime64:
    try:
        return np.datetime64(text, "ms") if text else np.datetime64("NaT", "ms")
    except ValueError:
        return np.datetime64("NaT", "ms")


_PARSERS: Mapping[str, Callable[[Sequence[bytes]], FloatColumn]] = {
    "suffix": _numbers_with_suffix,
    "clock": _clocks,
    "date": _dates,
    "count": _counts,
}
