"""Sanitizing of untrusted text for terminals and pages."""

from __future__ import annotations

import re

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return `text` without terminal sequences.

    Other control characters and direction marks become U+FFFD.
    """
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", _ANSI.sub("", text.replace("\r\n", "\n")))


def shorten(text: str, limit: int) -> str:
    """Return `text`, or its beginning up to a whole word and `...` if it is longer than `limit`."""
    if len(text) <= limit:
        return text
    start, space, _ = text[:limit].rpartition(" ")
    return f"{start if space else text[:limit]} ..."


def one_line(text: str) -> str:
    """Return `printable(text)` on one line."""
    return " ".join(printable(text).splitlines())


def whole_number(text: str, max_digits: int = 18) -> int | None:
    """Return a number of ASCII digits; None for any other text."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= max_digits
    return int(text) if is_number else None


def is_text(text: str) -> bool:
    """Return whether a name of a file or variable can be written as UTF-8."""
    return text.isascii() or not _SURROGATE.search(text)


def as_text(text: str) -> str:
    """Return a name of a file or variable as text; such names may hold arbitrary bytes."""
    return text.encode("utf-8", "replace").decode("utf-8")
