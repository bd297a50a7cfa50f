"""One file from a URL: resumed where it was cut, checked, and under its name only when whole."""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.assets import StagedFile
from paceline.core.errors import SystemFaultError
from paceline.core.units import si
from paceline.staging.connection import (
    LOCAL_FAULTS,
    TransientError,
    WrongContentError,
    given_up,
    open_url,
)
from paceline.staging.credentials import shown
from paceline.staging.ending import StageEnd

BLOCK_BYTES = 1 << 20
TRIES = 5
"""In a row without a byte; a connection that brings some begins a new count."""
TRIES_OF_WRONG_CONTENT = 2
FIRST_WAIT_S = 0.5
LONGEST_PAUSE_S = 30.0
TAG_ENDING = ".tag"
"""Of the file that says which version the file beside it is of."""
_UNWRITABLE = {errno.ENOSPC: "is full", errno.EDQUOT: "is over its quota", errno.EFBIG: "is full"}


@dataclass(frozen=True)
class RemoteFile:
    """A file of an asset as its source lists it."""

    path: str
    url: str
    bytes: int | None = None
    sha256: str | None = None
    md5: str | None = None
    git_sha1: str | None = None
    """Of the content as git stores it: what a hub says of small files."""


@dataclass(frozen=True)
class TransferCallbacks:
    """What a transfer answers to: it goes on while `check` raises nothing."""

    check: Callable[[], None]
    present: Callable[[int], None]
    fetched: Callable[[int], None]
    ended: StageEnd
    gate: str | None = None


def fetch(file: RemoteFile, done: Path, underway: Path, callbacks: TransferCallbacks) -> StagedFile:
    """Fetch a file to `done`/path, by way of `underway`, where what is not whole yet waits.

    Raises UserError and SystemFaultError as open_url does, and when no try succeeds.
    """
    callbacks.check()
    target = done / file.path
    if target.is_file():
        if whole := _whole(file, target, callbacks):
            return whole
        target.unlink()
    name = hashlib.sha256(file.path.encode()).hexdigest()[:24]
    part = _PartialFile(underway / name, underway / f"{name}{TAG_ENDING}")
    callbacks.present(part.bytes)
    staged = _persist(file, part, callbacks)
    callbacks.check()
    target.parent.mkdir(parents=True, exist_ok=True)
    part.path.replace(target)
    part.tag.unlink(missing_ok=True)
    return staged


def _persist(file: RemoteFile, part: _PartialFile, callbacks: TransferCallbacks) -> StagedFile:
    """Try until the file is whole, or nothing comes any more."""
    left, left_wrong, pause_s = TRIES, TRIES_OF_WRONG_CONTENT, FIRST_WAIT_S
    while True:
        before = part.bytes
        try:
            return _try(file, part, callbacks)
        except WrongContentError as error:
            callbacks.check()
            part.discard(callbacks)
            left_wrong -= 1
            if not left_wrong:
                remedy = "it is damaged at its source or underway, or the recipe is out of date"
                raise SystemFaultError(shown(file.url), str(error), remedy=remedy) from None
        except TransientError as error:
            came = part.bytes > before
            left, pause_s = (TRIES, FIRST_WAIT_S) if came else (left - 1, pause_s * 2)
            if not left:
                raise given_up(shown(file.url), error) from None
            callbacks.ended.wait(error.wait_s or min(pause_s, LONGEST_PAUSE_S))
        callbacks.check()


