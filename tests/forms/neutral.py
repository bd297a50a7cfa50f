"""Outputs without what differs from machine to machine and from day to day."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUSY = "note: other programs use "
"""Begins a line that depends on what else this machine does."""
PATTERNS = (
    (r"python -m tests\.forms\.paceline", "paceline"),
    (r"x cpu \(.*?\)(?= ·|$)", "x cpu (<processor>)"),
    (r"cpu with [\d.,]+ GiB each", "cpu with <memory> each"),
    (r"all memory here is [\d.,]+ GiB", "all memory here is <memory>"),
    (r"mlperf-logging \d[\d.]*", "mlperf-logging <version>"),
)


@dataclass(frozen=True)
class Neutral:
    """Patterns of volatile texts, each with the word that stands for them."""

    patterns: tuple[tuple[str, str], ...]

    @classmethod
    def of_this_machine(cls, work: Path, root: Path, version: str) -> Neutral:
        """Also of folders, the interpreter, Paceline's version, and today's dates and times."""
        volatile = (
            (_path_pattern(work), "<work>"),
            (_path_pattern(sys.executable), "<python>"),
            (_path_pattern(root), "<repository>"),
            (rf"(?<![\d.]){re.escape(version)}(?![\d.])", "<version>"),
            (rf"{time.strftime('%Y-%m-%d')}(T[\d:.+]+)?", "<today>"),
        )
        return cls(volatile + PATTERNS)

    def lines(self, text: str) -> list[str]:
        """The lines of a text, without those about other programs."""
        return [self.text(line) for line in text.splitlines() if not line.startswith(BUSY)]

    def value(self, value: Any) -> Any:
        """A JSON value in which every text is neutral."""
        if isinstance(value, dict):
            return {self.text(key): self.value(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.value(item) for item in value]
        return self.text(value) if isinstance(value, str) else value

    def text(self, text: str) -> str:
        """The text with every volatile part replaced."""
        for pattern, word in self.patterns:
            text = re.sub(pattern, word, text)
        return text


def _path_pattern(path: Path | str) -> str:
    """Return a pattern of the path, also as Markdown writes it: with backslashes."""
    return "".join(c if c.isalnum() else rf"\\?{re.escape(c)}" for c in str(path))


def kinds(value: Any) -> Any:
    """A JSON value with type names in place of everything but objects."""
    if isinstance(value, dict):
        return {key: kinds(item) for key, item in value.items()}
    return type(value).__name__
