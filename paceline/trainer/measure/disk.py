"""One process's file on a disk: blocks, samples and checkpoints of it, each with its seconds.

The file loses its name before anything is written, so that the kernel takes it back however the
process ends.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

BLOCK_BYTES = 4 * 2**20
"""Of what is written and read in a row."""
CHECKPOINT_BYTES = 64 * 2**20
"""Written through the page cache before one fsync."""
SMALL_BYTES = 4096
READ_AHEAD_BYTES = 128 * 2**10
"""Linux' default for disks."""
MAPPED_SHARE = 200
"""The page cache is emptied when at most one part in so many of the file may be in there."""
NEW_FILE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
"""The folder may be anybody's: what stands at the name already is never opened."""
ACCESS = mmap.PROT_READ | mmap.PROT_WRITE
LIBC = ctypes.CDLL(None)


class DiskFile:
    """A file of at most `size_bytes` and what can be done with it; each returns the bytes."""

    def __init__(
        self, path: Path, size_bytes: int, sample_bytes: int, seed: int, ahead_bytes: int | None
    ) -> None:
        """Raises OSError where the file cannot be made; the last is the disk's read-ahead."""
        self.path, self.sample_bytes = path, sample_bytes
        # A page fault may bring in so much around it.
        self.around = sample_bytes + (READ_AHEAD_BYTES if ahead_bytes is None else ahead_bytes)
        self.size = max(1, size_bytes // BLOCK_BYTES) * BLOCK_BYTES
        self.block = mmap.mmap(-1, BLOCK_BYTES)  # O_DIRECT takes whole pages alone
        self.block.write(os.urandom(BLOCK_BYTES))  # a file system may compress what is regular
        self.random = random.Random(seed)
        self.written = self.at = 0
        self.draws = 0
        self.view: mmap.mmap | None = None
        self.pages = self.cached = 0
        self.through_cache = os.open(path, os.O_RDWR | NEW_FILE, 0o600)
        try:
            direct = self._direct()
        finally:
            path.unlink()
        self.past_cache = None if direct is None else self._tried(direct)

    @property
    def handle(self) -> int:
        """What blocks go through: past the page cache where the file system allows it."""
        return self.through_cache if self.past_cache is None else self.past_cache

    def _direct(self) -> int | None:
        """The file opened past the page cache, None where the file system refuses that."""
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_DIRECT)
        except (AttributeError, OSError) as error:
            _raise_unless_refused(error)
            return None
        if not os.path.samestat(os.fstat(handle), os.fstat(self.through_cache)):
            os.close(handle)
            raise OSError(errno.EEXIST, "another file took its name")
        return handle

    def _tried(self, handle: int) -> int | None:
        """The handle if it takes a block: some file systems refuse no sooner."""
        try:
            self._put(handle, 0)
        except OSError as error:
            os.close(handle)
            _raise_unless_refused(error)
            return None
        return handle

    def prepare(self, operation: str) -> tuple[int, int] | None:
        """Take the file out of the page cache; (pages there nevertheless, pages) of it.

        None for what does not read, and where the kernel does not tell. Raises ValueError for
        samples that are larger than the file.
        """
        self.pages = self.cached = 0
        self._unmap()
        if operation == "sample":
            self._hold_a_sample()
        self.at = 0
        if operation not in ("read", "sample"):
            return None
        self._map()
        assert self.view is not None
        return resident(self.view, 0, self.written)

    def _hold_a_sample(self) -> None:
        """Write on where the time of the writes was too short for one sample."""
        if self.sample_bytes > self.size:
            raise ValueError(f"a file of {self.size} bytes holds no sample of {self.sample_bytes}")
        self.at = self.written
        while self.written < self.sample_bytes:
            self.write()

    def write(self) -> int:
        """The next block, from the front again at the end."""
        self._put(self.handle, self._turn(self.size))
        if self.past_cache is None:
            os.fdatasync(self.handle)
        self.written = max(self.written, self.at)
        return BLOCK_BYTES

    def read(self) -> int:
        """The next block of what was written."""
        offset = self._turn(self.written)
        if offset == 0 and self.past_cache is None:
            self._drop()
        if os.preadv(self.handle, [self.block], offset) != BLOCK_BYTES:
            raise OSError(errno.EIO, "a block came short")
        return BLOCK_BYTES

    def checkpoint(self) -> int:
        """A file of up to CHECKPOINT_BYTES through the page cache, on the disk at the end."""
        size = min(CHECKPOINT_BYTES, self.size)
        os.ftruncate(self.through_cache, 0)
        for offset in range(0, size, BLOCK_BYTES):
            self._put(self.through_cache, offset)
        os.fsync(self.through_cache)
        self.written = size
        return size

    def small_file(self) -> int:
        """A file of SMALL_BYTES made, written, opened again, read and deleted."""
        handle = os.open(self.path, os.O_WRONLY | NEW_FILE, 0o600)
        try:
            with os.fdopen(handle, "wb", buffering=0) as file:
                file.write(self.block[:SMALL_BYTES])
            with os.fdopen(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                return len(file.read())
        finally:
            self.path.unlink()

    def choose_sample(self) -> None:
        """Decide which sample comes next, and count what of it is in the page cache already."""
        if self.draws == 0:
            self._map()
        assert self.view is not None
        self.draws -= 1
        self.at = self.sample_bytes * self.random.randrange(self.written // self.sample_bytes)
        cached = resident(self.view, self.at, self.sample_bytes)
        if cached is not None:
            self.cached, self.pages = self.cached + cached[0], self.pages + cached[1]

    def sample(self) -> int:
        """The chosen sample, as the trainer's loader reads it: a copy out of the mapped file."""
        assert self.view is not None
        return len(self.view[self.at : self.at + self.sample_bytes])

    def _map(self) -> None:
        self._unmap()
        self._drop()
        self.view = mmap.mmap(self.through_cache, self.written, mmap.MAP_PRIVATE, ACCESS)
        self.draws = max(1, self.written // self.around // MAPPED_SHARE)

    def _unmap(self) -> None:
        if self.view is not None:
            self.view.close()
            self.view = None

    def _drop(self) -> None:
        """Ask the kernel to forget the file; what is mapped or not yet written stays."""
        os.fsync(self.through_cache)
        with suppress(AttributeError):
            os.posix_fadvise(self.through_cache, 0, 0, os.POSIX_FADV_DONTNEED)

    def _put(self, handle: int, offset: int) -> None:
        if os.pwritev(handle, [self.block], offset) != BLOCK_BYTES:
            raise OSError(errno.ENOSPC, "a block was not taken whole")

    def _turn(self, end: int) -> int:
        """Where the next block begins."""
        offset = self.at if self.at + BLOCK_BYTES <= end else 0
        self.at = offset + BLOCK_BYTES
        return offset


def _raise_unless_refused(error: Exception) -> None:
    """Raises it again, unless it says that here nothing goes past the page cache."""
    if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
        raise error


def timed_units(file: DiskFile, operation: str, stop_s: float) -> list[tuple[int, float]]:
    """(bytes, seconds) of one `operation` after the other until `stop_s` of the monotonic clock."""
    work: dict[str, Callable[[], int]] = {
        "write": file.write,
        "read": file.read,
        "sample": file.sample,
        "checkpoint": file.checkpoint,
        "small_file": file.small_file,
    }
    units: list[tuple[int, float]] = []
    while not units or time.monotonic() < stop_s:
        if operation == "sample":
            file.choose_sample()
        start = time.perf_counter()
        amount = work[operation]()
        units.append((amount, time.perf_counter() - start))
    return units


def resident(view: mmap.mmap, offset: int, length: int) -> tuple[int, int] | None:
    """(pages in the page cache, pages) of a part of a mapped file; None where nobody tells."""
    first = offset // mmap.PAGESIZE * mmap.PAGESIZE
    pages = -(-(offset + length - first) // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * pages)()
    address = ctypes.addressof(ctypes.c_char.from_buffer(view)) + first
    try:
        failed = LIBC.mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(pages * mmap.PAGESIZE), flags
        )
    except AttributeError:
        return None
    return None if failed else (sum(flag & 1 for flag in flags), pages)


def read_ahead_bytes(folder: Path) -> int | None:
    """What the kernel reads ahead of what is asked for where a folder lies; None where untold."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    block = Path("/sys/dev/block") / number
    for path in (
        Path("/sys/class/bdi") / number / "read_ahead_kb",
        block / "queue/read_ahead_kb",
        block / "../queue/read_ahead_kb",
    ):
        with suppress(OSError, ValueError):
            return 1024 * int(path.read_text())
    return None
