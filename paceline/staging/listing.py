"""What a source says that an asset consists of, before anything is fetched."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TypeVar

from paceline.core.assets import Asset, plain_path
from paceline.core.errors import SystemFaultError
from paceline.core.text import one_line
from paceline.staging.connection import TransientError, given_up
from paceline.staging.credentials import shown
from paceline.staging.ending import StageEnd
from paceline.staging.transfer import FIRST_WAIT_S, TRIES, RemoteFile

T = TypeVar("T")


@dataclass(frozen=True)
class SourceListing:
    """The files of an asset, and the revision that they are of."""

    files: tuple[RemoteFile, ...]
    origin: str
    revision: str | None = None

    @property
    def bytes(self) -> int | None:
        """Bytes of all files; None while one is unknown."""
        sizes = [file.bytes for file in self.files]
        return None if None in sizes else sum(size or 0 for size in sizes)


def tried(ask: Callable[[], T], where: str, ended: StageEnd) -> T:
    """What `ask` answers, again where it may succeed a moment later; raises as it does.

    Raises StageEndedError when the end comes while it waits.
    """
    for number in range(1, TRIES + 1):
        try:
            return ask()
        except TransientError as error:
            if number == TRIES:
                raise given_up(shown(where), error) from None
            ended.wait(error.wait_s or FIRST_WAIT_S * 2 ** (number - 1))
            ended.check(shown(where))
    raise AssertionError("the last try returns or raises")


def is_included(path: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns is of this path; no pattern is of all."""
    patterns = tuple(patterns)
    return not patterns or any(fnmatch(path, pattern) for pattern in patterns)


def inner_path(path: str, asset: Asset) -> str:
    """A path that a source names; raises SystemFaultError for one that cannot be staged."""
    try:
        return plain_path(path)
    except ValueError as error:
        raise SystemFaultError(
            f"{asset.kind} {shown(asset.source)}",
            f"names a file {one_line(path)!r}, which {error}",
        ) from None
