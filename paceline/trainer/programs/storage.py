"""Storage benchmark of one host, with one and with many concurrent processes.

Run as python -m paceline.trainer.programs.storage settings.json, once per host. Needs no torch.

Writes JSON lines to storage/rank-NNNNN.jsonl: `facts`, `place` (a folder, its file system and free
bytes), `storage` (an operation by a number of processes: rates of each, how it bypassed the page
cache, and which share was cached anyway), `fault` for a folder that cannot be measured, and `end`.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from paceline.trainer.config import read_json
from paceline.trainer.measure.disk import DiskFile, read_ahead_bytes, timed_units
from paceline.trainer.measure.event_log import EventLog, redirect_output
from paceline.trainer.measure.machine import die_with_parent
from paceline.trainer.programs.host_program import HostProgram

SCHEMA = 1
BLOCKS = 7
"""Number of blocks of consecutive operations; a rate is the median of the blocks."""
LEAD_S = 0.02
"""Delay of the common start time, so that all processes have received it."""
ORDER = ("write", "read", "sample", "checkpoint", "small_file")


def main(path: str) -> int:
    """Measure every folder, and report those that cannot be measured."""
    rank = int(os.environ.get("RANK", "0"))
    settings = read_json(path)
    redirect_output("logs", rank)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    StorageMeasurement(settings, rank, EventLog("storage", rank)).run()
    return 0


class StorageMeasurement(HostProgram):
    """Measurements of one host.

    Settings are {paths, operations, processes, seconds, size_bytes, sample_bytes}: seconds per
    folder, and bytes of all its processes together.
    """

    def run(self) -> None:
        """Measure all folders and write the end line."""
        self.write("facts", schema=SCHEMA, host=os.environ.get("PACELINE_HOST") or platform.node())
        for path in self.settings["paths"]:
            self.part(path, lambda path=path: self.folder(Path(path)))
        self.write("end")

    def folder(self, folder: Path) -> None:
        """Run all operations in one folder with each number of processes."""
        self.write("place", path=str(folder), **place(folder, self.settings["size_bytes"]))
        counts, operations = self.settings["processes"], self.settings["operations"]
        seconds = self.settings["seconds"] / max(1, len(counts) * len(operations))
        with WorkerPool(folder, max(counts), self.settings) as workers:
            if "write" not in operations:
                workers.measure("write", max(counts), seconds)
            for operation in (name for name in ORDER if name in operations):
                for count in counts:
                    figures = workers.measure(operation, count, seconds)
                    self.write(
                        "storage",
                        path=str(folder),
                        operation=operation,
                        processes=count,
                        unit_bytes=figures[0]["unit_bytes"],
                        method=figures[0]["method"],
                        cached_share=cached_share([each["pages"] for each in figures]),
                        rates=[each["rates"] for each in figures],
                        sustained=[each["sustained"] for each in figures],
                        units=[each["units"] for each in figures],
                        unit_s=[each["unit_s"] for each in figures],
                        slow_unit_s=[each["slow_unit_s"] for each in figures],
                    )


def place(folder: Path, size_bytes: int) -> dict[str, Any]:
    """Return the file system of a folder; raise ValueError where writing is impossible."""
    if not folder.is_dir():
        raise ValueError("is not a folder on this host")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError("is not writable by this user")
    free = shutil.disk_usage(folder).free
    if free < size_bytes:
        raise ValueError(f"has {free:,} bytes free, but the file needs {size_bytes:,}")
    kind, source = file_system(folder)
    return {
        "file_system": kind,
        "source": source,
        "free_bytes": free,
        "read_ahead_bytes": read_ahead_bytes(folder),
    }


def file_system(folder: Path) -> tuple[str | None, str | None]:
    """Return (type, device or server) of the folder's mount; None where unknown."""
    inside = folder.resolve()
    best: tuple[int, str | None, str | None] = (-1, None, None)
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            where = Path(before.split()[4].replace("\\040", " "))
            depth = len(where.parts)
            if inside.is_relative_to(where) and depth >= best[0]:
                kind, source, *_ = after.split()
                best = (depth, kind, source)
    return best[1], best[2]


