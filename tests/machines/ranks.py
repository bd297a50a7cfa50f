"""Ranks that write their process ids into files, seen from outside."""

from __future__ import annotations

from pathlib import Path

import psutil

from paceline.machines import Handle
from tests.waiting import wait_until


def rank_pids(folder: Path, count: int = 2) -> list[int]:
    """Return the process ids that the ranks wrote to `pid-*`, once all have."""

    def pids() -> list[int]:
        texts = [path.read_text() for path in folder.glob("pid-*")]
        return [int(text) for text in texts] if len(texts) == count and all(texts) else []

    return wait_until(pids, "the ranks")


def wait_gone(pids: list[int]) -> None:
    """Wait until none of the processes runs any more."""
    wait_until(lambda: not any(map(is_running, pids)), f"the end of {pids}")


def is_running(pid: int) -> bool:
    """Return False for a process that has ended, zombies included."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def exit_code(run: Handle, limit_s: float = 120.0) -> int:
    """Wait for the end of a job; return its exit code."""
    codes: list[int] = []

    def ended() -> bool:
        code = run.poll()
        codes.extend([] if code is None else [code])
        return bool(codes)

    wait_until(ended, "the end of the job", limit_s)
    return codes[0]
