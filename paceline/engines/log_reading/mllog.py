"""MLPerf result lines: `:::MLLOG ` and a JSON object, anywhere in a line.

Source: mlcommons/logging 4.1, mllog.py (writer) and compliance_checker/mlp_parser (reader).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from paceline.core.text import encodable

TOKEN = b":::MLLOG "

_LINE_END = re.compile(rb"[\r\n]")
MAX_TIME_MS = 1e13
"""Maximum Unix time in milliseconds, the year 2286."""
_DECODER = json.JSONDecoder(parse_constant=lambda _: float("inf"))


@dataclass(frozen=True, slots=True)
class MlRecord:
    """One result line; values keep their JSON type, and NaN becomes infinity."""

    key: str
    value: Any
    time_ms: float
    event_type: str
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])

    def count(self, name: str) -> int | None:
        """Return a whole number of at least 0 from the metadata, or None."""
        return whole_number(self.metadata.get(name))


def texts(block: bytes) -> Iterator[bytes]:
    """Yield the text after each token, up to the end of its line or the next token."""
    parts = iter(block.split(TOKEN))
    next(parts)
    yield from parts


def record_of(text: bytes) -> MlRecord | None:
    """Return the record at the start of `text`, or None; text after the record is ignored.

    Bytes are decoded as Latin-1, as in the official reader.
    """
    end = _LINE_END.search(text)
    text = text[: end.start()] if end else text
    try:
        content = text.decode("latin-1")
        fields = encodable(_DECODER.raw_decode(content)[0], content)
        key, time_ms, metadata = fields["key"], fields["time_ms"], fields["metadata"]
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    time = number(time_ms)
    if not isinstance(key, str) or time is None or not isinstance(metadata, dict):
        return None
    if abs(time) > MAX_TIME_MS:
        return None
    return MlRecord(key, fields.get("value"), time, str(fields.get("event_type")), metadata)  # type: ignore[arg-type]


def records(blocks: Iterable[bytes]) -> Iterator[MlRecord | None]:
    """Yield every record in blocks of whole lines; None for a token without a complete record."""
    for block in blocks:
        yield from map(record_of, texts(block))


def number(value: object) -> float | None:
    """Return a JSON number as float, including infinity; None for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def whole_number(value: object) -> int | None:
    """Return a JSON number as a count (36 or 36.0, at most 10^15), or None."""
    amount = number(value)
    return int(amount) if amount is not None and 0 <= amount <= 1e15 and amount % 1 == 0 else None
