"""Output of a rank: its event lines in JSON and its log."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

SCHEMA = 1


class EventLog:
    """Events of one rank, each appended with one write, so a kill truncates at most the last line.

    A failure also creates an empty file next to the events. It changes the folder's modification
    time, so a reader need not open the files of thousands of ranks.
    """

    def __init__(self, folder: str, rank: int) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / f"rank-{rank:05d}.jsonl"
        self._mark = path.with_suffix(".failed")
        self._mark.unlink(missing_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self.steps_done = 0
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")

    def write(self, event: str, **values: Any) -> None:
        """Append one event; a float that is not finite becomes null."""
        fields = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }
        line = (json.dumps({"event": event, **fields}) + "\n").encode()
        # A full disk accepts only a part; the next write then raises OSError.
        while line:
            line = line[os.write(self._file, line) :]
        self.steps_done += event == "step"
        if event == "end" and values.get("status", "ok") != "ok":
            with suppress(OSError):  # the disk may be full
                self._mark.touch()


def has_ended(folder: str, rank: int) -> bool:
    """Return whether a rank's last complete line is its end line."""
    try:
        lines = (Path(folder) / f"rank-{rank:05d}.jsonl").read_bytes().split(b"\n")
    except FileNotFoundError:
        return False
    return len(lines) > 1 and lines[-2].startswith(b'{"event": "end"')


def redirect_output(folder: str, rank: int) -> None:
    """Redirect standard output and error, including those of C libraries, to the rank's log."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / f"rank-{rank:05d}.log"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def resident_bytes() -> int:
    """Return this process's peak resident memory in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
