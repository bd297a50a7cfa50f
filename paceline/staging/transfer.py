"""Download of one file from a URL: resumable, verified, and renamed only when complete."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import httpx2

from paceline.core.assets import Asset, StagedFile, plain_path
from paceline.core.errors import SystemFaultError
from paceline.core.text import one_line
from paceline.core.units import si
from paceline.staging.connection import (
    FIRST_WAIT_S,
    TRIES,
    TransientError,
    WrongContentError,
    given_up,
    open_url,
)
from paceline.staging.credentials import shown
from paceline.staging.ending import StageEnd
from paceline.staging.verification import digests_of

TRIES_OF_WRONG_CONTENT = 2
MAX_PAUSE_S = 30.0
TAG_ENDING = ".tag"
"""Suffix of the file with the version tag of a partial file in the same folder."""
_UNWRITABLE = {errno.ENOSPC: "is full", errno.EDQUOT: "is over its quota", errno.EFBIG: "is full"}


@dataclass(frozen=True)
class RemoteFile:
    """File of an asset as listed by its source."""

    path: str
    url: str
    bytes: int | None = None
    sha256: str | None = None
    md5: str | None = None
    git_sha1: str | None = None
    """SHA-1 of the content as a git blob, which a hub states for small files."""

    @property
    def has_digest(self) -> bool:
        """True if the source or the recipe states a digest, which identifies the version."""
        return any((self.sha256, self.md5, self.git_sha1))

    @property
    def is_checkable(self) -> bool:
        """True if the source or the recipe states a size or a digest, which shows completeness."""
        return self.bytes is not None or self.has_digest


@dataclass(frozen=True)
class SourceListing:
    """Files of an asset and their revision."""

    files: tuple[RemoteFile, ...]
    origin: str
    revision: str | None = None

    @property
    def bytes(self) -> int | None:
        """Bytes of all files; None if the size of a file is unknown."""
        sizes = [file.bytes for file in self.files]
        return None if None in sizes else sum(size or 0 for size in sizes)


@dataclass(frozen=True)
class TransferCallbacks:
    """Callbacks of a transfer, which continues as long as `check` does not raise."""

    check: Callable[[], None]
    present: Callable[[int], None]
    fetched: Callable[[int], None]
    ended: StageEnd
    gate: str | None = None


def is_included(path: str, patterns: Iterable[str]) -> bool:
    """Return whether the path matches a pattern; without patterns every path matches."""
    patterns = tuple(patterns)
    return not patterns or any(fnmatch(path, pattern) for pattern in patterns)


def inner_path(path: str, asset: Asset) -> str:
    """Return a path listed by a source; raises SystemFaultError if it cannot be staged."""
    try:
        return plain_path(path)
    except ValueError as error:
        raise SystemFaultError(
            f"{asset.kind} {shown(asset.source)}",
            f"names a file {one_line(path)!r}, which {error}",
        ) from None


def fetch(file: RemoteFile, done: Path, underway: Path, callbacks: TransferCallbacks) -> StagedFile:
    """Fetch a file to `done`/path; `underway` holds it while it is partial.

    Raises UserError and SystemFaultError as `open_url` does, and if no try succeeds.
    """
    callbacks.check()
    target = done / file.path
    if target.is_file():
        try:
            staged = _verified(file, target, callbacks)
            callbacks.present(staged.bytes)
            return staged
        except WrongContentError:
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
    """Retry until the file is complete, or the tries are used up."""
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
            callbacks.ended.wait(error.wait_s or min(pause_s, MAX_PAUSE_S))
        callbacks.check()


@dataclass
class _PartialFile:
    """Partial file, and the file with its version tag."""

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


def _try(file: RemoteFile, part: _PartialFile, callbacks: TransferCallbacks) -> StagedFile:
    """Make one try; the received bytes are kept if the source says that the file is unchanged."""
    if file.bytes is not None and part.bytes > file.bytes:
        part.discard(callbacks)
    if not part.bytes or part.bytes != file.bytes:
        _receive(file, part, callbacks)
    staged = _verified(file, part.path, callbacks)
    with part.path.open("rb") as content:
        os.fsync(content.fileno())
    return staged


def _verified(file: RemoteFile, path: Path, callbacks: TransferCallbacks) -> StagedFile:
    """Return the file with its SHA-256; raises WrongContentError if size or digest differ."""
    size = path.stat().st_size
    if file.bytes is not None and size != file.bytes:
        raise WrongContentError(f"has {size:,} bytes where {file.bytes:,} are stated")
    stated = {"sha256": file.sha256, "md5": file.md5, "git_sha1": file.git_sha1}
    names = ["sha256", *(name for name in ("md5", "git_sha1") if stated[name])]
    digests = digests_of(path, names, callbacks.check)
    for name, digest in digests.items():
        if stated[name] not in (None, digest):
            raise WrongContentError(f"has another checksum ({name}) than is stated")
    return StagedFile(path=file.path, bytes=size, sha256=digests["sha256"])


def _receive(file: RemoteFile, part: _PartialFile, callbacks: TransferCallbacks) -> None:
    held, version = part.bytes, part.version
    headers: dict[str, str] = {}
    # Resume only if the server can confirm the version, or a digest detects mixed versions.
    if held and (version or file.has_digest):
        headers = {"Range": f"bytes={held}-", **({"If-Range": version} if version else {})}
    with open_url(file.url, callbacks.gate, headers) as response:
        callbacks.check()
        if response.status_code == httpx2.codes.PARTIAL_CONTENT and headers:
            _must_continue(response, held, version)
        else:
            part.discard(callbacks)
        part.path.parent.mkdir(parents=True, exist_ok=True)
        tag = response.headers.get("ETag") or response.headers.get("Last-Modified")
        # A weak ETag does not guarantee identical bytes, so it cannot validate a resumed download.
        if tag and not tag.startswith("W/"):
            part.tag.write_text(tag)
        has_end = any(name in response.headers for name in ("Content-Length", "Transfer-Encoding"))
        if not (has_end or file.is_checkable):
            raise SystemFaultError(
                shown(file.url),
                "comes without its length, so that a cut would not be noticed",
                remedy="state its bytes or its digest in the recipe",
            )
        with callbacks.ended.breaking(response):
            callbacks.check()
            _store(response, part.path, file.bytes, callbacks)


def _must_continue(response: httpx2.Response, held: int, version: str | None) -> None:
    """Raise WrongContentError if the response has another offset or another version."""
    if not response.headers.get("Content-Range", "").startswith(f"bytes {held}-"):
        raise WrongContentError("continues at another place than it was asked for")
    tag = response.headers.get("ETag" if version and '"' in version else "Last-Modified")
    if version and tag and tag.removeprefix("W/") != version:
        raise WrongContentError("continues with another version than it began with")


def _store(
    response: httpx2.Response, path: Path, stated: int | None, callbacks: TransferCallbacks
) -> None:
    """Append the response to the file, up to the stated size in bytes."""
    try:
        with path.open("ab", buffering=0) as file:
            for block in response.iter_raw():
                callbacks.check()
                if stated is not None and file.tell() + len(block) > stated:
                    raise WrongContentError("is longer than is stated")
                file.write(block)
                callbacks.fetched(len(block))
    except OSError as error:
        raise unwritable(path, error) from None


def unwritable(path: Path, error: OSError) -> SystemFaultError:
    """Return the error for a full disk, an exceeded quota or a read-only folder."""
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
