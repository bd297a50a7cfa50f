"""The result lines of a log as the official checker numbers them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

TOKEN = b":::MLLOG "


@dataclass
class ResultLines:
    """The result lines of a log as the checker numbers them, and where they stand in the file."""

    numbers: list[int] = field(default_factory=list[int])
    texts: list[str] = field(default_factory=list[str])

    @classmethod
    def of(cls, content: bytes) -> ResultLines:
        """Of a whole log; line numbers count line feeds, as editors do."""
        lines = cls()
        for number, line in enumerate(content.split(b"\n"), 1):
            # The checker also ends a line at a carriage return, which progress bars print.
            for part in line.split(b"\r"):
                if TOKEN in part:
                    lines.numbers.append(number)
                    text = part[part.rindex(TOKEN) :].decode("latin-1").strip()
                    lines.texts.append(text)
        return lines

    def record(self, at: int) -> dict[str, Any]:
        """The record of result line `at`, empty when it has none."""
        try:
            record = json.loads(self.texts[at][len(TOKEN) :])
        except (ValueError, IndexError, RecursionError):
            return {}
        return record if isinstance(record, dict) else {}

    def number_of(self, text: str) -> int | None:
        """The first line with this result, None when no line has it."""
        return self.numbers[self.texts.index(text)] if text in self.texts else None

    def of_key(self, key: str) -> list[int]:
        """The lines that state `key`."""
        quoted = f'"{key}"'
        return [
            self.numbers[at]
            for at, text in enumerate(self.texts)
            if quoted in text and self.record(at).get("key") == key
        ]
