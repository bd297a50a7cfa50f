"""Download of one file from a URL: resumable, verified, and renamed only when complete."""

from __future__ import annotations

import errno
import hashlib
import os
import re
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
    StopSignal,
    TransientError,
    WrongContentError,
    open_url,
    retries_exhausted,
)
from paceline.staging.credentials import redact_url
from paceline.staging.verification import digests_of

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")
TRIES_OF_WRONG_CONTENT = 2
MAX_PAUSE_S = 30.0
TAG_SUFFIX = ".tag"
"""Suffix of the file with the version tag of a partial file in the same folder."""
_UNWRITABLE = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is exceeded",
    errno.EFBIG: "the file size limit is exceeded",
}


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
    add_present: Callable[[int], None]
    add_received: Callable[[int], None]
    stop: StopSignal
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
            f"{asset.kind} {redact_url(asset.source)}",
            f"lists a file {one_line(path)!r}, which {error}",
        ) from None


def fetch(
    file: RemoteFile, complete: Path, underway: Path, callbacks: TransferCallbacks
) -> StagedFile:
    """Fetch a file to `complete`/path; `underway` holds it while it is partial.

    Raises UserError and SystemFaultError as `open_url` does, and if no try succeeds.
    """
    callbacks.check()
    target = complete / file.path
    if target.is_file():
        try:
            staged_file = _verify(file, target, callbacks)
            callbacks.add_present(staged_file.bytes)
            return staged_file
        except WrongContentError:
            target.unlink()
    name = hashlib.sha256(file.path.encode()).hexdigest()[:24]
    part = _PartialFile(underway / name, underway / f"{name}{TAG_SUFFIX}")
    callbacks.add_present(part.bytes)
    staged_file = _fetch_with_retries(file, part, callbacks)
    callbacks.check()
    target.parent.mkdir(parents=True, exist_ok=True)
    part.path.replace(target)
    part.tag.unlink(missing_ok=True)
    return staged_file


def _fetch_with_retries(
    file: RemoteFile, part: _PartialFile, callbacks: TransferCallbacks
) -> StagedFile:
    """Retry until the file is complete, or the tries are used up."""
    tries_left, wrong_tries_left, pause_s = TRIES, TRIES_OF_WRONG_CONTENT, FIRST_WAIT_S
    while True:
        before = part.bytes
        try:
            return _try(file, part, callbacks)
        except WrongContentError as error:
            callbacks.check()
            part.discard(callbacks)
            wrong_tries_left -= 1
            if not wrong_tries_left:
                remedy = "the file is corrupt at its source, or the recipe is out of date"
                raise SystemFaultError(redact_url(file.url), str(error), remedy=remedy) from None
        except TransientError as error:
            has_progress = part.bytes > before
            tries_left, pause_s = (
                (TRIES, FIRST_WAIT_S) if has_progress else (tries_left - 1, pause_s * 2)
            )
            if not tries_left:
                raise retries_exhausted(redact_url(file.url), error) from None
            callbacks.stop.wait(error.wait_s or min(pause_s, MAX_PAUSE_S))
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
        callbacks.add_present(-self.bytes)
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
    staged_file = _verify(file, part.path, callbacks)
    with part.path.open("rb") as content:
        os.fsync(content.fileno())
    return staged_file


def _verify(file: RemoteFile, path: Path, callbacks: TransferCallbacks) -> StagedFile:
    """Return the file with its SHA-256; raises WrongContentError if size or digest differ."""
    size = path.stat().st_size
    if file.bytes is not None and size != file.bytes:
        raise WrongContentError(f"has {size:,} bytes, not the expected {file.bytes:,}")
    expected = {"sha256": file.sha256, "md5": file.md5, "git_sha1": file.git_sha1}
    names = ["sha256", *(name for name in ("md5", "git_sha1") if expected[name])]
    digests = digests_of(path, names, callbacks.check)
    for name, digest in digests.items():
        if expected[name] not in (None, digest):
            raise WrongContentError(f"does not match the expected checksum ({name})")
    return StagedFile(path=file.path, bytes=size, sha256=digests["sha256"])


def _receive(file: RemoteFile, part: _PartialFile, callbacks: TransferCallbacks) -> None:
    offset, version = part.bytes, part.version
    headers: dict[str, str] = {}
    # Resume only if the server can confirm the version, or a digest detects mixed versions.
    if offset and (version or file.has_digest):
        headers = {"Range": f"bytes={offset}-", **({"If-Range": version} if version else {})}
    with open_url(file.url, callbacks.gate, headers) as response:
        callbacks.check()
        if response.status_code == httpx2.codes.PARTIAL_CONTENT and headers:
            _check_resumed(response, offset, version, file.is_checkable)
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
                redact_url(file.url),
                "does not report its size, so truncation would go undetected",
                remedy="set bytes or digest in the recipe",
            )
        with callbacks.stop.closed_on_stop(response):
            callbacks.check()
            _store(response, part.path, file.bytes, callbacks)


def _check_resumed(
    response: httpx2.Response, offset: int, version: str | None, is_checkable: bool
) -> None:
    """Raise WrongContentError if the response is not the rest of this version of the file."""
    content_range = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if content_range is None or int(content_range[1]) != offset:
        raise WrongContentError("resumes at the wrong offset")
    # Without a known size or digest, nothing else would detect a missing end.
    if not is_checkable and content_range[3] != str(int(content_range[2]) + 1):
        raise WrongContentError("resumes with another part than the rest")
    tag = response.headers.get("ETag" if version and '"' in version else "Last-Modified")
    if version and tag and tag.removeprefix("W/") != version:
        raise WrongContentError("changed while it was downloaded")


def _store(
    response: httpx2.Response, path: Path, max_bytes: int | None, callbacks: TransferCallbacks
) -> None:
    """Append the response to the file, up to the stated size in bytes."""
    try:
        with path.open("ab", buffering=0) as file:
            for block in response.iter_raw():
                callbacks.check()
                if max_bytes is not None and file.tell() + len(block) > max_bytes:
                    raise WrongContentError("is longer than expected")
                file.write(block)
                callbacks.add_received(len(block))
    except OSError as error:
        raise unwritable(path, error) from None


def unwritable(path: Path, error: OSError) -> SystemFaultError:
    """Return the error for a full disk, an exceeded quota or a read-only folder."""
    folder = next(p for p in (path, *path.parents) if p.is_dir())
    status = os.statvfs(folder)
    why = _UNWRITABLE.get(error.errno or 0)
    return SystemFaultError(
        str(path.parent),
        f"{why} ({si(status.f_bavail * status.f_frsize, 'B')} free)"
        if why
        else f"is not writable: {error.strerror or error}",
        remedy="free some space, or choose another folder with --to; a rerun resumes",
    )
