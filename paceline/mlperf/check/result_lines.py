"""The result lines of a log, and the lines of the file that the checker's messages are about."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from paceline.mlperf.check.findings import CheckFinding

TOKEN = b":::MLLOG "
FIELDS = ("time_ms", "key", "value", "metadata")
MAX_MESSAGE_CHARACTERS = 600
_KEY = re.compile(r"(?:CHECK for|occurrence of) '([^']*)'|Failed checks for (\S+) :")
_LINE = re.compile(r" in line (\d+)(?=:\n)")
_CONTEXT = re.compile(r"^current (?:context|line)\[", re.MULTILINE)


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


def finding(message: str, lines: ResultLines) -> CheckFinding:
    """Return a message of the official checker with the key and the line of the file it is about.

    The checker counts result lines from 0: that number becomes `line`, which counts the lines of
    the file. The dump of the checker's variables at the end is left out.
    """
    key, line, text = None, None, _CONTEXT.split(message)[0].strip()
    if match := _KEY.search(text):
        key = match[1] or match[2]
        line = next(iter(lines.of_key(key)), None)
    quoted = [part.strip() for part in text.splitlines() if part.startswith(TOKEN.decode())]
    if quoted and (line := lines.number_of(quoted[0])) is not None:
        key = lines.record(lines.texts.index(quoted[0])).get("key")
    if (match := _LINE.search(text)) and int(match[1]) < len(lines.numbers):
        line = lines.numbers[int(match[1])]
        text = text.replace(match[0], "", 1)
    return CheckFinding(key=key, line=line, message=text[:MAX_MESSAGE_CHARACTERS])


def incomplete_records(lines: ResultLines) -> list[CheckFinding]:
    """Return the result lines that lack a field, on which the checker breaks off."""
    findings: list[CheckFinding] = []
    for at, number in enumerate(lines.numbers):
        record = lines.record(at)
        missing = [name for name in FIELDS if record and name not in record]
        if missing:
            message = f"this result line has no {' and no '.join(missing)}"
            findings.append(CheckFinding(line=number, message=message))
    return findings
