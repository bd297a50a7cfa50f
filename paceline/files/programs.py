"""Run short-lived programs with limits of output and time; none outlives this process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import IO, cast

from paceline.core.errors import SystemFaultError
from paceline.core.interrupts import deferred_interrupts
from paceline.core.secrets import redact

POLL_S = 0.2
MAX_AFTER_END_S = 10.0
"""Time in seconds that processes started by a command may still write output after the command has
ended."""
MAX_OUTPUT_BYTES = 1 << 24
"""Maximum size of a command's output, a hundred times the longest listing of a scheduler."""
BLOCK_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1
"""Constant of linux/prctl.h: the signal that this process gets when its parent dies."""
_LIBC = ctypes.CDLL(None)
"""The C library, loaded here because no library may be loaded between fork and exec."""


def run_program(
    command: Sequence[str],
    check: Callable[[], None] = lambda: None,
    text: str | None = None,
    env: Mapping[str, str] | None = None,
    *,
    folder: Path | None = None,
    limit_s: float = inf,
) -> subprocess.CompletedProcess[str]:
    """Run a command and return its exit code and output.

    The command and all processes that it started are killed if `check` raises. It does not outlive
    this process, because it would then write at the same time as its successor. Output of processes
    that it left behind is read for another `MAX_AFTER_END_S` seconds, and then they are killed.
    `env` is the whole environment. Messages on its standard error beyond the limit are dropped.

    Raises OSError if it cannot be started, subprocess.TimeoutExpired after `limit_s` seconds, and
    SystemFaultError if its output exceeds `MAX_OUTPUT_BYTES`.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with deferred_interrupts():  # an interrupt inside Popen would leave an unknown process
            processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL if text is None else subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=env,
                    cwd=folder,
                    start_new_session=True,
                    preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGKILL)
                    if sys.platform == "linux"
                    else None,
                )
            )
        return _communicate(processes[0], text, check, limit_s)
    except BaseException:  # an interrupt must not leave a process behind either
        for process in processes:
            _kill(process)
        raise
    finally:
        for process in processes:
            with process:  # closes its pipes, and waits
                pass


def _communicate(
    process: subprocess.Popen[bytes], text: str | None, check: Callable[[], None], limit_s: float
) -> subprocess.CompletedProcess[str]:
    words = cast(Sequence[str], process.args)
    begin_at = time.monotonic()
    ended_at: float | None = None
    remaining = memoryview((text or "").encode("utf-8", "surrogateescape"))
    output, errors = bytearray(), bytearray()
    with selectors.DefaultSelector() as pipes:
        for file, event, buffer in (
            (process.stdin, selectors.EVENT_WRITE, None),
            (process.stdout, selectors.EVENT_READ, output),
            (process.stderr, selectors.EVENT_READ, errors),
        ):
            if file:
                pipes.register(file, event, buffer)
        while pipes.get_map():
            for key, _ in pipes.select(POLL_S):
                if key.data is None:
                    remaining = _send(key.fd, remaining)
                    is_open = bool(remaining)
                else:
                    block = os.read(key.fd, BLOCK_BYTES)
                    key.data.extend(block[: MAX_OUTPUT_BYTES + 1 - len(key.data)])
                    is_open = bool(block)
                if not is_open:
                    pipes.unregister(key.fileobj)
                    cast(IO[bytes], key.fileobj).close()
            check()
            now = time.monotonic()
            if len(output) > MAX_OUTPUT_BYTES:
                raise SystemFaultError(words[0], f"prints more than {MAX_OUTPUT_BYTES:,} bytes")
            if now - begin_at > limit_s:
                raise subprocess.TimeoutExpired(words, limit_s)
            if process.poll() is not None:
                ended_at = ended_at or now
                if now - ended_at > MAX_AFTER_END_S:
                    _kill(process)  # processes it left behind keep its pipes open
    while process.poll() is None:  # it may close its pipes long before it ends
        check()
        if time.monotonic() - begin_at > limit_s:
            raise subprocess.TimeoutExpired(words, limit_s)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
    return subprocess.CompletedProcess(words, process.returncode, _text(output), _text(errors))


def _send(pipe: int, data: memoryview) -> memoryview:
    """Write a part of the data to a pipe; return the rest, none if nobody reads it."""
    try:
        return data[os.write(pipe, data[: select.PIPE_BUF]) :]
    except BrokenPipeError:
        return data[:0]


def _text(output: bytearray) -> str:
    text = output.decode("utf-8", "replace")
    return text.replace("\r\n", "\n").replace("\r", "\n")


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


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
