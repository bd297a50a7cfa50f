"""Limit of a rank's memory on a CPU, so that running out of memory is an orderly failure."""

from __future__ import annotations

import ctypes
import re
import resource
import sys
from pathlib import Path

from paceline.trainer.config import ConfigError
from paceline.trainer.measure.machine import M_TOP_PAD

SMALL_GROWTH_BYTES = 2**20
STATUS = Path("/proc/self/status")
UNLIMITED = (resource.RLIM_INFINITY, -1)


def limit_memory(limit_bytes: float | None, device: str) -> None:
    """Limit this process to `limit_bytes` beyond its current memory; None sets no limit.

    The kernel counts private writable memory (RLIMIT_DATA), touched or not: heap, tensors and
    thread stacks. Raise ConfigError where this limit does not exist.
    """
    if limit_bytes is None:
        return
    if device != "cpu" or not sys.platform.startswith("linux"):
        raise ConfigError(
            f"memory_limit_bytes {limit_bytes:g}: is only supported for CPUs on Linux, not for "
            f"{device} on {sys.platform}; remove it"
        )
    # Let the heap grow in small steps; a large reserve would fail before the limit is reached.
    ctypes.CDLL(None).mallopt(M_TOP_PAD, SMALL_GROWTH_BYTES)
    limit = data_bytes() + int(limit_bytes)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard not in UNLIMITED:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def is_limited() -> bool:
    """Return whether this process has a memory limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return soft not in UNLIMITED


def data_bytes() -> int:
    """Return this process's private writable memory in bytes, as RLIMIT_DATA counts it."""
    match = re.search(r"^VmData:\s*(\d+) kB$", STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise ConfigError(f"memory_limit_bytes: {STATUS} does not report the memory in use")
    return int(match[1]) * 1024
