"""What the system says about its processor, and what it is asked to do for this process."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
GROWTH_BYTES = 64 * 2**20
PR_SET_PDEATHSIG = 1
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


def placement() -> dict[str, Any]:
    """The cores that this rank may use, and what bound it to them (null where nothing did)."""
    binding = os.environ.get("PACELINE_BOUND")
    nodes = Path("/sys/devices/system/node").glob("node[0-9]*")
    return {
        "cores": core_text(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "numa_nodes": len(list(nodes)) or None,
        "bound": json.loads(binding) if binding else None,
    }


def core_text(numbers: Iterable[int]) -> str:
    """A list of numbers as `0-3,8`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


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


def die_with_parent(parent: int) -> None:
    """Have Linux kill this process when its launcher dies; torchrun's workers would outlive it."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
