"""A watchdog in every rank: if nothing moves for too long, it writes the stacks and ends the rank.

The watchdog is a Python thread, so it needs Python's lock. Should C code never give that back, a
timer of faulthandler, which needs no lock, writes the stacks (.timer) and ends the rank. SIGTERM,
which a launcher sends to the ranks that are left when one has ended, and crashes leave the stacks
as well.
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

START_LIMIT_S, START_LIMIT_PER_DOUBLING_S, FEW_RANKS = 120.0, 60.0, 8
"""At least so long may anything before the second step take: imports, joining, compiling. Beyond a
few ranks it may take longer: all read the same files and meet at one of them."""
LOOKS_PER_LIMIT = 50
LONGEST_PAUSE_S = 5.0
"""At most between two looks."""
SIGNS_PER_LIMIT = 4
"""How often a watchdog shows that it is alive, by the time of its stack file."""


class StepProgress(Protocol):
    """What the watchdog asks the step clock."""

    step: int
    """The step at work, counted from 1; 0 before the first."""

    done: int
    """How many steps are known to be over; on CUDA the program runs ahead of the device."""

    def is_waiting(self) -> bool:
        """True while this rank only waits for others."""
        ...


class Heartbeat:
    """Ends the process when no beat comes for too long; one for each rank."""

    def __init__(self, events: EventLog, stack_path: str) -> None:
        self.events, self.stack_path = events, stack_path
        self.steps: StepProgress | None = None
        self._doing: str | None = "at the start"
        self._waits = False
        self._beats = 0
        self._paused = 0
        self._stopped = threading.Event()
        self._word = threading.Lock()
        """Held by whoever writes the end line; never given back."""
        # The timer writes while a signal may write too, so it has a file of its own.
        self.timer_path = str(Path(stack_path).with_suffix(".timer"))
        self._file, self._timer_file = (
            open(path, "ab", buffering=0)  # noqa: PTH123, SIM115
            for path in (stack_path, self.timer_path)
        )
        faulthandler.enable(self._file)
        faulthandler.register(signal.SIGTERM, self._file, all_threads=True, chain=True)

    def start(self, limit_s: float) -> None:
        """Watch from now on: without a beat for `limit_s` seconds this process ends.

        Until the second step it may take `start_limit_s` of the world's size.
        """
        self.beat("at the start")
        thread = threading.Thread(target=self._watch, args=(limit_s,), name="heartbeat")
        thread.daemon = True
        thread.start()

    def beat(self, doing: str | None = None, waits: bool = False) -> None:
        """The rank has made progress; `doing` says what comes next, `waits` whether for others."""
        self._beats += 1
        if doing is not None:
            self._doing, self._waits = doing, waits

    def follow(self, steps: StepProgress, parts: Iterable[Any], stages: Iterable[Any] = ()) -> None:
        """Take a clock's steps as beats, and the start of every micro-batch in a model's parts.

        A pipeline's `stages` beat after every forward and backward pass as well: all backward
        passes of a step may follow one another, without a forward pass between.
        """
        self.steps, self._doing, self._waits = steps, None, False
        for part in parts:
            part.register_forward_pre_hook(lambda *_: self.beat())
        for stage in stages:
            stage.on_progress = self.beat

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside may take any time, such as writing a checkpoint."""
        self._paused += 1
        faulthandler.cancel_dump_traceback_later()
        try:
            yield
        finally:
            self.beat()
            self._paused -= 1

    def stop(self) -> bool:
        """Watch no longer; False when the watchdog has had the last word and ends the process."""
        if not self._word.acquire(blocking=False):
            return False
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()
        return True

    def remove_empty_stack(self) -> None:
        """Delete the stack files if nothing was written; no stack is written from now on."""
        faulthandler.unregister(signal.SIGTERM)
        faulthandler.disable()
        for path in map(Path, (self.stack_path, self.timer_path)):
            with suppress(OSError):
                if path.stat().st_size == 0:
                    path.unlink()

    def _watch(self, limit_s: float) -> None:
        """Look now and then; time in which the process itself was stopped counts as one look."""
        pause_s = min(limit_s / LOOKS_PER_LIMIT, LONGEST_PAUSE_S)
        seen, silent_s, looked = self._progress(), 0.0, time.monotonic()
        sign_at, first = looked, 0
        start_s = start_limit_s(int(os.environ.get("WORLD_SIZE", "1")))
        while not self._stopped.wait(pause_s):
            now = time.monotonic()
            silent_s += min(now - looked, 10 * pause_s)
            looked = now
            if self._paused or self._progress() != seen:
                seen, silent_s = self._progress(), 0.0
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
        return (self._beats, steps.step, steps.done) if steps else (self._beats,)

    def _set_timer(self, limit_s: float) -> None:
        """Anew at each look: ranks that wait for this one give up before it rings, and say so."""
        if self._paused:
            faulthandler.cancel_dump_traceback_later()
            return
        after_s = limit_s + limit_s / SIGNS_PER_LIMIT
        # Out of memory there may be no new thread; the stacks of a held lock are lost then.
        with suppress(RuntimeError):
            faulthandler.dump_traceback_later(after_s, exit=True, file=self._timer_file)
        # A pause or the end may have come since it was asked for, and cancelled no timer yet.
        if self._paused or self._stopped.is_set():
            faulthandler.cancel_dump_traceback_later()

    def _give_up(self, limit_s: float) -> None:
        """Write the stacks and the end line, let the other ranks do so too, and end the process."""
        if not self._word.acquire(blocking=False):
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
        """What the rank is doing, and whether it waits for others."""
        steps = self.steps
        waits = self._waits or (steps is not None and steps.is_waiting())
        step = steps.step if steps else 0
        return self._doing or (f"in step {step}" if step else "before the first step"), waits


def start_limit_s(ranks: int) -> float:
    """How long so many ranks may take before their second step, at least: 540 s for 1,024."""
    return START_LIMIT_S + START_LIMIT_PER_DOUBLING_S * max(0.0, math.log2(ranks / FEW_RANKS))


def grace_s(limit_s: float) -> float:
    """How long a rank that gives up waits for the others, whose last beat may be later."""
    return min(max(limit_s / 3, 0.5), 20.0)
