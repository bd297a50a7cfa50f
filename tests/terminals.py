"""Commands in a terminal whose window is closed."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from tests.waiting import wait_until

IN_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def exit_code_in_closed_terminal(
    arguments: Sequence[str], environment: Mapping[str, str], condition: Callable[[], bool]
) -> int:
    """Start Python in a terminal, close it when the condition holds, and return the exit code."""
    master, terminal = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, *arguments],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=environment,
        )
        os.close(terminal)

        def holds() -> bool:
            while select.select([master], [], [], 0)[0]:
                os.read(master, 1 << 16)
            return condition()

        wait_until(holds, "the moment to close the terminal", limit_s=120)
    finally:
        os.close(master)
    try:
        return process.wait(60)
    finally:
        process.kill()
