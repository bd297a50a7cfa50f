"""Short-lived external programs: no secrets in their arguments, and no processes left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from paceline.core.interrupts import deferred_interrupts
from paceline.core.secrets import redact

POLL_S = 0.2
MAX_AFTER_END_S = 10.0
"""Time in seconds that processes started by a command may still write output after the command has
ended."""
_PR_SET_PDEATHSIG = 1
"""Constant of linux/prctl.h: the signal that this process gets when its parent dies."""
_LIBC = ctypes.CDLL(None)
"""The C library, loaded here because no library may be loaded between fork and exec."""


def run_program(
    command: Sequence[str],
    check: Callable[[], None],
    text: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command and return its exit code and output.

    The command and all processes that it started are killed if `check` raises. It does not outlive
    this process, because it would then write at the same time as its successor. Output of processes
    that it left behind is read for another `MAX_AFTER_END_S` seconds, and then they are killed.
    """
    processes: list[subprocess.Popen[str]] = []
    try:
        with deferred_interrupts():  # an interrupt inside Popen would leave an unknown process
            processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    env={**os.environ, **(environment or {})},
                    start_new_session=True,
                    preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGKILL)
                    if sys.platform == "linux"
                    else None,
                )
            )
        return _communicate(processes[0], text, check)
    except BaseException:  # an interrupt must not leave a process behind either
        for process in processes:
            _kill(process)
        raise
    finally:
        for process in processes:
            with process:  # closes its pipes, and waits
                pass


def _communicate(
    process: subprocess.Popen[str], text: str | None, check: Callable[[], None]
) -> subprocess.CompletedProcess[str]:
    ended_at: float | None = None
    while True:
        try:
            output, errors = process.communicate(text, timeout=POLL_S)
            return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
        except subprocess.TimeoutExpired:
            text = None
            check()
        if process.poll() is not None:
            ended_at = ended_at or time.monotonic()
            if time.monotonic() - ended_at > MAX_AFTER_END_S:
                _kill(process)  # processes it left behind keep its pipes open


def die_with_parent(parent: int, number: int) -> None:
    """Have the kernel send signal `number` to this process when `parent` dies.

    To be called in a child before its exec.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent died before prctl took effect
        os.kill(os.getpid(), number)


def last_line(text: str) -> str:
    """Return the line of a program's output that best explains its failure, without secrets.

    It is the first line that starts with `fatal` or `error`, else the last line.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("fatal", "error"))]
    return redact((errors or lines[-1:] or ["no output"])[0], os.environ)


def _kill(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
