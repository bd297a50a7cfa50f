"""What the system says about its processor, and what it is asked to do for this process.

A rank that shares its core, or whose group has spent its quota, computes no slower by any other
sign: its step is long and its processor time is not.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import resource
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
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


SCHEDSTAT = Path("/proc/thread-self/schedstat")
MEMBERSHIP = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
_THROTTLED = re.compile(rb"^throttled_(usec|time) (\d+)$", re.MULTILINE)
_PER_SECOND = {b"usec": 1e6, b"time": 1e9}
"""Version 2 of control groups counts in microseconds, version 1 in nanoseconds."""


class CoreUse:
    """Processor time of the whole process and waits of the thread that trains, between two looks.

    To be made in that thread.
    """

    def __init__(self) -> None:
        self._schedstat = _opened(SCHEDSTAT)
        self._quotas = [file for path in _quota_files() if (file := _opened(path)) is not None]
        self._last = self._totals()

    def lap(self) -> dict[str, float]:
        """Seconds since the last look, without what the system does not say.

        `user_s` and `system_s` of processor time over all threads; `waited_s` in which the thread
        could have run and had no core; `throttled_s` in which the process's control groups had
        spent their quota, added up over cores.
        """
        now = self._totals()
        past, self._last = self._last, now
        return {name: max(0.0, now[name] - past[name]) for name in now if name in past}

    def _totals(self) -> dict[str, float]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        totals = {"user_s": usage.ru_utime, "system_s": usage.ru_stime}
        # The kernel's files are gone with the group, and empty where it counts nothing.
        with suppress(OSError, IndexError, ValueError):
            if self._schedstat is not None:
                totals["waited_s"] = int(os.pread(self._schedstat, 128, 0).split()[1]) / 1e9
        with suppress(OSError):
            counts = [_THROTTLED.search(os.pread(file, 4096, 0)) for file in self._quotas]
            if counts:
                totals["throttled_s"] = sum(int(c[2]) / _PER_SECOND[c[1]] for c in counts if c)
        return totals


def _quota_files() -> Iterator[Path]:
    """`cpu.stat` of this process's control group and of every group around it."""
    for line in (_text(MEMBERSHIP) or "").splitlines():
        _, kinds, inside = line.split(":", 2)
        if kinds and "cpu" not in kinds.split(","):
            continue
        # Not resolved: a path may begin with `..` where the process lies outside its root.
        parts = [part for part in inside.split("/") if part not in ("", "..")]
        root = GROUPS / kinds if kinds else GROUPS
        yield from (root.joinpath(*parts[:n], "cpu.stat") for n in range(len(parts), -1, -1))


def _opened(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None
