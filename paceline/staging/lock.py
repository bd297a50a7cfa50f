"""One stager per asset: a file lock, which the kernel releases when its owner ends in any way.

It holds between hosts that share a folder where the file system's locks do: NFS, Lustre mounted
with `flock`, GPFS. Where a file system has no locks, filelock falls back to a marker file.
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
    """Hold the lock of an asset's folder; `waiting` is called with the owner while another does."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / LOCK_FILE
    # As other files: the umask decides whether a group may take the lock of a shared folder.
    lock = FileLock(file, mode=0o666)
    while True:
        try:
            lock.acquire(blocking=False)
            break
        except Timeout:
            waiting(_owner(file))
            time.sleep(POLL_S)
    try:
        if not isinstance(lock, SoftFileLock):  # whose content is its own
            file.write_text(f"process {os.getpid()} on {platform.node()}", encoding="utf-8")
        yield
    finally:
        lock.release()


def _owner(file: Path) -> str:
    try:
        return " ".join(file.read_text(encoding="utf-8").split()) or "another process"
    except (OSError, UnicodeDecodeError):
        return "another process"
