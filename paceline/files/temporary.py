"""Temporary folders and half-written files, which the next process removes if theirs was killed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from paceline.core.interrupts import deferred_interrupts
from paceline.files.temporary_locks import PREFIX, lock, locked_folder, remove, remove_abandoned


@contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield a folder that exists until the block ends, hidden in `parent` if one is given."""
    place = parent or Path(tempfile.gettempdir())
    remove_abandoned(place)
    with contextlib.ExitStack() as stack:
        with deferred_interrupts():
            name, handle = locked_folder(str(place), f".{PREFIX}" if parent else PREFIX)
            folder = Path(name)
            stack.callback(_remove, folder)
            stack.callback(os.close, handle)
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
                lock(handle)
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


def _remove(folder: Path) -> None:
    with deferred_interrupts():
        remove(folder)
