"""Log files as blocks of whole lines, whatever their size and however they are damaged."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 20
"""Longer lines are cut: a file without line ends must not fill the memory."""

RECORD_BYTES = 1 << 14
"""How far back a record may have begun that goes on over the end of a block."""

GZIP_MAGIC = b"\x1f\x8b"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


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
        rest, in_cut_line = b"", False
        for data in self._data():
            if in_cut_line:
                data = data[_first_end(data) :]
                in_cut_line = not data
            text = rest + data
            end = self._split(text)
            rest = text[end:]
            if end:
                yield text[:end]
            elif len(rest) > MAX_LINE_BYTES:
                self.cut_lines += 1
                yield rest[:MAX_LINE_BYTES] + b"\n"
                rest, in_cut_line = b"", True
        self.ends_in_line = bool(rest) or in_cut_line
        if rest:
            yield rest

    def _split(self, text: bytes) -> int:
        """Where the last whole line ends, or the last record begins if that may go on."""
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if self.begins is None or not end:
            return end
        begun = text.rfind(self.begins, max(0, end - RECORD_BYTES), end)
        if begun <= 0:
            return end
        line = max(text.rfind(b"\n", 0, begun), text.rfind(b"\r", 0, begun)) + 1
        return line or end

    def _data(self) -> Iterator[bytes]:
        with self.path.open("rb") as raw:
            compressed = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            file: BinaryIO = gzip.GzipFile(fileobj=raw) if compressed else raw  # type: ignore[assignment]
            try:
                while data := file.read(BLOCK_BYTES):
                    self.num_bytes += len(data)
                    yield data
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                self.broken_off = f"the compressed file is damaged or cut short ({error})"


def _first_end(data: bytes) -> int:
    """The place behind the first line end, or the length when there is none."""
    ends = [at for at in (data.find(b"\n"), data.find(b"\r")) if at >= 0]
    return min(ends) + 1 if ends else len(data)
