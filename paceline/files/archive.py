"""Write reproducible archives, and unpack archives within limits, because any may be hostile.

The standard library's `data` filter keeps members inside the folder and refuses devices. Beyond it
links are never made, and files, bytes and headers have limits.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Self, cast

from paceline.core.errors import SystemFaultError, UserError
from paceline.files.documents import open_regular
from paceline.files.temporary import replaced_file

SUFFIXES = (".tar.gz", ".tgz", ".tar.zst", ".tar")
MAX_FILES = 100_000
MAX_BYTES = 1 << 35
"""Maximum size of all unpacked files together, a hundred times the logs of a thousand runs."""
MAX_HEADER_BYTES = 1 << 18
"""Maximum size of one header, which is read into memory as a whole."""
MAX_MEMBER_HEADER_BYTES = 1 << 20
"""Maximum size of all headers of one member, including the map of a sparse file."""
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_LONG_HEADERS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_BLOCK_BYTES = 1 << 20
_AHEAD_BYTES = 1 << 15
"""Bytes that `tarfile` may read ahead or that pad the last block."""
_MEMBER_HEADER_BYTES = 4096
"""Average overhead of a member: its headers, and the padding of its last block."""
_BROKEN = (tarfile.TarError, EOFError, zlib.error, RecursionError, ValueError, gzip.BadGzipFile)


@dataclass(frozen=True)
class ArchiveLimits:
    """Limits of an archive's content."""

    files: int = MAX_FILES
    total_bytes: int = MAX_BYTES


@dataclass(frozen=True)
class UnpackedArchive:
    """Files that were unpacked from an archive."""

    files: tuple[str, ...]
    """Paths relative to the destination folder."""
    skipped_links: tuple[str, ...]
    """Links, which are never followed."""


@dataclass(frozen=True)
class ArchivedFile:
    """A file that goes into an archive."""

    name: str
    size: int
    content: Callable[[], IO[bytes]]


def is_archive(path: Path) -> bool:
    """Return True for a file name with a suffix that `unpack` supports."""
    return path.name.endswith(SUFFIXES)


def write_archive(path: Path, members: Iterable[ArchivedFile]) -> None:
    """Write a .tar.gz that depends only on names and contents, not on times or owners.

    Raises UserError if the file exists, and SystemFaultError if it cannot be written. No partial
    file is left behind.
    """
    if path.exists() or path.is_symlink():
        raise UserError(str(path), "already exists", remedy="name another file with --output")
    try:
        with (
            replaced_file(path, is_new=True) as raw,
            gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as packed,
        ):
            _write_members(cast(IO[bytes], packed), members)
    except FileExistsError as error:  # another command has written it meanwhile
        what = "already exists"
        raise UserError(str(path), what, remedy="name another file with --output") from error
    except OSError as error:
        raise SystemFaultError(str(path), f"cannot be written: {error.strerror}") from error


def _write_members(packed: IO[bytes], members: Iterable[ArchivedFile]) -> None:
    with tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for member in members:
            header = tarfile.TarInfo(member.name)
            header.size = member.size
            with member.content() as content:
                archive.addfile(header, content)


def unpack(
    path: Path, folder: Path, *, skip_links: bool = False, limits: ArchiveLimits | None = None
) -> UnpackedArchive:
    """Unpack the regular files of a .tar.gz, .tar.zst or .tar into `folder`.

    Raises UserError for a file that is not an archive, is truncated, or exceeds `limits`, and for
    members that are duplicates, links (unless `skip_links`), devices, or outside the folder.
    Raises SystemFaultError if the disk is full or the program `zstd` is missing.
    """
    limits = limits or ArchiveLimits()
    files: dict[str, None] = {}
    links: list[str] = []
    num_bytes = 0
    max_bytes = limits.total_bytes + limits.files * _MEMBER_HEADER_BYTES
    with _read(path, max_bytes) as (archive, stream):
        for count, member in enumerate(_members(archive, stream)):
            if count >= limits.files:
                raise UserError(str(path), f"holds more than {limits.files:,} members")
            if member.isdir():
                continue
            member.name = _inner_name(path, member.name)
            if skip_links and (member.issym() or member.islnk()):
                links.append(member.name)
                continue
            num_bytes += member.size
            if num_bytes > limits.total_bytes:
                raise UserError(str(path), f"holds more than {limits.total_bytes:,} bytes")
            if not member.isreg() or member.issparse():
                raise UserError(str(path), f"{member.name!r} is a link, a device or a sparse file")
            if member.name in files:
                raise UserError(str(path), f"holds {member.name!r} twice")
            files[member.name] = None
            stream.expect(member.size)
            try:
                # The archive's owner, mode and time are not restored.
                archive.extract(member, folder, set_attrs=False, filter="data")
            except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
                raise UserError(
                    str(path), f"{member.name!r} is both a file and a folder"
                ) from error
    return UnpackedArchive(tuple(files), tuple(links))


def first_name(path: Path) -> str:
    """Return the path of an archive's first member, "" if it is empty; raise the errors of
    `unpack`."""
    with _read(path, MAX_HEADER_BYTES * 4, to_its_end=False) as (archive, _):
        member = archive.next()
        return member.name if member else ""


