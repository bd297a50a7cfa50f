"""Date of the run that wrote a log, from the dates in its lines."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from statistics import median_low

from paceline.files.log_file import LogFile

SEARCHED_BYTES = 1 << 20
"""Length of the beginning of a log in which dates are searched."""

_CLOCK = rb"[ T,-]{1,2}(\d\d:\d\d:\d\d)(?:[.,]\d+)?(Z\b|[+-]\d\d:?\d\d(?!\d))?"
_YEAR_FIRST = re.compile(rb"(?<!\d)(20\d\d)[-/]?(\d\d)[-/]?(\d\d)" + _CLOCK)
_MONTH_FIRST = re.compile(rb"(?<!\d)(\d\d)/(\d\d)/(20\d\d)" + _CLOCK)
_EPOCH_MS = re.compile(rb'"time_ms": ?(1\d{12})\b')
"""Time of a line of MLPerf's logs."""


def log_date(path: Path) -> str | None:
    """Return the middle date of the log's beginning as ISO text; None if its lines have no dates.

    Dates without a time zone are local. The middle ignores a single other date, such as that of a
    container's build.
    """
    data, log = bytearray(), LogFile(path)
    try:
        for block in log:
            data += block
            if len(data) >= SEARCHED_BYTES:
                break
    except OSError:
        return None
    numbers = [match.groups() for match in _YEAR_FIRST.finditer(data, 0, SEARCHED_BYTES)]
    for match in _MONTH_FIRST.finditer(data, 0, SEARCHED_BYTES):
        month, day, year, clock, zone = match.groups()
        numbers.append((year, month, day, clock, zone))
    dates = [date for parts in numbers if (date := _date(parts))]
    dates += [
        datetime.fromtimestamp(int(match[1]) / 1000, UTC)
        for match in _EPOCH_MS.finditer(data, 0, SEARCHED_BYTES)
    ]
    return median_low(dates).isoformat() if dates else None


def _date(parts: tuple[bytes | None, ...]) -> datetime | None:
    year, month, day, clock, zone = (part.decode() if part else "" for part in parts)
    try:
        return datetime.fromisoformat(f"{year}-{month}-{day}T{clock}{zone}").astimezone(UTC)
    except ValueError:
        return None