def hashed(path: Path, check: Callable[[], None] = lambda: None) -> str:
    """SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            check()
    return digest.hexdigest()


@dataclass
class _PartialFile:
    """What has come of a file, and the tag of the version that it is of."""

    path: Path
    tag: Path

    @property
    def bytes(self) -> int:
        return self.path.stat().st_size if self.path.is_file() else 0

    def discard(self, callbacks: TransferCallbacks) -> None:
        callbacks.present(-self.bytes)
        self.path.unlink(missing_ok=True)
        self.tag.unlink(missing_ok=True)

    @property
    def version(self) -> str | None:
        return self.tag.read_text() if self.tag.is_file() else None


class _Digests:
    """Every digest that a source states of a file, of what has come of it."""

    def __init__(self, file: RemoteFile) -> None:
        self.bytes = 0
        self.sha256 = hashlib.sha256()
        self._file = file
        # As git stores a file; the size comes first.
        begin = f"blob {file.bytes}\0".encode()
        self._others: dict[str, Any] = {
            "md5": file.md5 and hashlib.md5(usedforsecurity=False),
            "git_sha1": file.git_sha1 and hashlib.sha1(begin, usedforsecurity=False),
        }

    def update(self, block: bytes) -> None:
        self.bytes += len(block)
        self.sha256.update(block)
        for digest in filter(None, self._others.values()):
            digest.update(block)

    def read(self, path: Path, callbacks: TransferCallbacks) -> None:
        with path.open("rb") as content:
            while block := content.read(BLOCK_BYTES):
                self.update(block)
                callbacks.check()

    @property
    def is_too_long(self) -> bool:
        return self._file.bytes is not None and self.bytes > self._file.bytes

    @property
    def problem(self) -> str | None:
        stated = self._file
        if stated.bytes is not None and self.bytes != stated.bytes:
            return f"has {self.bytes:,} bytes where {stated.bytes:,} are stated"
        for name, digest in {"sha256": self.sha256, **self._others}.items():
            word = getattr(stated, name)
            if word and digest.hexdigest() != word:
                return f"has another checksum ({name}) than is stated"
        return None

    @property
    def staged(self) -> StagedFile:
        return StagedFile(path=self._file.path, bytes=self.bytes, sha256=self.sha256.hexdigest())


def _whole(file: RemoteFile, target: Path, callbacks: TransferCallbacks) -> StagedFile | None:
    """A file that an earlier call had fetched; None where it is none any more."""
    digests = _Digests(file)
    digests.read(target, callbacks)
    if digests.problem:
        return None
    callbacks.present(digests.bytes)
    return digests.staged


def _try(file: RemoteFile, part: _PartialFile, callbacks: TransferCallbacks) -> StagedFile:
    """One connection: what had come before is kept where the source says that it is unchanged."""
    if file.bytes is not None and part.bytes > file.bytes:
        part.discard(callbacks)
    digests = _Digests(file)
    if part.bytes and part.bytes == file.bytes:
        digests.read(part.path, callbacks)
    else:
        _receive(file, part, callbacks, digests)
    if digests.problem:
        raise WrongContentError(digests.problem)
    with part.path.open("rb") as content:
        os.fsync(content.fileno())
    return digests.staged


def _receive(
    file: RemoteFile, part: _PartialFile, callbacks: TransferCallbacks, digests: _Digests
) -> None:
    held, version = part.bytes, part.version
    headers: dict[str, str] = {}
    if held and (version or file.sha256 or file.md5 or file.git_sha1):
        headers = {"Range": f"bytes={held}-", **({"If-Range": version} if version else {})}
    with open_url(file.url, callbacks.gate, headers) as response:
        callbacks.check()
        if response.status == http.client.PARTIAL_CONTENT and headers:
            _must_continue(response, held, version)
            digests.read(part.path, callbacks)
        else:
            part.discard(callbacks)
        part.path.parent.mkdir(parents=True, exist_ok=True)
        tag = response.headers.get("ETag") or response.headers.get("Last-Modified")
        if tag and not tag.startswith("W/"):
            part.tag.write_text(tag)
        expected = response.length
        if expected is None and not (response.chunked or _is_told_whole(file)):
            raise SystemFaultError(
                shown(file.url),
                "comes without its length, so that a cut would not be noticed",
                remedy="state its bytes or its digest in the recipe",
            )
        with callbacks.ended.breaking(response):
            callbacks.check()
            came = _store(response, part.path, callbacks, digests)
    if expected is not None and came < expected:
        raise TransientError("the connection was cut")


def _is_told_whole(file: RemoteFile) -> bool:
    """Whether the recipe or the source states what shows that a file is whole."""
    return file.bytes is not None or any((file.sha256, file.md5, file.git_sha1))


def _must_continue(response: http.client.HTTPResponse, held: int, version: str | None) -> None:
    """Raise WrongContentError for another part than the one that follows, or of another version."""
    if not (response.headers.get("Content-Range") or "").startswith(f"bytes {held}-"):
        raise WrongContentError("continues at another place than it was asked for")
    tag = response.headers.get("ETag" if version and '"' in version else "Last-Modified")
    if version and tag and tag.removeprefix("W/") != version:
        raise WrongContentError("continues with another version than it began with")


def _store(
    response: http.client.HTTPResponse, path: Path, callbacks: TransferCallbacks, digests: _Digests
) -> int:
    """Append what comes to the file; the number of bytes, of which none exceeds what is stated."""
    came = 0
    try:
        with path.open("ab") as file:
            while block := _read(response):
                callbacks.check()
                digests.update(block)
                if digests.is_too_long:
                    raise WrongContentError("is longer than is stated")
                file.write(block)
                file.flush()
                came += len(block)
                callbacks.fetched(len(block))
    except OSError as error:
        raise unwritable(path, error) from None
    return came


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read1(BLOCK_BYTES)
    except (*LOCAL_FAULTS, OSError):
        raise TransientError("the connection was cut") from None


def unwritable(path: Path, error: OSError) -> SystemFaultError:
    """What a full disk, a quota or a read-only folder is told as."""
    folder = next(p for p in (path, *path.parents) if p.is_dir())
    status = os.statvfs(folder)
    why = _UNWRITABLE.get(error.errno or 0)
    return SystemFaultError(
        str(path.parent),
        f"{why}, {si(status.f_bavail * status.f_frsize, 'B')} are free"
        if why
        else f"cannot be written: {error.strerror or error}",
        remedy="make room, or give another place with --to; what has come is kept",
    )
