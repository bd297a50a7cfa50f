"""What the system says about its processor, and how its memory is managed."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
GROWTH_BYTES = 64 * 2**20
STATM = Path("/proc/self/statm")


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def resident_now() -> int | None:
    """Resident set of this process at this moment, in bytes; None where the system does not say."""
    try:
        pages = STATM.read_text(encoding="ascii").split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def keep_freed_memory() -> None:
    """Have glibc keep what is freed for the next tensor instead of returning it to the system.

    A CPU step frees and takes the same large tensors again and again. By default the kernel clears
    their pages anew each time, which costs 10-20 % of a small model's step and makes steps uneven.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)
        mallopt(M_TOP_PAD, GROWTH_BYTES)
