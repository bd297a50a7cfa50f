"""Ctrl-C and SIGTERM: held while modules are loaded, and never lost.

An interrupt that arrives inside an import lock's or a destructor's callback is printed by Python
as ignored and gone, and the run goes on. Such a one is raised again a moment later.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

RETRY_S = 0.01
"""How long after an interrupt was lost it is raised again: outside of what had swallowed it."""

_holders = 0
_waiting = False


def install_handlers() -> None:
    """From now on SIGINT and SIGTERM raise KeyboardInterrupt, even when one is swallowed.

    Signals that the parent has this process ignore (`nohup`, a shell's background jobs) stay so.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    signal.signal(signal.SIGALRM, _interrupt)
    sys.unraisablehook = _unraisable


def ignore_interrupts() -> None:
    """What comes now changes nothing: the answer is given, and the interpreter is closing."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    # An interrupt that left an `exec` of text (every dataclass has one) makes CPython kill itself
    # by SIGINT when it closes, caught or not, until another such `exec` has ended.
    exec("")


@contextmanager
def deferred_interrupts() -> Generator[None]:
    """Interrupts wait until the block ends, which then raises KeyboardInterrupt."""
    global _holders, _waiting
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
    """Python's report of an exception that it had to swallow; an interrupt comes again instead."""
    if isinstance(event.exc_value, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, RETRY_S)
    else:
        sys.__unraisablehook__(event)
