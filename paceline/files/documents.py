"""Read untrusted files within limits, and write files atomically.

A run folder may come from anywhere. What should be a file can be an endless pipe, a device, or a
document nested a million times. Only regular files of a bounded size are read; anything else raises
an error that states the problem.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from io import BufferedReader, TextIOWrapper
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, NoReturn, Protocol, TypeVar, cast
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.problem import invalid_input
from paceline.core.secrets import redact
from paceline.files.temporary import replaced_file

ModelT = TypeVar("ModelT", bound=BaseModel)

LARGEST_BYTES = 1 << 28
"""Maximum size of a document, a hundred times the largest that Paceline writes."""
LONGEST_LINE = 1 << 20
"""Maximum characters in a line of events; Paceline writes about 500."""
GZIP_MAGIC = b"\x1f\x8b"
MAX_EXPANSION = 1000
"""Maximum ratio of a gzip file's content to its size; a repeated line reaches 300, zeros 1,032."""
MIN_EXPANDED_BYTES = 1 << 26
"""Size in bytes up to which any ratio is accepted."""
FOLDER_RECORDS = ("run.json", "campaign.json", "series.json", "bundle.json")
"""Files by which a folder is recognized as one of a run or of several."""
MAX_DEPTH = 5
"""Maximum depth of a file that is read in such a folder."""
MAX_CELL_BYTES = 1 << 20
"""Maximum size of one value in a database."""
DATABASE_LIMIT_S = 300.0
"""Time limit in seconds for all queries of one database."""


def read_text(path: Path, largest: int = LARGEST_BYTES, errors: str = "strict") -> str:
    """Return a regular file's text without a byte order mark.

    Raises OSError if it cannot be read, is not a regular file or is too large, and
    UnicodeDecodeError if it is not UTF-8, unless `errors` is `replace`.
    """
    with open_regular(path) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise OSError(errno.EFBIG, f"is larger than {largest:,} bytes", str(path))
    return content.decode("utf-8-sig", errors)


def read_lines(path: Path) -> Iterator[str]:
    """Yield a regular file's lines, longer ones in pieces of LONGEST_LINE; raise OSError."""
    with TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace") as file:
        while line := file.readline(LONGEST_LINE):
            yield line


