"""Progress of staging: bytes and phase of every part, the rate and the remaining time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

RECENT_S = 10.0
"""Window over which the rate is averaged, in seconds."""


@dataclass(frozen=True)
class Part:
    """Progress of one asset; `total_bytes` is None while it is unknown."""

    name: str
    phase: str = "waiting"
    done_bytes: int = 0
    total_bytes: int | None = None


@dataclass(frozen=True)
class StageProgress:
    """Progress of all parts, and the total in bytes and bytes per second."""

    parts: tuple[Part, ...]
    bytes_per_s: float | None

    @property
    def done_bytes(self) -> int:
        """Bytes received or made so far."""
        return sum(part.done_bytes for part in self.parts)

    @property
    def total_bytes(self) -> int | None:
        """Bytes of all parts; None if the size of a part is unknown."""
        totals = [part.total_bytes for part in self.parts]
        return None if None in totals else sum(total or 0 for total in totals)

    @property
    def remaining_s(self) -> float | None:
        """Remaining time at the current rate in seconds; None if it is unknown."""
        if self.total_bytes is None or not self.bytes_per_s:
            return None
        return (self.total_bytes - self.done_bytes) / self.bytes_per_s


StageWatcher = Callable[[StageProgress], None]


@dataclass
class DownloadLog:
    """Progress log that all staging threads write to."""

    watch: StageWatcher = lambda progress: None
    _parts: dict[str, Part] = field(default_factory=dict[str, Part])
    _recent_bytes: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, total_bytes: int | None) -> None:
        """Add a part."""
        self._update(Part(name, total_bytes=total_bytes))

    def phase(self, name: str, phase: str) -> None:
        """Set the current phase of a part."""
        self._update(replace(self._parts[name], phase=phase))

    def total(self, name: str, total_bytes: int | None) -> None:
        """Set the total size of a part in bytes."""
        self._update(replace(self._parts[name], total_bytes=total_bytes))

    def add_present(self, name: str, num_bytes: int) -> None:
        """Add bytes that were already present; a negative number if they were discarded."""
        with self._lock:
            part = self._parts[name]
            self._parts[name] = replace(part, done_bytes=part.done_bytes + num_bytes)

    def add_received(self, name: str, num_bytes: int) -> None:
        """Add bytes that were just received, which count towards the rate."""
        with self._lock:
            part = self._parts[name]
            self._parts[name] = replace(part, done_bytes=part.done_bytes + num_bytes)
            now = time.monotonic()
            self._recent_bytes.append((now, num_bytes))
            while self._recent_bytes[0][0] < now - RECENT_S:
                self._recent_bytes.popleft()
        self.watch(self.progress)

    @contextmanager
    def conversion_progress(self, name: str) -> Iterator[Callable[[int, int], None]]:
        """Yield the progress callback (bytes done, total bytes) of a converter.

        Its byte counts are estimates, and are removed from the log at the end of the block.
        """
        last_bytes: list[int] = []

        def show(done_bytes: int, total_bytes: int) -> None:
            self.total(name, total_bytes)
            if last_bytes:
                self.add_received(name, done_bytes - last_bytes[-1])
            else:
                self.add_present(name, done_bytes)  # kept from an interrupted call
            last_bytes[:] = [done_bytes]

        yield show
        self.add_present(name, -sum(last_bytes))

    @property
    def progress(self) -> StageProgress:
        """Current progress."""
        with self._lock:
            parts, recent = tuple(self._parts.values()), list(self._recent_bytes)
        span_s = time.monotonic() - recent[0][0] if len(recent) > 1 else 0.0
        rate = sum(num_bytes for _, num_bytes in recent) / span_s if span_s > 0 else None
        return StageProgress(parts, rate)

    def _update(self, part: Part) -> None:
        with self._lock:
            self._parts[part.name] = part
        self.watch(self.progress)
