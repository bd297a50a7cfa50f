"""Records that a terminal, a pager or an editor has wrapped over several lines."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["Wrapping"]

MAX_LINES = 32
"""Maximum number of lines per record."""

KNOWN = (
    b"consumed samples",
    b"consumed tokens",
    b"skipped samples",
    b"elapsed time per iteration (ms)",
    b"elapsed time per iteration (s)",
    b"throughput per GPU (TFLOP/s/GPU)",
    b"tokens/sec/gpu",
    b"eta",
    b"energy per GPU (J/iter/GPU)",
    b"power per GPU (W/GPU)",
    b"iteration time",
    b"learning rate",
    b"global batch size",
    b"lm loss",
    b"lm-loss",
    b"loss scale",
    b"grad norm",
    b"num zeros",
    b"params norm",
    b"curriculum seqlen",
    b"actual seqlen",
    b"number of skipped iterations",
    b"number of nan iterations",
    b"samples per second",
    b"tokens per gpu per second (tgs)",
    b"TFLOPs",
)
"""Field names that identify a line as the continuation of the previous line's record."""

_INTRUDER = re.compile(
    rb"Step Time : [0-9.]{1,24}s GPU utilization: [0-9.]{1,24} ?[A-Z_]{0,8}FLOP/s/GPU"
)
"""Output of another rank at the same time, sometimes in the middle of a record."""

_PREFIX = re.compile(rb"(?:\[[\w.:/-]{1,64}\]:?|\d{1,6}:) ?")

_SPLIT_FIELD = re.compile(rb" {0,24}[A-Za-z][^|:]{1,60}: {0,24}[-+0-9][^|]{0,60}\|")
"""Field of any name that the previous line's end splits."""


class Wrapping:
    """Continuation lines of one log.

    `record` matches the start of a record; `fields` are the known fields of this log, in order.
    """

    def __init__(self, record: re.Pattern[bytes], fields: Sequence[bytes]) -> None:
        self._names = (*KNOWN, *fields)
        names = b"|".join(map(re.escape, self._names))
        self._field = re.compile(rb" {0,24}(" + names + rb"):[^|]{0,100}+(?:\||$)")
        patterns = [rb" {0,4}" + re.escape(name) + rb":[^|]{0,100}+\|" for name in fields]
        end = patterns[-1] if fields else rb"(?!)"
        # Each field at most once, in order, with the last one at the end.
        body = b"".join(b"(?:" + field + b")?+" for field in patterns[:-1])
        self._whole = re.compile(record.pattern + body + end)

    def join(self, lines: bytes, is_last: bool) -> bytes | None:
        """Return the record at the start of `lines` on one line; None if no line continues it.

        `lines` end at the next record, or at the end of the text for the last record.
        """
        if b"\r" in lines:
            lines = lines.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        pure = _INTRUDER.sub(b"", lines)
        record, *others = pure.split(b"\n", MAX_LINES)
        # Text after the last line end is the start of the next record's line.
        others = others if is_last else others[:-1]
        for space in (b"", b" ") if others else ():
            text = space.join([record, *others])
            if self._whole.match(text):
                return text
        longer = self._join_line_by_line(record, others)
        return longer if longer != record or len(pure) < len(lines) else None

    def _join_line_by_line(self, record: bytes, lines: list[bytes]) -> bytes:
        for line in lines:
            longer = self._continue(record, line)
            if longer is None:
                break
            record = longer
        return record

    def _continue(self, record: bytes, line: bytes) -> bytes | None:
        """Return `record` with `line` appended if that completes a field, else None."""
        line = line.strip(b" \t")
        if prefix := _PREFIX.match(line):
            line = line[prefix.end() :]
        bar = record.rfind(b"|") + 1
        partial = record[bar:].strip()
        for space in (b"", b" ") if line else ():
            text = record[bar:] + space + line
            field = self._field.match(text)
            if field and b" " + field[1] + b":" in record[:bar]:
                return None
            if field or self._begins_name(text.strip()):
                return record[:bar] + text
        if partial and line and _SPLIT_FIELD.match(record[bar:] + line):
            return record + line
        return None

    def _begins_name(self, text: bytes) -> bool:
        return any(name.startswith(text) for name in self._names)
