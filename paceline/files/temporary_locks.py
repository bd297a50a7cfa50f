"""Locks on temporary entries, by which the next process finds those of killed processes.

Each entry is locked by its process. The kernel releases the lock when the process dies, whatever
ended it, so an unlocked entry with the prefix belongs to nobody. Only the standard library is used:
nodes without this package get the text of this module.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from functools import cache
from pathlib import Path

PREFIX = "paceline-tmp-"
"""Prefix of all names, after a dot in folders of the user."""
MIN_AGE_S = 1.0
"""Minimum age in seconds of an abandoned entry, because a new one is locked after its creation."""

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def locked_folder(place: str, prefix: str = PREFIX) -> tuple[str, int]:
    """Create a folder in `place`; return its path and the open handle that locks it."""
    folder = tempfile.mkdtemp(prefix=prefix, dir=place)
    handle = os.open(folder, _FLAGS)
    with contextlib.suppress(OSError):  # a file system without locks: it is never removed
        lock(handle)
    return folder, handle


@cache
def remove_abandoned(place: Path) -> None:
    """Remove the temporary entries of killed processes in a folder, once per process."""
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if entry.name.removeprefix(".").startswith(PREFIX):
                with contextlib.suppress(OSError):
                    _remove_if_abandoned(Path(entry.path))


def lock(handle: int) -> None:
    """Lock an open file or folder; raise OSError if it is locked, or cannot be."""
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove(path: Path) -> None:
    """Remove a file or a folder; raise OSError for a file that cannot be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _remove_if_abandoned(path: Path) -> None:
    """Remove an entry of this user that no process has locked; raise OSError."""
    status = path.lstat()
    if status.st_uid != os.getuid() or time.time() - status.st_mtime < MIN_AGE_S:
        return
    handle = os.open(path, _FLAGS)
    try:
        lock(handle)
        remove(path)
    finally:
        os.close(handle)