def _members(archive: tarfile.TarFile, stream: _CappedStream) -> Iterator[tarfile.TarInfo]:
    """Yield every member, and drop the headers that `tarfile` keeps for random access."""
    while (member := archive.next()) is not None:
        yield member
        archive.members.clear()  # pyright: ignore
        archive.pax_headers.clear()  # pyright: ignore
        stream.expect(MAX_MEMBER_HEADER_BYTES)


def _inner_name(path: Path, name: str) -> str:
    """Return the member's path; raise UserError if it would be outside the folder."""
    inner = PurePosixPath(name).as_posix()
    outside = name.startswith("/") or ".." in PurePosixPath(name).parts or "\\" in name
    if outside or not name.isprintable():
        raise UserError(str(path), f"{name[:100]!r} is not a path inside the archive")
    return inner


@contextmanager
def _read(
    path: Path, max_bytes: int, *, to_its_end: bool = True
) -> Iterator[tuple[tarfile.TarFile, _CappedStream]]:
    """Open an archive as a stream, and read its end too, where compressors store checksums."""
    try:
        with _open_decompressed(path) as raw:
            stream = _CappedStream(raw, path, max_bytes)
            file = cast(IO[bytes], stream)
            with tarfile.open(fileobj=file, mode="r|", tarinfo=_CheckedHeader) as archive:
                yield archive, stream
            stream.expect(max_bytes)
            while to_its_end and stream.read(_BLOCK_BYTES):
                pass
    except _BROKEN as error:
        raise UserError(str(path), f"cannot be read as an archive: {error}") from error
    except OSError as error:
        raise SystemFaultError(str(path), f"cannot be unpacked: {error.strerror}") from error


class _CheckedHeader(tarfile.TarInfo):
    """A header that is rejected before it makes `tarfile` read more than MAX_HEADER_BYTES."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if buf == bytes(tarfile.BLOCKSIZE):  # the mark of an archive's end
                raise
            # `tarfile` would take any other invalid header for the end, too.
            why = str(error) if buf else "the end-of-archive marker is missing"
            raise tarfile.ReadError(why) from error
        if header.type in _LONG_HEADERS and not 0 <= header.size <= MAX_HEADER_BYTES:
            raise UserError("archive", f"has a header of {header.size:,} bytes")
        if header.type == tarfile.GNUTYPE_SPARSE:
            raise UserError("archive", f"{header.name[:100]!r} is a sparse file")
        return header

    def _proc_pax(self, archive: tarfile.TarFile) -> Any:
        try:
            return super()._proc_pax(archive)  # pyright: ignore
        except tarfile.InvalidHeaderError:  # pyright: ignore
            # A malformed extension says nothing of its member.
            return self.fromtarfile(archive)

    def _proc_member(self, archive: tarfile.TarFile) -> Any:
        try:
            return super()._proc_member(archive)  # pyright: ignore
        except tarfile.HeaderError as error:  # `tarfile` would take it for the end, too
            raise tarfile.ReadError(f"{self.name[:100]!r}: {error}") from error


class _CappedStream:
    """A stream that raises an error beyond the size limit of an archive or of a member's headers.

    The library reads all headers of a member, and the map of a sparse file, before it returns.
    """

    def __init__(self, stream: IO[bytes], path: Path, max_bytes: int) -> None:
        self._stream, self._path, self._left = stream, path, max_bytes
        self.expect(MAX_MEMBER_HEADER_BYTES)

    def expect(self, size: int) -> None:
        """Set how many bytes may be read until the next call, in addition to read-ahead."""
        self._expected = size + _AHEAD_BYTES

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes; raise UserError beyond a limit."""
        block = self._stream.read(size)
        self._left -= len(block)
        self._expected -= len(block)
        if self._left < 0:
            raise UserError(str(self._path), "exceeds the size limit of an archive when unpacked")
        if self._expected < 0:
            what = f"has a member whose headers have more than {MAX_MEMBER_HEADER_BYTES:,} bytes"
            raise UserError(str(self._path), what)
        return block


@contextmanager
def _open_decompressed(path: Path) -> Iterator[IO[bytes]]:
    """Open an archive's decompressed bytes; its first bytes identify the compression."""
    try:
        file = open_regular(path)
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}") from error
    with file:
        first = file.read(4)
        file.seek(0)
        if first == _ZSTD:
            with _zstd(path, file) as stream:
                yield stream
        elif first.startswith(_GZIP):
            with gzip.GzipFile(fileobj=file) as stream:
                yield cast(IO[bytes], stream)
        else:
            yield file


@contextmanager
def _zstd(path: Path, archive: IO[bytes]) -> Iterator[IO[bytes]]:
    program = shutil.which("zstd")
    if program is None:
        raise SystemFaultError(
            str(path), "needs the program zstd, which is not installed", remedy="apt install zstd"
        )
    # Python has buffered the first bytes, which zstd would miss.
    os.lseek(archive.fileno(), 0, os.SEEK_SET)
    command = [program, "--decompress", "--stdout", "--quiet", "--memory=512MB"]
    with subprocess.Popen(
        command, stdin=archive, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout
        try:
            yield process.stdout
            if not process.stdout.read(1) and process.wait():
                raise UserError(
                    str(path), f"is damaged: zstd exited with code {process.returncode}"
                )
        finally:
            process.kill()  # The data after the archive's end may be endless.
