"""Temporary folders and half-written files, which the next process removes if theirs was killed.

Each is locked by its process. The kernel releases the lock when the process dies, whatever ended
it, so an unlocked entry with the prefix belongs to nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import BinaryIO

from paceline.core.interrupts import deferred_interrupts

PREFIX = "paceline-tmp-"
"""Prefix of all names, after a dot in folders of the user."""
MIN_AGE_S = 1.0
"""Minimum age in seconds of an abandoned entry, because a new one is locked after its creation."""

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield a folder that exists until the block ends, hidden in `parent` if one is given."""
    place = parent or Path(tempfile.gettempdir())
    remove_abandoned(place)
    with contextlib.ExitStack() as stack:
        with deferred_interrupts():
            prefix = f".{PREFIX}" if parent else PREFIX
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
            stack.callback(_remove, folder)
            handle = os.open(folder, _FLAGS)
            stack.callback(os.close, handle)
            with contextlib.suppress(OSError):  # a file system without locks: it is never removed
                _lock(handle)
        yield folder


@contextmanager
def replaced_file(path: Path, *, is_new: bool = False) -> Iterator[BinaryIO]:
    """Yield a hidden file that takes the place of `path` if the block succeeds; raise OSError.

    A reader sees the old file or the new, never a part. If it must be new, raises FileExistsError
    for a file that exists in the end, also one that another process has written meanwhile.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path.parent)
    with contextlib.ExitStack() as stack:
        with deferred_interrupts():
            prefix = f".{PREFIX}{path.name[:100]}."
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=prefix)
            temporary = Path(name)
            stack.callback(temporary.unlink, missing_ok=True)
            file = stack.enter_context(os.fdopen(handle, "wb"))
            with contextlib.suppress(OSError):
                _lock(handle)
        yield file
        file.flush()
        os.fsync(file.fileno())
        temporary.chmod(0o644)
        if is_new:
            _link(temporary, path)
        else:
            temporary.replace(path)


def _link(temporary: Path, path: Path) -> None:
    """Give a file its name; raise FileExistsError if the name is taken."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        temporary.replace(path)


@cache
def remove_abandoned(place: Path) -> None:
    """Remove the temporary entries of killed processes in a folder, once per process."""
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if entry.name.removeprefix(".").startswith(PREFIX):
                with contextlib.suppress(OSError):
                    _remove_if_abandoned(Path(entry.path))


def _remove_if_abandoned(path: Path) -> None:
    """Remove an entry of this user that no process has locked; raise OSError."""
    status = path.lstat()
    if status.st_uid != os.getuid() or time.time() - status.st_mtime < MIN_AGE_S:
        return
    handle = os.open(path, _FLAGS)
    try:
        _lock(handle)
        _remove(path)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    with deferred_interrupts():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _lock(handle: int) -> None:
    """Lock an open file or folder; raise OSError if it is locked, or cannot be."""
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
