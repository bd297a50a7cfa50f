"""Ctrl-C, SIGTERM and SIGHUP: deferred while modules are imported, and never lost.

Python swallows an interrupt that arrives inside a callback of an import lock or a destructor: it
prints the exception as ignored and continues. Such an interrupt is raised again shortly after.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command: Ctrl-C, `kill`, and a closed terminal."""
RETRY_S = 0.01
"""Delay in seconds before a swallowed interrupt is raised again, outside the code that swallowed
it."""

_holders = 0
_waiting = False


def install_handlers() -> None:
    """Make SIGNALS raise KeyboardInterrupt, even if Python swallows the first one.

    Signals that the parent process set to be ignored (`nohup`, background jobs of a shell) stay
    ignored.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    signal.signal(signal.SIGALRM, _interrupt)
    sys.unraisablehook = _unraisable


def ignore_interrupts() -> None:
    """Ignore further interrupts, because the result is printed and the interpreter exits."""
    for number in (*SIGNALS, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    # An interrupt that leaves an `exec` of text (every dataclass runs one) makes CPython kill
    # itself with SIGINT at exit, even if the exception was caught. Another completed `exec` clears
    # that state.
    exec("")


@contextmanager
def deferred_interrupts() -> Generator[None]:
    """Defer interrupts until the block ends, then raise KeyboardInterrupt if there was one.

    Only the main thread is interrupted; the context does nothing in others.
    """
    global _holders, _waiting
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _holders += 1
    try:
        yield
    finally:
        _holders -= 1
    if _waiting and not _holders:
        _waiting = False
        raise KeyboardInterrupt


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    global _waiting
    if _holders:
        _waiting = True
        return
    raise KeyboardInterrupt


def _unraisable(event: Any) -> None:
    """Re-raise a swallowed interrupt with a timer; report other exceptions as Python does."""
    if isinstance(event.exc_value, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, RETRY_S)
    else:
        sys.__unraisablehook__(event)
