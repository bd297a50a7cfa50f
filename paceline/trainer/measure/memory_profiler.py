"""Memory curve of a rank over some steps, in a format that can be read without torch.

On a CPU the resident set is sampled every 2 ms. On CUDA the curve comes from the allocator's
history, which has each allocation. A snapshot for https://pytorch.org/memory_viz is stored next to
it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from paceline.trainer.config import ProfileConfig
from paceline.trainer.measure.machine import resident_now
from paceline.trainer.measure.profiler import FOLDER, PauseWatchdog, StepProfiler
from paceline.trainer.parallel.mesh import World

SAMPLE_S = 0.002
MAX_POINTS = 4000
"""Maximum points of a written curve, half of those kept; each is the maximum of its interval."""
MAX_ENTRIES = 1_000_000
"""Maximum entries of the allocator's history, which drops its first entries when it is full."""
LIVE = {"alloc": 1, "free_completed": -1}
"""Sign of an entry's size in the live bytes, by the entry's action."""
RESERVED = {"segment_alloc": 1, "segment_free": -1}
Point = tuple[float, int, int | None]
"""Unix time in seconds; bytes of live tensors, or resident ones; bytes reserved on a device."""


class MemoryProfiler(StepProfiler):
    """Profiler that writes the memory curve of the profiled steps when they are over."""

    def __init__(
        self, config: ProfileConfig, world: World, pause_watchdog: PauseWatchdog = nullcontext
    ) -> None:
        super().__init__(config, world, pause_watchdog)
        self._edges: list[tuple[int, float]] = []
        self._source: ResidentCurve | AllocatorCurve | None = None

    def before_step(self, step: int) -> None:
        """Start with the first step."""
        if step == self.config.first_step:
            on_cpu = self.world.device.type == "cpu"
            self._source = ResidentCurve() if on_cpu else AllocatorCurve(self.world.device)
        if self._source is not None:
            self._edges.append((step, time.time()))

    def close(self) -> None:
        """Stop, and write the points so far."""
        source, self._source = self._source, None
        if source is None:
            return
        target = Path(FOLDER) / f"rank-{self.world.rank}.memory.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        points = downsample(source.points(target.with_suffix(".pickle")), MAX_POINTS)
        record: dict[str, Any] = {
            "schema": 1,
            "rank": self.world.rank,
            "kind": source.kind,
            "steps": [step for step, _ in self._edges],
            "edges_s": [*(begin for _, begin in self._edges), time.time()],
            "time_s": [point[0] for point in points],
            "bytes": [point[1] for point in points],
            "reserved_bytes": [point[2] for point in points],
        }
        if source.note is not None:
            record["note"] = source.note
        part = target.with_suffix(".part")
        part.write_text(json.dumps(record))
        part.replace(target)


class ResidentCurve:
    """Resident memory of this process from now on."""

    kind = "resident"
    note: str | None = None

    def __init__(self) -> None:
        self._highest = HighestPoints(2 * MAX_POINTS)
        self._stop = threading.Event()
        self._sample()  # now: the thread may first run when the step has started to allocate
        self._thread = threading.Thread(target=self._run, name="memory-curve", daemon=True)
        self._thread.start()

    def points(self, snapshot: Path) -> list[Point]:
        """Return all points; there is no snapshot."""
        self._stop.set()
        self._thread.join()
        self._sample()
        return self._highest.points

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        resident = resident_now()
        if resident is not None:
            self._highest.add((time.time(), resident, None))


class HighestPoints:
    """Curve of any length in at most `max_points` points, the maxima of equally long intervals."""

    def __init__(self, max_points: int) -> None:
        self.points: list[Point] = []
        self._max_points, self._width, self._count = max_points, 1, 0

    def add(self, point: Point) -> None:
        """Add a point; if the curve is full, intervals become twice as long."""
        if self._count % self._width == 0 and len(self.points) == self._max_points:
            self.points = downsample(self.points, self._max_points // 2)
            self._width *= 2
        if self._count % self._width == 0:
            self.points.append(point)
        elif point[1] > self.points[-1][1]:
            self.points[-1] = point
        self._count += 1


class AllocatorCurve:
    """Live tensors on a device and the memory reserved by its allocator, from now on."""

    kind = "allocated"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.note: str | None = None
        self._begin_s = time.time()
        torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES)

    def points(self, snapshot: Path) -> list[Point]:
        """Return the curve, and write the snapshot to a file."""
        torch.cuda.synchronize(self.device)
        # The history counts a tensor until its free is completed; `memory_allocated` does not.
        live = torch.cuda.memory_stats(self.device)["active_bytes.all.current"]
        end = (time.time(), live, torch.cuda.memory_reserved(self.device))
        history: Any = torch.cuda.memory._snapshot(self.device)
        torch.cuda.memory._dump_snapshot(str(snapshot))
        torch.cuda.memory._record_memory_history(enabled=None)
        traces: Sequence[Any] = history["device_traces"]
        index = self.device.index or 0
        entries: Sequence[Any] = traces[index] if index < len(traces) else ()
        if len(entries) >= MAX_ENTRIES:
            self.note = (
                f"the allocator's history keeps only its last {MAX_ENTRIES:,} entries, so the "
                "start of the curve is missing; profile fewer steps"
            )
            return allocator_curve(entries, end)
        return allocator_curve(entries, end, self._begin_s)


def allocator_curve(
    entries: Sequence[Mapping[str, Any]], end: Point, begin_s: float | None = None
) -> list[Point]:
    """Return the curve up to its last point, from the entries of the allocator's history.

    The entries are processed backwards, because a full history has lost its beginning. `begin_s` is
    the time at which the history started, None if it starts with its first entry.
    """
    points = [end]
    _, live, end_reserved = end
    reserved = end_reserved or 0
    for entry in reversed(entries):
        action, size = entry["action"], int(entry["size"])
        if action in LIVE or action in RESERVED:
            points.append((float(entry.get("time_us", 0)) / 1e6, live, reserved))
            live -= LIVE.get(action, 0) * size
            reserved -= RESERVED.get(action, 0) * size
    if begin_s is not None:
        points.append((begin_s, live, reserved))
    return points[::-1]


def downsample(points: Sequence[Point], max_points: int) -> list[Point]:
    """Return at most `max_points` points, the maximum of each interval."""
    width = -(-len(points) // max_points) if points else 1
    intervals = (points[at : at + width] for at in range(0, len(points), width))
    return [max(interval, key=lambda point: point[1]) for interval in intervals]
