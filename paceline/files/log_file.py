"""Log files as blocks of whole lines, whatever their size and however they are damaged."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

BLOCK_BYTES = 1 << 18
"""Larger blocks are read no faster, and what is made of one takes many times its size."""

MAX_LINE_BYTES = 1 << 20
"""Longer lines are cut: a file without line ends must not fill the memory."""

RECORD_BYTES = 1 << 14
"""How far back a record may have begun that goes on over the end of a block."""

GZIP_MAGIC = b"\x1f\x8b"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
FIRST_BYTES = 1 << 12
"""From which the encoding of a log is told."""
MANY, FEW = 0.6, 0.1
"""Share of zeros among the one and the other half of the bytes of UTF-16 that is mostly ASCII."""


class LogFile:
    """One log, plain or gzip, as an iterable of blocks; afterwards it says what it met.

    A line ends at a line feed or a carriage return (progress bars). `begins` is a literal that
    starts a record which may be wrapped over several lines: blocks are not split within one.
    """

    def __init__(self, path: Path, begins: bytes | None = None) -> None:
        self.path = path
        self.begins = begins
        self.num_bytes = 0
        """Bytes read, after decompression."""
        self.cut_lines = 0
        """Lines longer than MAX_LINE_BYTES, of which only that much was used."""
        self.broken_off: str | None = None
        """Why the file could not be read to its end."""
        self.ends_in_line = False
        """True when the last line has no line end."""

    def __iter__(self) -> Iterator[bytes]:
        """The blocks from the beginning; raises OSError when the file cannot be opened or read."""
        self.num_bytes = self.cut_lines = 0
        self.broken_off, self.ends_in_line = None, False
        held = b""
        for lines in self._whole_lines():
            text = held + lines
            end = self._last_record(text)
            held = text[end:]
            if end:
                yield text[:end]
        if held:
            yield held

    def _whole_lines(self) -> Iterator[bytes]:
        """Text that ends with a line, but for the file's last; lines that are too long are cut."""
        rest, in_cut_line = b"", False
        for data in self._data():
            first = _first_end(data)
            length = len(rest) + (first - 1 if first else len(data))
            if length > MAX_LINE_BYTES and not in_cut_line:
                self.cut_lines += 1
                yield (rest + data)[:MAX_LINE_BYTES] + b"\n"
                rest, in_cut_line = b"", True
            if in_cut_line:
                if not first:
                    continue
                data, in_cut_line = data[first:], False
            end = _last_end(data)
            if end:
                yield rest + data[:end]
                rest = b""
            rest += data[end:]
        self.ends_in_line = in_cut_line or bool(rest)
        if rest:
            yield rest

    def _last_record(self, lines: bytes) -> int:
        """Where the line begins that opens the last record if that may go on, else the length."""
        if self.begins is None:
            return len(lines)
        begun = lines.rfind(self.begins, max(0, len(lines) - RECORD_BYTES))
        if begun < 0:
            return len(lines)
        line = max(lines.rfind(b"\n", 0, begun), lines.rfind(b"\r", 0, begun)) + 1
        return line if line or len(lines) < RECORD_BYTES else len(lines)

    def _data(self) -> Iterator[bytes]:
        """The content in pieces that do not split a CR LF."""
        end = b""
        for piece in self._pieces():
            self.num_bytes += len(piece)
            data = end + piece
            end = b"\r" if data.endswith(b"\r") else b""
            yield data[: len(data) - len(end)]
        if end:
            yield end

    def _pieces(self) -> Iterator[bytes]:
        """The content, decompressed, in pieces of at most BLOCK_BYTES."""
        with self.path.open("rb") as raw:
            if raw.peek(2)[:2] == GZIP_MAGIC:
                yield from self._gunzipped(raw)
                return
            while data := raw.read(BLOCK_BYTES):
                yield data

    def _gunzipped(self, raw: BinaryIO) -> Iterator[bytes]:
        """All that can be decompressed, up to the place of any damage."""
        parts: list[bytes] = []
        size = 0
        try:
            with gzip.GzipFile(fileobj=raw) as file:
                # read() would lose up to a block before the damage, read1() a few KiB.
                while part := file.read1(BLOCK_BYTES - size):
                    parts.append(part)
                    size += len(part)
                    if size == BLOCK_BYTES:
                        yield b"".join(parts)
                        parts, size = [], 0
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self.broken_off = f"the compressed file is damaged or cut short ({error})"
        if parts:
            yield b"".join(parts)


def _first_end(data: bytes) -> int:
    """The place behind the first line end, or 0 when there is none."""
    ends = [at for at in (data.find(b"\n"), data.find(b"\r")) if at >= 0]
    return min(ends) + 1 if ends else 0


def _last_end(data: bytes) -> int:
    """The place behind the last line end, or 0 when there is none."""
    return max(data.rfind(b"\n"), data.rfind(b"\r")) + 1


def utf16(beginning: bytes) -> str | None:
    """The name that `iconv` has for UTF-16 text that begins so, with a mark or without; or None."""
    if beginning[:2] in UTF16_MARKS:
        return "UTF-16"
    even, odd = (
        half.count(0) / len(half) if half else 0.0 for half in (beginning[::2], beginning[1::2])
    )
    if odd >= MANY and even <= FEW:
        return "UTF-16LE"
    return "UTF-16BE" if even >= MANY and odd <= FEW else None
