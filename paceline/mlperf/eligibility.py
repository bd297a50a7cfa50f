"""Which runs are no MLPerf results: they are neither packaged nor compared with published ones."""

from __future__ import annotations

import re
from collections.abc import Iterable

from paceline.core.errors import EXIT_GATE_FAILED, UserError
from paceline.engines.log_reading.mllog import MlRecord

NOT_A_RESULT = "not an MLPerf result"
"""What our own small runs say of themselves in their logs."""
MADE_UP_DATA = ("synthetic", "stdlib")
DATA_SOURCE = "data_source"
_TINY = re.compile(r"(?:(?<![a-z])|(?<=\dx))tiny(?![a-z])", re.IGNORECASE)
_NAMES = ("submission_benchmark", "submission_platform", "submission_org")


class RefusedError(UserError):
    """The rules, not the command, stand against it (exit code 3)."""

    exit_code = EXIT_GATE_FAILED


def not_a_result(lines: Iterable[MlRecord | None]) -> str | None:
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
