"""Programs that the bed starts, and processes that it may end: known by pid and start time."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import wait_until

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
EXITING = 0x4
"""The kernel's PF_EXITING among the flags of a process."""


class BedError(RuntimeError):
    """The bed could not do what was asked; the text says what and why."""


@dataclass(frozen=True)
class Process:
    """A process, told from a later one with the same pid by when it started."""

    pid: int
    start: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The living process with this pid, None where there is none."""
        fields = _status(pid)
        return cls(pid, fields[19]) if fields and fields[0] not in "ZX" else None

    @property
    def alive(self) -> bool:
        """True until it has ended; a zombie has."""
        return Process.of(self.pid) == self

    @property
    def ending(self) -> bool:
        """True when it has died but waits for others, as a pid namespace's first one does."""
        fields = _status(self.pid)
        return bool(fields) and bool(int(fields[6]) & EXITING)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends it a signal, and never to another process that got its pid."""
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid)
            try:
                if self.alive:
                    signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)

    def wait(self, limit_s: float = 10.0) -> None:
        """Returns when it has ended."""
        wait_until(lambda: not self.alive, f"the end of process {self.pid}", limit_s)

    @property
    def children(self) -> list[int]:
        """Pids of the processes that its main thread started."""
        try:
            text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return []
        return [int(pid) for pid in text.split()]


def _status(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; none where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def call(argv: Sequence[str], text: str | None = None, env: Mapping[str, str] | None = None) -> str:
    """What a program printed; raises BedError with its complaint when it fails."""
    variables = {**os.environ, "PATH": SEARCH_PATH, **(env or {})}
    done = subprocess.run(
        argv, input=text or "", text=True, capture_output=True, env=variables, check=False
    )
    if done.returncode:
        raise BedError(f"{' '.join(argv)}: code {done.returncode}: {done.stderr or done.stdout}")
    return done.stdout


def spawn(
    argv: Sequence[str], log: Path, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """A program in a session of its own, so that Ctrl-C does not reach it; it prints into `log`."""
    env = {**os.environ, "PATH": SEARCH_PATH}
    with log.open("ab") as out:
        return subprocess.Popen(
            argv, stdin=stdin, stdout=out, stderr=out, start_new_session=True, env=env
        )
