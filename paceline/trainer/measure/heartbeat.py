"""Watchdog of a rank: after too long without progress it writes the stacks and ends the process.

The watchdog is a Python thread, so it needs the GIL. If C code never releases the GIL, a
faulthandler timer, which does not need it, writes the stacks (.timer) and ends the process. Stacks
are also written on crashes and on SIGTERM, which a launcher sends to the remaining ranks when one
has ended.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from paceline.trainer.measure.event_log import EventLog

MIN_START_LIMIT_S, START_LIMIT_PER_DOUBLING_S, BASE_RANKS = 120.0, 60.0, 8
"""Minimum limit before the second step: imports, joining, compiling. It grows with each doubling of
the ranks beyond BASE_RANKS, because all ranks read the same files and join through one of them."""
CHECKS_PER_LIMIT = 50
MAX_CHECK_INTERVAL_S = 5.0
SIGNS_PER_LIMIT = 4
"""Number of signs of life per limit; a sign updates the stack file's modification time."""


class StepProgress(Protocol):
    """The part of a step clock that the watchdog uses."""

    step: int
    """The current step, from 1; 0 before the first one."""

    steps_done: int
    """Number of completed steps; on CUDA the program runs ahead of the device."""

    def is_waiting(self) -> bool:
        """Return whether this rank only waits for others."""
        ...


class Heartbeat:
    """Ends the process after too long without a beat; one per rank."""

    def __init__(self, events: EventLog, stack_path: str) -> None:
        self.events, self.stack_path = events, stack_path
        self.steps: StepProgress | None = None
        self._doing: str | None = "at the start"
        self._waits = False
        self._beats = 0
        self._pauses = 0
        self._stopped = threading.Event()
        self._end_lock = threading.Lock()
        """Held by the writer of the end line; never released."""
        # A signal may write at the same time, so the timer has its own file.
        self.timer_path = str(Path(stack_path).with_suffix(".timer"))
        self._file, self._timer_file = (
            open(path, "ab", buffering=0)  # noqa: PTH123, SIM115
            for path in (stack_path, self.timer_path)
        )
        faulthandler.enable(self._file)
        faulthandler.register(signal.SIGTERM, self._file, all_threads=True, chain=True)

    def start(self, limit_s: float) -> None:
        """Start watching: end the process after `limit_s` seconds without a beat.

        Until the second step the limit is at least `start_limit_s` of the world size.
        """
        self.beat("at the start")
        thread = threading.Thread(target=self._watch, args=(limit_s,), name="heartbeat")
        thread.daemon = True
        thread.start()

    def beat(self, doing: str | None = None, waits: bool = False) -> None:
        """Record progress; `doing` is the next phase, `waits` if it waits for other ranks."""
        self._beats += 1
        if doing is not None:
            self._doing, self._waits = doing, waits

    def follow(self, steps: StepProgress, parts: Iterable[Any], stages: Iterable[Any] = ()) -> None:
        """Count a clock's steps and the start of every micro-batch as beats.

        A pipeline's `stages` also beat after every forward and backward pass, because all backward
        passes of a step may follow each other.
        """
        self.steps, self._doing, self._waits = steps, None, False
        for part in parts:
            part.register_forward_pre_hook(lambda *_: self.beat())
        for stage in stages:
            stage.on_progress = self.beat

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Suspend the limit, for example while a checkpoint is written."""
        self._pauses += 1
        faulthandler.cancel_dump_traceback_later()
        try:
            yield
        finally:
            self.beat()
            self._pauses -= 1

    def stop(self) -> bool:
        """Stop watching; return False if the watchdog is already ending the process."""
        if not self._end_lock.acquire(blocking=False):
            return False
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()
        return True

    def remove_empty_stack(self) -> None:
        """Disable stack dumps and delete empty stack files."""
        faulthandler.unregister(signal.SIGTERM)
        faulthandler.disable()
        for path in map(Path, (self.stack_path, self.timer_path)):
            with suppress(OSError):
                if path.stat().st_size == 0:
                    path.unlink()

    def _watch(self, limit_s: float) -> None:
        """Check periodically; a time in which the process was stopped counts as one interval."""
        pause_s = min(limit_s / CHECKS_PER_LIMIT, MAX_CHECK_INTERVAL_S)
        progress, silent_s, last_check = self._progress(), 0.0, time.monotonic()
        sign_at, first = last_check, 0
        start_s = start_limit_s(int(os.environ.get("WORLD_SIZE", "1")))
        while not self._stopped.wait(pause_s):
            now = time.monotonic()
            silent_s += min(now - last_check, 10 * pause_s)
            last_check = now
            if self._pauses or self._progress() != progress:
                progress, silent_s = self._progress(), 0.0
            step = self.steps.step if self.steps else 0
            first = first or step
            allowed_s = limit_s if step > first else max(limit_s, start_s)
            if silent_s >= allowed_s:
                self._give_up(allowed_s)
            if now >= sign_at:
                os.utime(self._file.fileno())
                sign_at = now + limit_s / SIGNS_PER_LIMIT
            self._set_timer(allowed_s)

    def _progress(self) -> tuple[int, ...]:
        steps = self.steps
        return (self._beats, steps.step, steps.steps_done) if steps else (self._beats,)

    def _set_timer(self, limit_s: float) -> None:
        """Restart the timer; ranks that wait for this one time out before it fires."""
        if self._pauses:
            faulthandler.cancel_dump_traceback_later()
            return
        after_s = limit_s + limit_s / SIGNS_PER_LIMIT
        # Out of memory, creating the timer's thread may fail.
        with suppress(RuntimeError):
            faulthandler.dump_traceback_later(after_s, exit=True, file=self._timer_file)
        # A pause or the end may have come before the timer existed.
        if self._pauses or self._stopped.is_set():
            faulthandler.cancel_dump_traceback_later()

    def _give_up(self, limit_s: float) -> None:
        """Write the stacks and the end line, wait for the other ranks, and end the process."""
        if not self._end_lock.acquire(blocking=False):
            return
        faulthandler.dump_traceback(self._file, all_threads=True)
        doing, waits = self._state()
        where = "waiting for other ranks" if waits else "not inside a collective"
        self.events.write(
            "end",
            status="failed",
            reason=f"no progress for {limit_s:g} s {doing}: {where}",
            cause="waiting" if waits else "no_progress",
            silent_s=limit_s,
            doing=doing,
            steps=self.events.steps_done,
            time_unix=time.time(),
        )
        time.sleep(grace_s(limit_s))
        os._exit(1)

    def _state(self) -> tuple[str, bool]:
        """Return the rank's current phase and whether it waits for others."""
        steps = self.steps
        waits = self._waits or (steps is not None and steps.is_waiting())
        step = steps.step if steps else 0
        return self._doing or (f"in step {step}" if step else "before the first step"), waits


def start_limit_s(ranks: int) -> float:
    """Return the minimum limit before the second step, e.g. 540 s for 1,024 ranks."""
    return MIN_START_LIMIT_S + START_LIMIT_PER_DOUBLING_S * max(0.0, math.log2(ranks / BASE_RANKS))


def grace_s(limit_s: float) -> float:
    """Return how long a failed rank waits for the others, whose last beat may be later."""
    return min(max(limit_s / 3, 0.5), 20.0)
