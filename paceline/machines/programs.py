"""Programs of others that do one thing and end: no secrets in their arguments, none left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from paceline.core.interrupts import deferred_interrupts
from paceline.core.secrets import redact

LOOK_S = 0.2
MAX_AFTER_END_S = 10.0
"""How long what a command has started may still say something after the command has ended."""
_PR_SET_PDEATHSIG = 1
"""Of linux/prctl.h: the signal that this process gets when its parent dies."""
_LIBC = ctypes.CDLL(None)
"""Loaded here: between fork and exec nothing may be."""


def run_program(
    command: Sequence[str],
    check: Callable[[], None],
    text: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """A command's end and what it said; it and all that it started are killed if `check` raises.

    It does not outlive this process, which would write beside the one that comes after it. What it
    has started and left is heard for another `MAX_AFTER_END_S`, and then killed.
    """
    started: list[subprocess.Popen[str]] = []
    try:
        with _held():  # an interrupt inside of Popen would leave a process that nobody knows
            started.append(
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
        return _ended(started[0], text, check)
    except BaseException:  # an interrupt too must leave no process behind
        for process in started:
            _kill(process)
        raise
    finally:
        for process in started:
            with process:  # closes its pipes, and waits
                pass


def _ended(
    process: subprocess.Popen[str], text: str | None, check: Callable[[], None]
) -> subprocess.CompletedProcess[str]:
    ended_at: float | None = None
    while True:
        try:
            output, errors = process.communicate(text, timeout=LOOK_S)
            return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
        except subprocess.TimeoutExpired:
            text = None
            check()
        if process.poll() is not None:
            ended_at = ended_at or time.monotonic()
            if time.monotonic() - ended_at > MAX_AFTER_END_S:
                _kill(process)  # the group of what it has left, which holds its pipes


def _held() -> AbstractContextManager[None]:
    """Interrupts come to the main thread alone."""
    return (
        deferred_interrupts()
        if threading.current_thread() is threading.main_thread()
        else nullcontext()
    )


def die_with_parent(parent: int, number: int) -> None:
    """In a child before its exec: have the kernel send it a signal when `parent` dies."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the kernel was asked
        os.kill(os.getpid(), number)


def last_line(text: str) -> str:
    """The first line that says what is wrong, else the last one, without secrets."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    wrong = [line for line in lines if line.lower().startswith(("fatal", "error"))]
    return redact((wrong or lines[-1:] or ["it says nothing"])[0], os.environ)


def _kill(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
