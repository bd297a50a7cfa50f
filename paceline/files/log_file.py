"""Read log files of any size as blocks of whole lines, even if they are damaged."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from paceline.files.documents import open_expanded

BLOCK_BYTES = 1 << 18
"""Larger blocks are not faster, and parsing a block takes many times its size in memory."""

MAX_LINE_BYTES = 1 << 20
"""Longer lines are truncated, so that a file without line ends cannot fill the memory."""

RECORD_BYTES = 1 << 16
"""Minimum size up to which a record over several lines is never split by the end of a block."""

UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
FIRST_BYTES = 1 << 12
"""Number of bytes from which the encoding is detected."""
MANY, FEW = 0.6, 0.1
"""Minimum and maximum share of zeros in the high and low bytes of UTF-16 text that is mostly
ASCII."""


class LogFile:
    """One log, plain or gzip, as an iterable of blocks; afterwards its attributes report damage.

    A line ends at a line feed or a carriage return (progress bars). `begins` is a literal that
    starts a record which may be wrapped over several lines; a block never ends within one.
    """

    def __init__(self, path: Path, begins: bytes | None = None) -> None:
        self.path = path
        self.begins = begins
        self.num_bytes = 0
        """Bytes read, after decompression."""
        self.cut_lines = 0
        """Number of lines that were truncated to MAX_LINE_BYTES."""
        self.read_error: str | None = None
        """Reason why the file could not be read to its end."""
        self.ends_in_line = False
        """True when the last line has no line end."""

    def __iter__(self) -> Iterator[bytes]:
        """Yield the blocks from the start; raise OSError if the file cannot be opened or read."""
        self.num_bytes = self.cut_lines = 0
        self.read_error, self.ends_in_line = None, False
        pending = b""
        for lines in self._whole_lines():
            text = pending + lines
            end = self._last_record(text)
            pending = text[end:]
            if end:
                yield text[:end]
        if pending:
            yield pending

    def _whole_lines(self) -> Iterator[bytes]:
        """Yield text that ends with a line end, except at the end of the file; truncate long
        lines."""
        pending, in_cut_line = b"", False
        for data in self._data():
            first = _first_end(data)
            length = len(pending) + (first - 1 if first else len(data))
            if length > MAX_LINE_BYTES and not in_cut_line:
                self.cut_lines += 1
                yield (pending + data)[:MAX_LINE_BYTES] + b"\n"
                pending, in_cut_line = b"", True
            if in_cut_line:
                if not first:
                    continue
                data, in_cut_line = data[first:], False
            end = _last_end(data)
            if end:
                yield pending + data[:end]
                pending = b""
            pending += data[end:]
        self.ends_in_line = in_cut_line or bool(pending)
        if pending:
            yield pending

    def _last_record(self, lines: bytes) -> int:
        """Return the start of the last record's first line if the record may continue, else the
        length."""
        if self.begins is None:
            return len(lines)
        record_start = lines.rfind(self.begins, max(0, len(lines) - RECORD_BYTES))
        if record_start < 0:
            return len(lines)
        line = max(lines.rfind(b"\n", 0, record_start), lines.rfind(b"\r", 0, record_start)) + 1
        return line if line or len(lines) < RECORD_BYTES else len(lines)

    def _data(self) -> Iterator[bytes]:
        """Yield the content in pieces that do not split a CR LF."""
        end = b""
        for piece in self._pieces():
            self.num_bytes += len(piece)
            data = end + piece
            end = b"\r" if data.endswith(b"\r") else b""
            yield data[: len(data) - len(end)]
        if end:
            yield end

    def _pieces(self) -> Iterator[bytes]:
        """Yield the decompressed content in pieces of at most BLOCK_BYTES."""
        parts: list[bytes] = []
        size = 0
        try:
            with open_expanded(self.path) as file:
                # read() would lose up to a block before damage, read1() a few KiB.
                while part := file.read1(BLOCK_BYTES - size):  # pyright: ignore
                    parts.append(part)
                    size += len(part)
                    if size == BLOCK_BYTES:
                        yield b"".join(parts)
                        parts, size = [], 0
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self.read_error = f"the compressed file is damaged or truncated ({error})"
        if parts:
            yield b"".join(parts)


def _first_end(data: bytes) -> int:
    """Return the offset after the first line end, 0 if there is none."""
    ends = [at for at in (data.find(b"\n"), data.find(b"\r")) if at >= 0]
    return min(ends) + 1 if ends else 0


def _last_end(data: bytes) -> int:
    """Return the offset after the last line end, 0 if there is none."""
    return max(data.rfind(b"\n"), data.rfind(b"\r")) + 1


def utf16(beginning: bytes) -> str | None:
    """Return the `iconv` name of the UTF-16 variant of this text, with or without a byte order
    mark,
    else None."""
    if beginning[:2] in UTF16_MARKS:
        return "UTF-16"
    even, odd = (
        half.count(0) / len(half) if half else 0.0 for half in (beginning[::2], beginning[1::2])
    )
    if odd >= MANY and even <= FEW:
        return "UTF-16LE"
    return "UTF-16BE" if even >= MANY and odd <= FEW else None
