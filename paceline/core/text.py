"""Sanitizing of untrusted text for terminals and pages."""

from __future__ import annotations

import json
import re
from typing import Any

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200c\u200e\u200f"
    "\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Characters that move a cursor, end a line, turn the reading order, or are invisible."""


def printable(text: str) -> str:
    """Return `text` without terminal sequences.

    Other control characters, line separators, direction marks and invisible characters become
    U+FFFD.
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


def encodable(value: Any, text: str) -> Any:
    """Return the value of a JSON text; unpaired surrogates in it, which no file holds, become `?`.

    `text` may be more than the value's own text.
    """
    if r"\ud" not in text and r"\uD" not in text:
        return value
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def as_text(text: str) -> str:
    """Return a name of a file or variable as text; such names may hold arbitrary bytes."""
    return text.encode("utf-8", "replace").decode("utf-8")
