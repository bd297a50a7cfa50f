"""Time of a step and of the waits inside it, without synchronizing the device.

A mark is a point on the compute time line: the performance counter on a CPU, an event in the
compute stream on CUDA. Marks are read later, when the work before them is complete.
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


class BackgroundThread(threading.local):
    """A flag for each thread: `active` if its waits do not belong to the training."""

    active = False


background = BackgroundThread()


class Clock(Protocol):
    """Records marks and reads the time between them."""

    steps_behind: int
    """Delay in steps before a step is read, so that the device's queue never runs empty."""

    def mark(self) -> Any:
        """Return a mark of the current point of the compute time line."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two marks that have passed."""
        ...

    def wait(self, mark: Any) -> None:
        """Wait until the mark has passed."""
        ...

    def passed(self, mark: Any) -> bool:
        """Return whether all work before the mark is complete."""
        ...


class HostClock:
    """A clock whose marks are readings of the CPU's performance counter."""

    steps_behind = 0

    def mark(self) -> float:
        """Return the current time in seconds."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """Return the time between two marks."""
        return end - start

    def wait(self, mark: float) -> None:
        """Do nothing, because CPU work is synchronous."""

    def passed(self, mark: float) -> bool:
        """Return True, because CPU work is synchronous."""
        return True


class DeviceClock:
    """A clock whose marks are events in the compute stream of a CUDA device."""

    steps_behind = 3

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.current_stream(device)

    def mark(self) -> torch.cuda.Event:
        """Record and return an event after all work queued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the time between two events."""
        return start.elapsed_time(end) / 1e3

    def wait(self, mark: torch.cuda.Event) -> None:
        """Wait until the device has passed the event."""
        mark.synchronize()

    def passed(self, mark: torch.cuda.Event) -> bool:
        """Return whether the device has passed the event; False after a device failure."""
        try:
            return mark.query()
        except RuntimeError:
            return False


def clock_of(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


@dataclass(frozen=True)
class Lap:
    """Marks of one step: its start, its end and the waits inside."""

    start: Any
    end: Any
    waits: tuple[tuple[Any, Any], ...]
    spans: tuple[tuple[str, Any, Any], ...] = ()
    """Named parts of the step, which may contain waits."""


class StepClock:
    """Divides a rank's time into consecutive steps and collects the waits of each."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.step = 0
        """The current step; 0 before the first one."""
        self.steps_done = 0
        """Number of steps that have been read and are therefore complete on the device."""
        self._step_start: Any = None
        self._wait_start: Any = None
        self._waits: list[tuple[Any, Any]] = []
        self._span_starts: dict[str, Any] = {}
        self._spans: list[tuple[str, Any, Any]] = []
        self._pending_laps: deque[Lap] = deque(maxlen=clock.steps_behind + 1)

    def start(self, step: int = 1) -> None:
        """Start the clock with the given step."""
        self._waits.clear()
        self._spans.clear()
        self._step_start = self.clock.mark()
        self.step = step

    def begin_wait(self) -> None:
        """Start a wait for other ranks; no effect inside another wait."""
        if self._wait_start is None:
            self._wait_start = self.clock.mark()

    def end_wait(self) -> None:
        """End the wait, if there is one."""
        if self._wait_start is not None:
            self._waits.append((self._wait_start, self.clock.mark()))
            self._wait_start = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as a wait for other ranks."""
        if self._wait_start is not None:
            yield
            return
        self.begin_wait()
        try:
            yield
        finally:
            self.end_wait()

    def begin_span(self, name: str) -> None:
        """Start a named part of the step."""
        self._span_starts[name] = self.clock.mark()

    def end_span(self, name: str) -> None:
        """End a named part of the step, if it was started."""
        if (start := self._span_starts.pop(name, None)) is not None:
            self._spans.append((name, start, self.clock.mark()))

    def lap(self) -> Lap:
        """End the step, start the next one, and return the step's marks."""
        now = self.clock.mark()
        lap = Lap(self._step_start, now, tuple(self._waits), tuple(self._spans))
        self._step_start = now
        self._waits.clear()
        self._spans.clear()
        self._pending_laps.append(lap)
        self.step += 1
        return lap

    def is_waiting(self) -> bool:
        """Return whether this rank currently waits for others; other threads may call it.

        On CUDA this refers to the device, not to the program that runs ahead of it. The device
        waits if it has passed the start of the latest wait that it has reached, but not its end.
        """
        passed, wait_start = self.clock.passed, self._wait_start
        if wait_start is not None and passed(wait_start):
            return True
        waits = [wait for lap in (*self._pending_laps,) for wait in lap.waits] + self._waits
        latest = next((wait for wait in reversed(waits) if passed(wait[0])), None)
        return latest is not None and not passed(latest[1])

    def read(self, lap: Lap) -> tuple[float, float]:
        """Return (step time, time spent waiting for other ranks) in seconds."""
        self.clock.wait(lap.end)
        self.steps_done += 1
        waits = sum((self.clock.seconds(start, end) for start, end in lap.waits), start=0.0)
        return self.clock.seconds(lap.start, lap.end), waits

    def span_seconds(self, lap: Lap) -> dict[str, float]:
        """Return the seconds of each named part of a step that has been read."""
        seconds: dict[str, float] = {}
        for name, start, end in lap.spans:
            seconds[name] = seconds.get(name, 0.0) + self.clock.seconds(start, end)
        return seconds


def watch_waits(steps: StepClock) -> Callable[[], None]:
    """Measure all waits for collectives in PyTorch's Python code; return a function that undoes it.

    FSDP and ZeRO 1 wait in `Work.wait` on a CPU. On CUDA that call only queues a wait, and FSDP
    queues its own with `Stream.wait_event`; both count when the compute stream waits. DDP waits in
    C++ and is measured in its communication hook.
    """
    stream = steps.clock.stream if isinstance(steps.clock, DeviceClock) else None
    work_wait = dist.Work.wait
    wait_event = torch.cuda.Stream.wait_event

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        if background.active or (stream is not None and torch.cuda.current_stream() != stream):
            return work_wait(self, *args, **kwargs)
        with steps.waiting():
            return work_wait(self, *args, **kwargs)

    def wait_for(self: Any, event: Any) -> None:
        if background.active or self != stream:
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
