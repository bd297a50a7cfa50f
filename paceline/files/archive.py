"""Archives: written alike from the same files, and unpacked within limits, for any may be hostile.

What is unpacked lies inside its folder: names that lead out of it, links, devices and files beyond
the limits are refused before a byte of them is written.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Protocol, Self, cast

from paceline.core.errors import SystemFaultError, UserError
from paceline.files.documents import open_regular

SUFFIXES = (".tar.gz", ".tgz", ".tar.zst", ".tar")
MOST_FILES = 100_000
MOST_BYTES = 1 << 35
"""Of all unpacked files together; the logs of a thousand runs are a hundredth."""
MOST_HEADER_BYTES = 1 << 20
"""Of all headers of one member together, which are read into memory whole."""
LONGEST_PATH = 1024
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_LONG_HEADERS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_BLOCK_BYTES = 1 << 20
_HEADERS_BYTES = 4096
"""Of a member beside its content: headers, and what fills up the last block."""
_AHEAD_BYTES = 1 << 15
"""Of what a reader takes of a stream before it is asked for, and of what fills up a block."""


@dataclass(frozen=True)
class ArchiveLimits:
    """How much an archive may hold."""

    files: int = MOST_FILES
    total_bytes: int = MOST_BYTES


@dataclass(frozen=True)
class Unpacked:
    """What an archive held."""

    files: tuple[str, ...]
    """Paths inside the folder that it was unpacked into."""
    left_out: tuple[str, ...]
    """Links, which are never followed."""


@dataclass(frozen=True)
class ArchivedFile:
    """A file that goes into an archive."""

    name: str
    size: int
    content: Callable[[], IO[bytes]]


def is_archive(path: Path) -> bool:
    """Whether a file is called as archives are that `unpack` reads."""
    return path.name.endswith(SUFFIXES)


def write_archive(path: Path, members: Iterable[ArchivedFile]) -> None:
    """Write a .tar.gz whose bytes follow from names and contents alone: no times, no owners.

    Raises UserError where there is a file of that name, SystemFaultError where it cannot be
    written; then nothing is left behind.
    """
    if path.exists() or path.is_symlink():
        raise UserError(str(path), "is there already", remedy="name another file with --output")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:200]}.")
    except OSError as error:
        raise SystemFaultError(str(path), f"cannot be written: {error.strerror}") from error
    try:
        with (
            os.fdopen(handle, "wb") as raw,
            gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as packed,
        ):
            _write_members(cast(IO[bytes], packed), members)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        raise SystemFaultError(str(path), f"cannot be written: {error.strerror}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def _write_members(packed: IO[bytes], members: Iterable[ArchivedFile]) -> None:
    with tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for member in members:
            header = tarfile.TarInfo(member.name)
            header.size = member.size
            with member.content() as content:
                archive.addfile(header, content)


def unpack(
    path: Path, folder: Path, *, skip_links: bool = False, limits: ArchiveLimits | None = None
) -> Unpacked:
    """Unpack a .tar.gz, .tar.zst or .tar into `folder`, regular files alone.

    Raises UserError for a file that is no archive, a torn one, and one with a name outside its
    folder, a name twice, a link (unless `skip_links`), a device, or more than `limits`;
    SystemFaultError where the disk is full or the program `zstd` is missing.
    """
    limits = limits or ArchiveLimits()
    try:
        with _stream(path) as raw:
            stream = _Bounded(raw, path, limits.total_bytes + limits.files * _HEADERS_BYTES)
            with _opened(stream) as archive:
                held = _unpack_members(archive, stream, path, folder, skip_links, limits)
            stream.read_rest()
            return held
    except (tarfile.TarError, EOFError, zlib.error, RecursionError, ValueError) as error:
        raise _refused(path, f"cannot be read as an archive: {error}") from error
    except gzip.BadGzipFile as error:
        raise _refused(path, f"is torn: {error}") from error
    except OSError as error:
        raise SystemFaultError(str(path), f"cannot be unpacked: {error.strerror}") from error


def first_name(path: Path) -> str:
    """The path of an archive's first member, empty where there is none; raises as `unpack`."""
    try:
        with _stream(path) as raw, _opened(_Bounded(raw, path, MOST_HEADER_BYTES * 4)) as archive:
            member = archive.next()
            return member.name if member else ""
    except (
        *(tarfile.TarError, OSError, EOFError, zlib.error),
        *(RecursionError, ValueError),
    ) as error:
        raise _refused(path, f"cannot be read as an archive: {error}") from error


def _opened(stream: _Bounded) -> tarfile.TarFile:
    return tarfile.open(fileobj=cast(IO[bytes], stream), mode="r|", tarinfo=_PlainHeader)


def _members(archive: tarfile.TarFile, stream: _Bounded) -> Iterator[tarfile.TarInfo]:
    """Every member; none is kept once the next one is asked for, nor what its headers said."""
    while (member := archive.next()) is not None:
        yield member
        # The library keeps every header that it has read, for random access.
        kept = cast(_Kept, archive)
        kept.members.clear()
        kept.pax_headers.clear()
        stream.expect(MOST_HEADER_BYTES)


