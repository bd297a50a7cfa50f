"""File lock that allows one stager per asset; the kernel releases it when its owner exits.

It works across hosts that share a folder if the file system's locks do: NFS, GPFS, and Lustre
mounted with `flock`. On a file system without locks, filelock falls back to a marker file.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

LOCK_FILE = "lock"
POLL_S = 0.2


@contextmanager
def asset_lock(folder: Path, waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of an asset's folder; call `waiting` with the owner while it is taken."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / LOCK_FILE
    # Mode 0o666 as for other files: the umask decides whether a group may lock a shared folder.
    lock = FileLock(file, mode=0o666)
    while True:
        try:
            lock.acquire(blocking=False)
            break
        except Timeout:
            waiting(_owner(file))
            time.sleep(POLL_S)
    try:
        # filelock writes the content of a marker file itself.
        if not isinstance(lock, SoftFileLock):
            file.write_text(f"process {os.getpid()} on {platform.node()}", encoding="utf-8")
        yield
    finally:
        lock.release()


def _owner(file: Path) -> str:
    try:
        return " ".join(file.read_text(encoding="utf-8").split()) or "another process"
    except (OSError, UnicodeDecodeError):
        return "another process"
