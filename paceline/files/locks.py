"""Locks between commands of one user, which the kernel releases however a command ends."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.core.errors import UserError
from paceline.files.home import cache_folder


@contextmanager
def exclusive(root: Path, what: str, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock on `what` in the folder of runs `root`.

    Waits for another command that holds it if `wait` is set, else raises UserError. Without a
    folder for the lock, nothing is locked.
    """
    key = hashlib.sha256(os.fsencode(f"{root.resolve()}\0{what}")).hexdigest()[:24]
    with contextlib.ExitStack() as stack:
        try:
            folder = cache_folder() / "locks"
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / key).open("ab"))
        except (OSError, RuntimeError):  # RuntimeError: the user has no home
            yield
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            what_holds = "is in use by another command"
            raise UserError(what, what_holds, remedy="wait until it has ended") from error
        except OSError:  # a file system without locks
            pass
        yield