def _unpack_members(
    archive: tarfile.TarFile,
    stream: _Bounded,
    path: Path,
    folder: Path,
    skip_links: bool,
    limits: ArchiveLimits,
) -> Unpacked:
    files: dict[str, None] = {}
    left_out: list[str] = []
    total = 0
    for count, member in enumerate(_members(archive, stream)):
        if count >= limits.files:
            raise _refused(path, f"holds more than {limits.files:,} members")
        name = _inner_name(path, member.name)
        if member.isdir():
            continue
        if skip_links and (member.issym() or member.islnk()):
            left_out.append(name)
            continue
        total += member.size
        _check(path, member, name in files, total, limits)
        files[name] = None
        stream.expect(member.size)
        _write_file(archive, member, path, folder / name)
    return Unpacked(tuple(files), tuple(left_out))


def _check(
    path: Path, member: tarfile.TarInfo, twice: bool, total: int, limits: ArchiveLimits
) -> None:
    shown = member.name[:100]
    if not member.isreg() or getattr(member, "sparse", None) is not None:
        raise _refused(path, f"{shown!r} is a link, a device or a sparse file")
    if twice:
        raise _refused(path, f"holds {shown!r} twice")
    if member.size < 0 or total > limits.total_bytes:
        raise _refused(path, f"holds more than {limits.total_bytes:,} bytes")


def _inner_name(path: Path, name: str) -> str:
    """The member's path; raises UserError where it would not lie inside the folder."""
    parts = PurePosixPath(name).parts
    inner = PurePosixPath(*(part for part in parts if part != ".")).as_posix()
    outside = name.startswith("/") or ".." in parts or "\\" in name or "\0" in name
    if outside or not name.isprintable() or len(name) > LONGEST_PATH:
        raise _refused(path, f"{name[:100]!r} is no path inside it")
    return inner


def _write_file(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path, to: Path) -> None:
    content = archive.extractfile(member)
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with to.open("xb") as file:
            if content is not None:
                shutil.copyfileobj(content, file, _BLOCK_BYTES)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise _refused(path, f"{member.name[:100]!r} is a file and a folder") from error
    if to.stat().st_size != member.size:
        raise _refused(path, f"ends inside {member.name[:100]!r}")


class _PlainHeader(tarfile.TarInfo):
    """A header whose kind and size are looked at before anything is read by them."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if buf == bytes(tarfile.BLOCKSIZE):  # the mark of an archive's end
                raise
            # The library would take any other for the end, too.
            why = str(error) if buf else "it ends without the mark of its end"
            raise tarfile.ReadError(why) from error
        if header.type in _LONG_HEADERS and not 0 <= header.size <= MOST_HEADER_BYTES:
            raise UserError("archive", f"has a header of {header.size:,} bytes")
        if header.type == tarfile.GNUTYPE_SPARSE:
            raise UserError("archive", f"{header.name[:100]!r} is a sparse file")
        return header


class _Kept(Protocol):
    """What an open archive keeps of what it has read."""

    members: list[tarfile.TarInfo]
    pax_headers: dict[str, str]


class _Bounded:
    """A stream that ends with an error once more was read than an archive may unpack to, or than
    the headers of one member may have."""

    def __init__(self, stream: IO[bytes], path: Path, most_bytes: int) -> None:
        self._stream, self._path, self._left = stream, path, most_bytes
        self.expect(MOST_HEADER_BYTES)

    def expect(self, size: int) -> None:
        """What may be read until this is called again: `size` bytes and what is read ahead."""
        self._expected = size + _AHEAD_BYTES

    def read(self, size: int) -> bytes:
        """At most `size` bytes; raises UserError beyond a limit."""
        block = self._stream.read(size)
        self._left -= len(block)
        self._expected -= len(block)
        if self._left < 0:
            raise _refused(self._path, "unpacks to more than an archive may hold")
        if self._expected < 0:
            raise _refused(
                self._path, f"has a member whose headers have more than {MOST_HEADER_BYTES:,} bytes"
            )
        return block

    def read_rest(self) -> None:
        """Read to the end, where packers put their checksums; raises UserError beyond the limit."""
        self.expect(self._left)
        while self.read(_BLOCK_BYTES):
            pass


@contextmanager
def _stream(path: Path) -> Iterator[IO[bytes]]:
    """The unpacked bytes of an archive, packed in whichever way its first bytes say."""
    try:
        file = open_regular(path)
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}") from error
    with file:
        first = file.read(4)
        file.seek(0)
        if first.startswith(_GZIP):
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield cast(IO[bytes], unpacked)
        elif first == _ZSTD:
            with _zstd(path, file) as unpacked:
                yield unpacked
        else:
            yield file


@contextmanager
def _zstd(path: Path, file: IO[bytes]) -> Iterator[IO[bytes]]:
    command = [shutil.which("zstd") or "", "--decompress", "--stdout", "--quiet", "--memory=512MB"]
    if not command[0]:
        raise SystemFaultError(
            str(path), "takes the program zstd, which is not installed", remedy="apt install zstd"
        )
    # What was read of the file is in a buffer that the program does not see.
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    with subprocess.Popen(
        command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield cast(IO[bytes], _Unpacking(process, path))
        finally:
            process.kill()  # What follows the archive's end may be endless.


class _Unpacking:
    """What a program unpacks; where it ends, the program has to be content with what it read."""

    def __init__(self, process: subprocess.Popen[bytes], path: Path) -> None:
        self._process, self._path = process, path

    def read(self, size: int) -> bytes:
        """At most `size` bytes; raises UserError at the end of what is torn."""
        assert self._process.stdout is not None
        block = self._process.stdout.read(size)
        if not block and (code := self._process.wait()):
            raise _refused(self._path, f"is torn: zstd ended with {code}")
        return block


def _refused(path: Path, what: str) -> UserError:
    return UserError(str(path), what)
