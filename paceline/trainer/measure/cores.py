"""What the system gave this process of its cores, step by step.

A rank that shares its core, or whose group has spent its quota, computes no slower by any other
sign: its step is long and its processor time is not.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

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
