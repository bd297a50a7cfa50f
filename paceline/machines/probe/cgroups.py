"""What the control groups (version 2) around this process allow it, and what they count.

A group's limit also holds for all groups inside it, so the smallest one on the way up counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
VMSTAT = Path("/proc/vmstat")


def core_quota() -> float | None:
    """The smallest CPU quota in cores, None without one."""
    # `QUOTA PERIOD`, both in microseconds; the quota is `max` where there is none.
    quotas = [text.split() for text in _texts("cpu.max")]
    return min(
        (int(q[0]) / int(q[1]) for q in quotas if len(q) == 2 and q[0].isdigit()), default=None
    )


def memory_limit_bytes() -> int | None:
    """The smallest memory limit in bytes, None without one."""
    return min((int(text) for text in _texts("memory.max") if text.isdigit()), default=None)


def oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory (0 if unknown).

    Counted in the innermost group that says so, because elsewhere on the machine other people's
    processes die; without such a group, on the whole machine.
    """
    text = next(_texts("memory.events"), None) or _read(VMSTAT) or ""
    match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(match.group(1)) if match else 0


def _texts(name: str) -> Iterator[str]:
    """The file `name` of the own group and of every group around it, innermost first."""
    match = re.search(r"^0::/(.*)$", _read(MEMBERSHIP) or "", re.MULTILINE)
    inside = match.group(1) if match else ""
    # Not resolved: a path may start with `..` where the process lies outside its name space's root.
    parts = [part for part in inside.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        text = _read(ROOT.joinpath(*parts[:depth], name))
        if text is not None:
            yield text


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
