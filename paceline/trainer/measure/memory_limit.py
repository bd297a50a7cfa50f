"""A limit on the memory that a rank may allocate on a CPU, so that running out is a result."""

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
    """Allow this process `limit_bytes` of memory beyond what it has taken; None allows all.

    The kernel counts private writable memory (RLIMIT_DATA), whether it was touched or not: heap,
    tensors, and the stacks of threads. Raises ConfigError where there is no such limit.
    """
    if limit_bytes is None:
        return
    if device != "cpu" or not sys.platform.startswith("linux"):
        raise ConfigError(
            f"memory_limit_bytes {limit_bytes:g}: only a CPU under Linux has such a limit, "
            f"not {device} on {sys.platform}; leave it out"
        )
    # The heap grows in exact steps from now on; a large reserve would be refused before the limit.
    ctypes.CDLL(None).mallopt(M_TOP_PAD, SMALL_GROWTH_BYTES)
    most = data_bytes() + int(limit_bytes)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard not in UNLIMITED:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def is_limited() -> bool:
    """Whether this process's data may not grow without bound."""
    limited, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return limited not in UNLIMITED


def data_bytes() -> int:
    """Private writable memory of this process, as RLIMIT_DATA counts it."""
    match = re.search(r"^VmData:\s*(\d+) kB$", STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise ConfigError(f"memory_limit_bytes: {STATUS} does not say what memory is in use")
    return int(match[1]) * 1024