class WorkerPool:
    """Processes that run the same operation at the same time, each on its own file."""

    def __init__(self, folder: Path, count: int, settings: dict[str, Any]) -> None:
        """Start the processes; raise OSError where a file cannot be created."""
        context = get_context("fork")
        names = [f".paceline-storage-{platform.node()}-{os.getpid()}-{n}" for n in range(count)]
        self.paths = [folder / name for name in names]
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        size, ahead = settings["size_bytes"] // count, read_ahead_bytes(folder)
        for number, path in enumerate(self.paths):
            ours, theirs = context.Pipe()
            details = (path, size, settings["sample_bytes"], number, ahead)
            arguments = (theirs, os.getpid(), details)
            # A daemon ends with this process, even while it starts others.
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the processes and delete their files."""
        for process in self.processes:
            process.kill()
            process.join()
        for path in self.paths:
            path.unlink(missing_ok=True)

    def measure(self, operation: str, count: int, seconds: float) -> list[dict[str, Any]]:
        """Return the results of `count` processes; raise OSError with the first failure."""
        pipes = self.pipes[:count]
        for pipe in pipes:
            pipe.send(operation)
        for pipe in pipes:
            _receive(pipe)
        start_s = time.monotonic() + LEAD_S
        for pipe in pipes:
            pipe.send((start_s, start_s + seconds))
        return [_receive(pipe) for pipe in pipes]


def _receive(pipe: Connection) -> dict[str, Any]:
    try:
        reply = pipe.recv()
    except EOFError as error:
        raise OSError("a worker process was killed") from error
    if "fault" in reply:
        raise OSError(reply["fault"])
    return reply


def _serve(pipe: Connection, parent: int, details: tuple[Path, int, int, int, int | None]) -> None:
    """Run the operations that the pool sends until the process is killed."""
    die_with_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        file = DiskFile(*details)
        while True:
            operation = pipe.recv()
            pages = file.prepare(operation)
            pipe.send({"ready": True})
            start_s, stop_s = pipe.recv()
            time.sleep(max(0.0, start_s - time.monotonic()))
            units = timed_units(file, operation, stop_s)
            pipe.send(figures(file, operation, pages, units))
    except EOFError:
        return
    except Exception as error:  # the pool reports the reason
        reason = getattr(error, "strerror", None) or str(error)
        with suppress(OSError):
            pipe.send({"fault": reason})


def figures(
    file: DiskFile,
    operation: str,
    pages: tuple[int, int] | None,
    units: Sequence[tuple[int, float]],
) -> dict[str, Any]:
    """Return one process's bytes/s of each block of operations, and seconds per operation.

    The 99th percentile is the nearest rank, ceil(0.99 n); below 100 operations it is the slowest.
    """
    seconds = sorted(unit_s for _, unit_s in units)
    if operation == "sample" and file.pages:
        pages = file.cached, file.pages
    return {
        "unit_bytes": units[0][0],
        "method": method(operation, file.direct_fd is not None),
        "pages": pages,
        "rates": block_rates(units),
        "sustained": sum(amount for amount, _ in units) / max(1e-9, sum(seconds)),
        "units": len(units),
        "unit_s": median(seconds),
        "slow_unit_s": seconds[-(-99 * len(seconds) // 100) - 1],
    }


def method(operation: str, direct: bool) -> str:
    """Return how an operation uses or bypasses the page cache."""
    match operation:
        case "write":
            return "O_DIRECT" if direct else "fdatasync a block"
        case "read":
            return "O_DIRECT" if direct else "posix_fadvise(DONTNEED)"
        case "sample":
            return "mapped, posix_fadvise(DONTNEED)"
        case "checkpoint":
            return "page cache, then fsync"
        case _:
            return "page cache"


def block_rates(units: Sequence[tuple[int, float]]) -> list[float]:
    """Return the bytes/s of at most BLOCKS consecutive parts of the operations."""
    parts = min(BLOCKS, len(units))
    cuts = [len(units) * part // parts for part in range(parts + 1)]
    blocks = [units[begin:end] for begin, end in pairwise(cuts)]
    return [
        sum(amount for amount, _ in block) / max(1e-9, sum(unit_s for _, unit_s in block))
        for block in blocks
    ]


def cached_share(pages: Sequence[tuple[int, int] | None]) -> float | None:
    """Return the cached share of all (cached pages, pages); None where one is unknown."""
    counts = [each for each in pages if each is not None]
    if len(counts) < len(pages):
        return None
    return sum(cached for cached, _ in counts) / sum(total for _, total in counts)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: storage settings.json")
    sys.exit(main(sys.argv[1]))
