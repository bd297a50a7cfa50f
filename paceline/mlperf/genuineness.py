"""Whether a run is one of the benchmark's own: nothing else is packaged, or compared with results."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

NOT_A_RESULT = "not an MLPerf result"
"""What our own small runs say of themselves in their logs."""
MADE_UP_DATA = ("synthetic", "stdlib")
DATA_SOURCE = "data_source"
_TINY = re.compile(r"(?:(?<![a-z])|(?<=\dx))tiny(?![a-z])", re.IGNORECASE)
_NAMES = ("submission_benchmark", "submission_platform", "submission_org")


class Line(Protocol):
    """One result line, decoded."""

    @property
    def key(self) -> str: ...
    @property
    def value(self) -> object: ...


def not_a_result(lines: Iterable[Line | None]) -> str | None:
    """Why the run of these lines is no MLPerf result, None when nothing speaks against it."""
    for line in lines:
        if line is None:
            continue
        value = str(line.value)
        if NOT_A_RESULT in value:
            return f"it says of itself that it is {NOT_A_RESULT}"
        if line.key == DATA_SOURCE and value in MADE_UP_DATA:
            return f"it trained on {value} data, not on the benchmark's"
        if line.key in _NAMES and is_tiny(value):
            return f"its {line.key} is {value[:60]!r}: a small sibling of the benchmark"
    return None


def is_tiny(name: str | None) -> bool:
    """Whether a system's name says that it ran a small sibling."""
    return bool(name and _TINY.search(name))
