"""Test file of one process on a disk: timed blocks, samples and checkpoints.

The file is unlinked before anything is written, so that the kernel frees it however the process
ends.
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
"""Size of one read or write."""
CHECKPOINT_BYTES = 64 * 2**20
"""Bytes written through the page cache before one fsync."""
SMALL_BYTES = 4096
READ_AHEAD_BYTES = 128 * 2**10
"""Linux's default read-ahead of disks."""
MAPPED_SHARE = 200
"""Inverse of the largest fraction of the file that may be in the page cache."""
NEW_FILE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
"""Flags for a new file; the folder may be shared, so an existing file is never opened."""
ACCESS = mmap.PROT_READ | mmap.PROT_WRITE
LIBC = ctypes.CDLL(None)


class DiskFile:
    """File of at most `size_bytes` and its operations, each of which returns its bytes."""

    def __init__(
        self, path: Path, size_bytes: int, sample_bytes: int, seed: int, ahead_bytes: int | None
    ) -> None:
        """Create the file; raises OSError if that fails. `ahead_bytes` is the disk's read-ahead."""
        self.path, self.sample_bytes = path, sample_bytes
        # A page fault may read this many bytes around it.
        self.bytes_per_fault = sample_bytes + (
            READ_AHEAD_BYTES if ahead_bytes is None else ahead_bytes
        )
        self.size = max(1, size_bytes // BLOCK_BYTES) * BLOCK_BYTES
        self.block = mmap.mmap(-1, BLOCK_BYTES)  # O_DIRECT requires whole pages
        self.block.write(os.urandom(BLOCK_BYTES))  # a file system may compress regular data
        self.random = random.Random(seed)
        self.written = self.at = 0
        self.draws = 0
        self.view: mmap.mmap | None = None
        self.pages = self.cached = 0
        self.cached_fd = os.open(path, os.O_RDWR | NEW_FILE, 0o600)
        try:
            direct = self._direct()
        finally:
            path.unlink()
        self.direct_fd = None if direct is None else self._verify_direct(direct)

    @property
    def block_fd(self) -> int:
        """File descriptor for blocks: past the page cache if the file system allows it."""
        return self.cached_fd if self.direct_fd is None else self.direct_fd

    def _direct(self) -> int | None:
        """Open the file past the page cache; return None if the file system refuses."""
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_DIRECT)
        except (AttributeError, OSError) as error:
            _raise_unless_refused(error)
            return None
        if not os.path.samestat(os.fstat(handle), os.fstat(self.cached_fd)):
            os.close(handle)
            raise OSError(errno.EEXIST, "another file has replaced it")
        return handle

    def _verify_direct(self, handle: int) -> int | None:
        """Return the handle if it can write a block; some file systems refuse only then."""
        try:
            self._write_block(handle, 0)
        except OSError as error:
            os.close(handle)
            _raise_unless_refused(error)
            return None
        return handle

    def prepare(self, operation: str) -> tuple[int, int] | None:
        """Drop the file from the page cache; return (pages still cached, pages).

        Returns None for operations that do not read, and where the kernel does not report it.
        Raises ValueError for samples larger than the file.
        """
        self.pages = self.cached = 0
        self._unmap()
        if operation == "sample":
            self._extend_to_one_sample()
        self.at = 0
        if operation not in ("read", "sample"):
            return None
        self._map()
        assert self.view is not None
        return resident(self.view, 0, self.written)

    def _extend_to_one_sample(self) -> None:
        """Write further blocks if the timed writes were shorter than one sample."""
        if self.sample_bytes > self.size:
            raise ValueError(
                f"a file of {self.size} bytes is smaller than a sample of {self.sample_bytes}"
            )
        self.at = self.written
        while self.written < self.sample_bytes:
            self.write()

    def write(self) -> int:
        """Write the next block, starting over at the end of the file."""
        self._write_block(self.block_fd, self._next_offset(self.size))
        if self.direct_fd is None:
            os.fdatasync(self.block_fd)
        self.written = max(self.written, self.at)
        return BLOCK_BYTES

    def read(self) -> int:
        """Read the next block of the written part."""
        offset = self._next_offset(self.written)
        if offset == 0 and self.direct_fd is None:
            self._drop()
        if os.preadv(self.block_fd, [self.block], offset) != BLOCK_BYTES:
            raise OSError(errno.EIO, "short read of a block")
        return BLOCK_BYTES

    def checkpoint(self) -> int:
        """Write up to CHECKPOINT_BYTES through the page cache and flush them to the disk."""
        size = min(CHECKPOINT_BYTES, self.size)
        os.ftruncate(self.cached_fd, 0)
        for offset in range(0, size, BLOCK_BYTES):
            self._write_block(self.cached_fd, offset)
        os.fsync(self.cached_fd)
        self.written = size
        return size

    def small_file(self) -> int:
        """Create, write, reopen, read and delete a file of SMALL_BYTES."""
        handle = os.open(self.path, os.O_WRONLY | NEW_FILE, 0o600)
        try:
            with os.fdopen(handle, "wb", buffering=0) as file:
                file.write(self.block[:SMALL_BYTES])
            with os.fdopen(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                return len(file.read())
        finally:
            self.path.unlink()

    def choose_sample(self) -> None:
        """Choose the next sample, and count its pages in the page cache."""
        if self.draws == 0:
            self._map()
        assert self.view is not None
        self.draws -= 1
        self.at = self.sample_bytes * self.random.randrange(self.written // self.sample_bytes)
        cached = resident(self.view, self.at, self.sample_bytes)
        if cached is not None:
            self.cached, self.pages = self.cached + cached[0], self.pages + cached[1]

    def sample(self) -> int:
        """Read the chosen sample like the trainer's loader: copy it from the mapped file."""
        assert self.view is not None
        return len(self.view[self.at : self.at + self.sample_bytes])

    def _map(self) -> None:
        self._unmap()
        self._drop()
        self.view = mmap.mmap(self.cached_fd, self.written, mmap.MAP_PRIVATE, ACCESS)
        self.draws = max(1, self.written // self.bytes_per_fault // MAPPED_SHARE)

    def _unmap(self) -> None:
        if self.view is not None:
            self.view.close()
            self.view = None

    def _drop(self) -> None:
        """Ask the kernel to drop the file's pages; mapped or unwritten ones stay."""
        os.fsync(self.cached_fd)
        with suppress(AttributeError):
            os.posix_fadvise(self.cached_fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _write_block(self, handle: int, offset: int) -> None:
        if os.pwritev(handle, [self.block], offset) != BLOCK_BYTES:
            raise OSError(errno.ENOSPC, "short write of a block")

    def _next_offset(self, end: int) -> int:
        """Return the offset of the next block."""
        offset = self.at if self.at + BLOCK_BYTES <= end else 0
        self.at = offset + BLOCK_BYTES
        return offset


def _raise_unless_refused(error: Exception) -> None:
    """Raise the error again, unless it says that O_DIRECT is not supported."""
    if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
        raise error


def timed_units(file: DiskFile, operation: str, stop_s: float) -> list[tuple[int, float]]:
    """Return (bytes, seconds) of each `operation`, repeated until the monotonic time `stop_s`."""
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
    """Return (cached pages, pages) of a part of a mapped file; None where it is unknown."""
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
    """Return the kernel's read-ahead for a folder's disk in bytes; None where it is unknown."""
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
