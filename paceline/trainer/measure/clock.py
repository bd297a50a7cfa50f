"""Time of a step and of the waits inside it, without stopping the device to look.

A mark is a moment on the device's own time line: the time of day on a CPU, an event in the compute
stream on CUDA. Marks are read later, when the work before them is done.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import distributed as dist


class _Aside(threading.local):
    here = False


aside = _Aside()
"""`aside.here` is True in a thread whose waits are not the training's."""


class Clock(Protocol):
    """Makes marks and reads the time between them."""

    steps_behind: int
    """How many steps later a step's figures are read, so that the device's queue never runs dry."""

    def mark(self) -> Any:
        """This moment on the compute time line."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Time between two settled marks."""
        ...

    def settle(self, mark: Any) -> None:
        """Return when everything before the mark has happened."""
        ...

    def passed(self, mark: Any) -> bool:
        """Whether everything before the mark has happened."""
        ...


class HostClock:
    """Marks are readings of the processor's clock."""

    steps_behind = 0

    def mark(self) -> float:
        """Now, in seconds."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """Time between two marks."""
        return end - start

    def settle(self, mark: float) -> None:
        """Nothing to wait for: a CPU works in the order it is told."""

    def passed(self, mark: float) -> bool:
        """Always true."""
        return True


class DeviceClock:
    """Marks are events in the compute stream of a CUDA device."""

    steps_behind = 3

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.current_stream(device)

    def mark(self) -> torch.cuda.Event:
        """An event behind all work queued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Time between two events."""
        return start.elapsed_time(end) / 1e3

    def settle(self, mark: torch.cuda.Event) -> None:
        """Wait until the device has passed the event."""
        mark.synchronize()

    def passed(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has passed the event; a device that has failed passes nothing more."""
        try:
            return mark.query()
        except RuntimeError:
            return False


@dataclass(frozen=True)
class Lap:
    """Marks of one step: its edges and the waits inside."""

    start: Any
    end: Any
    waits: tuple[tuple[Any, Any], ...]


class StepClock:
    """Cuts a rank's time into steps that leave no gap, and collects the waits of each."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.step = 0
        """The step at work, 0 before the first."""
        self.done = 0
        """How many steps have been read, which the device then has behind it."""
        self._edge: Any = None
        self._wait_start: Any = None
        self._waits: list[tuple[Any, Any]] = []
        self._unread: deque[Lap] = deque(maxlen=clock.steps_behind + 1)

    def start(self, step: int = 1) -> None:
        """The first step, whose number is `step`, begins now."""
        self._waits.clear()
        self._edge = self.clock.mark()
        self.step = step

    def begin_wait(self) -> None:
        """From now on the rank only waits for others; nothing inside another wait."""
        if self._wait_start is None:
            self._wait_start = self.clock.mark()

    def end_wait(self) -> None:
        """The rank goes on; nothing when it was not waiting."""
        if self._wait_start is not None:
            self._waits.append((self._wait_start, self.clock.mark()))
            self._wait_start = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What runs inside is a wait for other ranks."""
        if self._wait_start is not None:
            yield
            return
        self.begin_wait()
        try:
            yield
        finally:
            self.end_wait()

    def lap(self) -> Lap:
        """The step ends now and the next one begins."""
        now = self.clock.mark()
        lap = Lap(self._edge, now, tuple(self._waits))
        self._edge = now
        self._waits.clear()
        self._unread.append(lap)
        self.step += 1
        return lap

    def is_waiting(self) -> bool:
        """Whether this rank waits for others now; another thread may ask.

        On CUDA the device counts, not the program that runs ahead of it: it waits when it has
        passed the start of the newest wait that it has reached, and not its end.
        """
        passed, begun = self.clock.passed, self._wait_start
        if begun is not None and passed(begun):
            return True
        waits = [wait for lap in (*self._unread,) for wait in lap.waits] + self._waits
        reached = next((wait for wait in reversed(waits) if passed(wait[0])), None)
        return reached is not None and not passed(reached[1])

    def read(self, lap: Lap) -> tuple[float, float]:
        """(step time, time spent waiting for other ranks) in seconds."""
        self.clock.settle(lap.end)
        self.done += 1
        waits = sum((self.clock.seconds(start, end) for start, end in lap.waits), start=0.0)
        return self.clock.seconds(lap.start, lap.end), waits


def watch_waits(steps: StepClock) -> Callable[[], None]:
    """Count every wait that PyTorch's Python code does for a collective; returns the undo.

    FSDP and ZeRO 1 wait in `Work.wait` on a CPU. On CUDA that call only queues a
    wait, and FSDP queues its own with `Stream.wait_event`; both count when it is the compute stream
    that waits. DDP waits in C++ and is measured from its communication hook.
    """
    stream = steps.clock.stream if isinstance(steps.clock, DeviceClock) else None
    work_wait = dist.Work.wait
    wait_event = torch.cuda.Stream.wait_event

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        if aside.here or (stream is not None and torch.cuda.current_stream() != stream):
            return work_wait(self, *args, **kwargs)
        with steps.waiting():
            return work_wait(self, *args, **kwargs)

    def wait_for(self: Any, event: Any) -> None:
        if aside.here or self != stream:
            wait_event(self, event)
            return
        with steps.waiting():
            wait_event(self, event)

    def undo() -> None:
        dist.Work.wait = work_wait  # type: ignore[method-assign]
        torch.cuda.Stream.wait_event = wait_event  # type: ignore[method-assign]

    dist.Work.wait = wait  # type: ignore[method-assign]
    torch.cuda.Stream.wait_event = wait_for  # type: ignore[method-assign]
    return undo