def open_regular(path: Path, *, follow: bool = True, leave_folder: bool = False) -> BufferedReader:
    """Open a regular file for reading; raise OSError, also for a pipe, a folder or a device.

    A file of a run folder is not read if a link leads out of that folder, unless `leave_folder` is
    set for logs, which other tools link. `follow` must be false for files whose text is shown and
    whose folder is somebody else's.
    """
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        if not leave_folder and _leaves_folder(path):
            raise OSError(errno.ELOOP, "is a link out of its folder", str(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _leaves_folder(path: Path) -> bool:
    """Return True if a link leads from a path in a run folder to a file outside of it."""
    absolute, real = path.absolute(), path.resolve()
    if absolute == real:
        return False
    for folder in islice(absolute.parents, MAX_DEPTH):
        if any((folder / name).exists() for name in FOLDER_RECORDS):
            return not real.is_relative_to(folder.resolve())
    return False


class _BoundedGzip(gzip.GzipFile):
    """A gzip file that raises OSError once it expands beyond all real text."""

    expanded_bytes = 0

    def __init__(self, packed: BufferedReader) -> None:
        super().__init__(fileobj=packed)
        self._packed = packed
        packed_bytes = os.fstat(packed.fileno()).st_size
        self.max_bytes = max(MIN_EXPANDED_BYTES, packed_bytes * MAX_EXPANSION)

    def close(self) -> None:
        super().close()
        self._packed.close()

    def read(self, size: int | None = -1) -> bytes:
        return self._count(super().read(size))

    def read1(self, size: int = -1) -> bytes:
        return self._count(super().read1(size))

    def readline(self, size: int | None = -1) -> bytes:
        return self._count(super().readline(size))

    def _count(self, data: bytes) -> bytes:
        self.expanded_bytes += len(data)
        if self.expanded_bytes > self.max_bytes:
            what = f"expands to more than {self.max_bytes:,} bytes, {MAX_EXPANSION} times its size"
            raise OSError(errno.EFBIG, what)
        return data


def open_expanded(path: Path) -> BinaryIO:
    """Open a log or trace, decompressed if its first bytes are those of gzip; raise OSError.

    Reading raises EOFError, zlib.error or OSError for damaged or oversized compression.
    """
    file = open_regular(path, leave_folder=True)
    is_packed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    file.seek(0)
    return cast(BinaryIO, _BoundedGzip(file)) if is_packed else file


@contextmanager
def open_database(path: Path, limit_s: float = DATABASE_LIMIT_S) -> Iterator[sqlite3.Connection]:
    """Open a regular SQLite file of somebody else, read-only; raise OSError and sqlite3.Error.

    Every value is at most MAX_CELL_BYTES long, also if the file computes it. All queries together
    end after `limit_s` seconds. Query tables only, not views, which may join without end.
    """
    open_regular(path).close()
    uri = f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1"
    end_at = time.monotonic() + limit_s
    with closing(sqlite3.connect(uri, uri=True)) as database:
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL_BYTES)
        database.set_progress_handler(lambda: time.monotonic() > end_at, 100_000)
        database.execute("PRAGMA trusted_schema = OFF")
        yield database


def parse_json(text: str, *, nan: bool = False) -> Any:
    """Return the value of a JSON text; raise ValueError for anything else.

    NaN and infinity are rejected unless `nan` is set, because a step's loss may be one. An unpaired
    surrogate is rejected because it could not be written again.
    """
    try:
        value = json.loads(text, parse_constant=None if nan else _no_number)
        if r"\ud" in text or r"\uD" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file, {} if the file is missing or damaged."""
    try:
        content = parse_json(read_text(path))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_value(path: Path, model: type[ModelT]) -> ModelT:
    """Return the value in a JSON file; raise UserError if it is missing or does not fit `model`."""
    try:
        return model.model_validate_json(read_text(path))
    except FileNotFoundError as error:
        raise UserError(str(path), "is missing") from error
    except ValidationError as error:
        raise invalid_input(str(path), error) from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SystemFaultError(str(path), f"cannot be read: {why}") from error


def write_output(path: Path, text: str) -> None:
    """Write `text` to a path that the user names: links are followed, devices and pipes written."""
    try:
        target = path.resolve() if path.is_symlink() else path
        if target.exists() and not target.is_file():
            with target.open("w", encoding="utf-8") as file:
                file.write(redact(text, os.environ))
            return
    except OSError as error:
        raise SystemFaultError(str(path), f"cannot be written: {error.strerror}") from error
    write_text(target, text)


def write_text(path: Path, text: str | Iterable[str]) -> None:
    """Write `text`, or its parts, so that a reader sees the old file or the new, never a part.

    A link, device or pipe is replaced, because the folder may be somebody else's. Secrets are
    redacted.
    """
    parts = [text] if isinstance(text, str) else text
    try:
        with replaced_file(path) as file:
            file.writelines(redact(part, os.environ).encode() for part in parts)
    except OSError as error:
        raise SystemFaultError(str(path), f"cannot be written: {error.strerror}") from error
    except UnicodeEncodeError as error:
        raise UserError(str(path), f"cannot be written as UTF-8: {error.reason}") from error


def refuse_unwritable(path: Path) -> None:
    """Raise SystemFaultError if no file can be written, before minutes are spent."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(21, "is a directory")
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise SystemFaultError(str(path), f"cannot be written: {error.strerror}") from error


def write_value(path: Path, value: BaseModel) -> None:
    """Write a value as indented JSON, atomically."""
    write_text(path, value.model_dump_json(indent=2) + "\n")


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


LONGEST_KEY_BYTES = 1 << 16
"""Maximum size of a private key."""
_BEGIN, _END = b"-----BEGIN ", b"-----END "


class _Lines(Protocol):
    def read(self, size: int, /) -> bytes: ...
    def readline(self, size: int, /) -> bytes: ...


def text_blocks(file: _Lines, size: int) -> Iterator[bytes]:
    """Yield the file's bytes in blocks of about `size` that split no line and no private key.

    A line that is longer than `size` is split, so that it cannot fill the memory.
    """
    while block := file.read(size):
        block += file.readline(size)
        max_size = len(block) + LONGEST_KEY_BYTES
        while _is_in_key(block) and (line := file.readline(max_size - len(block))):
            block += line
        yield block


def _is_in_key(block: bytes) -> bool:
    begin = block.rfind(_BEGIN, max(0, len(block) - LONGEST_KEY_BYTES))
    return begin >= 0 and b"PRIVATE KEY-----" in block[begin:] and _END not in block[begin:]
