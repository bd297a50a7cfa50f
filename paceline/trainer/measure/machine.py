"""Processor facts from the system, and process settings.

If a rank shares its core, or its control group has used up its quota, only one sign shows it: the
step is long and its processor time is not.
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
GROWTH_BYTES = 64 * 2**20
PR_SET_PDEATHSIG = 1
STATM = Path("/proc/self/statm")


def cpu_name() -> str:
    """Return the processor's name as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or of the processor for the device `cpu`."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def resident_now() -> int | None:
    """Return this process's resident memory in bytes; None where the system does not report it."""
    try:
        pages = STATM.read_text(encoding="ascii").split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def placement() -> dict[str, Any]:
    """Return the cores that this rank may use, and what bound it to them (None if nothing did)."""
    binding = os.environ.get("PACELINE_BOUND")
    nodes = Path("/sys/devices/system/node").glob("node[0-9]*")
    return {
        "cores": core_text(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "numa_nodes": len(list(nodes)) or None,
        "bound": json.loads(binding) if binding else None,
    }


def core_text(numbers: Iterable[int]) -> str:
    """Return a list of numbers as text, such as `0-3,8`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next tensor instead of returning it to the system.

    A CPU step repeatedly frees and allocates the same large tensors. By default the kernel clears
    their pages each time, which costs 10-20% of a small model's step and makes step times uneven.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)
        mallopt(M_TOP_PAD, GROWTH_BYTES)


def die_with_parent(parent: int) -> None:
    """Make Linux kill this process when its launcher dies; torchrun's ranks would outlive it."""
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
"""Units of control groups per second: microseconds in version 2, nanoseconds in version 1."""


class CoreUse:
    """Processor time of the process and waits of the training thread, between two readings.

    Create it in the training thread.
    """

    def __init__(self) -> None:
        self._schedstat = _open(SCHEDSTAT)
        self._quotas = [file for path in _quota_files() if (file := _open(path)) is not None]
        self._last = self._totals()

    def lap(self) -> dict[str, float]:
        """Return seconds since the last reading, without those that the system does not report.

        `user_s` and `system_s` are processor time over all threads. `waited_s` is the time in which
        the thread was runnable and had no core. `throttled_s` is the time in which the process's
        control groups had used up their quota, summed over cores.
        """
        now = self._totals()
        past, self._last = self._last, now
        return {name: max(0.0, now[name] - past[name]) for name in now if name in past}

    def _totals(self) -> dict[str, float]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        totals = {"user_s": usage.ru_utime, "system_s": usage.ru_stime}
        # The kernel's files vanish with the group, and are empty if it counts nothing.
        with suppress(OSError, IndexError, ValueError):
            if self._schedstat is not None:
                totals["waited_s"] = int(os.pread(self._schedstat, 128, 0).split()[1]) / 1e9
        with suppress(OSError):
            counts = [_THROTTLED.search(os.pread(file, 4096, 0)) for file in self._quotas]
            if counts:
                totals["throttled_s"] = sum(int(c[2]) / _PER_SECOND[c[1]] for c in counts if c)
        return totals


def _quota_files() -> Iterator[Path]:
    """Yield `cpu.stat` of this process's control group and of all its parent groups."""
    for line in (_text(MEMBERSHIP) or "").splitlines():
        _, kinds, inside = line.split(":", 2)
        if kinds and "cpu" not in kinds.split(","):
            continue
        # Not resolved: a path may begin with `..` if the process is outside its root.
        parts = [part for part in inside.split("/") if part not in ("", "..")]
        root = GROUPS / kinds if kinds else GROUPS
        yield from (root.joinpath(*parts[:n], "cpu.stat") for n in range(len(parts), -1, -1))


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None
