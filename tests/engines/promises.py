"""What reading a log promises whatever is in it, as checks that tests and fuzzers share."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.steps import FLOATS
from paceline.engines import log_format
from paceline.engines.log_reading.log_content import FACT_NAMES, FIGURE_NAMES, LogContent, LogFormat
from paceline.files.log_file import BLOCK_BYTES, LogFile
from paceline.logs.facts import UserSettings
from paceline.logs.parser import parse_log

SIZES = (BLOCK_BYTES, 4096, 97)
"""Sizes of the pieces in which one and the same log arrives."""

MEMORY_KINDS = {"allocated", "reserved", "used"}
LONGEST_TEXT = 300
SHORTEST_RECORD_BYTES = 8


class InPieces(LogFile):
    """A log in memory that arrives in pieces of a chosen size."""

    def __init__(self, content: bytes, size: int, begins: bytes | None = None) -> None:
        super().__init__(Path("memory.log"), begins)
        self._content = content
        self._size = size

    def _pieces(self) -> Iterator[bytes]:
        for start in range(0, len(self._content), self._size):
            yield self._content[start : start + self._size]


def read(kind: LogFormat, content: bytes, size: int = BLOCK_BYTES) -> LogContent:
    """What the log format reads of `content` when it comes in pieces of `size` bytes.

    A warning of numpy is an error: it would stand in the user's terminal.
    """
    log = LogContent()
    with warnings.catch_warnings(), np.errstate(all="raise", under="ignore"):
        warnings.simplefilter("error")
        kind.read(InPieces(content, size, kind.begins), log)
    return log


def check_read(kind: LogFormat, content: bytes, sizes: tuple[int, ...] = SIZES) -> LogContent:
    """Reads `content`, and asserts that the answer is sound and the same for every size of pieces.

    `content` must be shorter than the longest record that blocks keep whole.
    """
    log = read(kind, content, sizes[0])
    check_answer(log, len(content))
    first = answer(log)
    for size in sizes[1:]:
        assert answer(read(kind, content, size)) == first, f"in pieces of {size}"
    return log


def reader_of(name: str) -> Callable[[str], LogContent]:
    """Return the function that reads a text by a log format, as `check_read` does."""
    return lambda text: check_read(log_format(name), text.encode())


def check_answer(log: LogContent, num_bytes: int) -> None:
    """Asserts that names are known, numbers finite, texts short, and steps not too many."""
    assert log.facts.keys() <= FACT_NAMES.keys(), log.facts
    assert log.figures.keys() <= FIGURE_NAMES.keys(), log.figures
    assert log.memory_bytes.keys() <= MEMORY_KINDS, log.memory_bytes
    assert all(map(_is_sound, log.facts.values())), log.facts
    assert all(map(_is_sound, log.figures.values())), log.figures
    assert all(map(_is_sound, log.memory_bytes.values())), log.memory_bytes
    assert math.isfinite(log.resolution_s) and log.resolution_s >= 0, log.resolution_s
    texts = [*log.remarks, log.end_line, log.incomplete_reason, log.out_of_memory]
    assert all(_is_sound(text) for text in texts if text is not None), texts
    assert len(log) <= num_bytes / SHORTEST_RECORD_BYTES


def answer(log: LogContent) -> tuple[Any, ...]:
    """Everything that a log says, in a form that can be compared; consumes the log."""
    statements = (dict(log.facts), dict(log.figures), dict(log.memory_bytes), log.resolution_s)
    ending = (log.end_line, log.incomplete_reason, log.out_of_memory)
    steps = log.steps()
    said_so = any("start over" in remark for remark in log.remarks)
    assert said_so or (np.diff(steps.index) > 0).all()
    columns = {n: steps[n].tobytes() for n in FLOATS if not np.isnan(steps[n]).all()}
    return (*statements, *ending, tuple(log.remarks), steps.index.tobytes(), columns)


def check_parse(path: Path, user: UserSettings = UserSettings()) -> dict[str, Any]:  # noqa: B008
    """Parses the file as the verb does, and asserts that the answer is a status in sound JSON."""
    with warnings.catch_warnings(), np.errstate(all="raise", under="ignore"):
        warnings.simplefilter("error")
        document = parse_log(path, user).document.model_dump(mode="json")
    json.dumps(document, allow_nan=False)
    assert document["status"] == "ok" or document["reason"]
    return document


def parsed(path: Path, text: str) -> dict[str, Any]:
    """What the verb answers for a log of this text, written to `path`."""
    path.write_bytes(text.encode())
    return check_parse(path)


def _is_sound(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= LONGEST_TEXT and value.isprintable()
    if isinstance(value, int):
        return abs(value) < 1 << 63
    return isinstance(value, float) and math.isfinite(value)
