"""A run's steps while it goes on: from the first rank's event lines, or from a foreign log."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import BinaryIO, Protocol

from paceline.core.steps import Step
from paceline.engines import log_formats
from paceline.engines.log_reading.log_content import LogContent
from paceline.files.documents import open_regular
from paceline.files.events import read_rank
from paceline.files.log_file import LogFile
from paceline.files.run_folder import STEPS_FOLDER
from paceline.logs.parser import detect
from paceline.runs.logged_run import NATIVE, log_files, measured_log

LOOK_S = 2.0
"""At the least between two looks into a foreign log."""
LOOKING_SHARE = 0.02
"""Of the time that looks may take: the training may run on the same cores."""
MOST_BYTES = 4 << 20
"""Foreign logs are read anew at each look; longer ones, all together, are not followed."""


class Follower(Protocol):
    """What tells the steps that were made since the last look."""

    @property
    def finished(self) -> bool:
        """Whether the rank has told its end."""
        ...

    @property
    def restarts(self) -> int:
        """How often the steps began anew: the job was started again."""
        ...

    def new_steps(self) -> list[Step]:
        """The steps since the last look."""
        ...


def follower(folder: Path, engine_name: str) -> Follower:
    """Follows a run of the native trainer by its event lines, of another program by both."""
    events = StepFollower(folder / STEPS_FOLDER / "rank-00000.jsonl")
    return events if engine_name == NATIVE else LogFollower(folder, engine_name, events)


@dataclass
class StepFollower:
    """Reads the lines that one rank has added to its step file since the last look.

    Nothing stays open between two looks: a job has more ranks than a process may open files, and
    its restart moves the file away and makes another.
    """

    path: Path
    tail_bytes: int | None = None
    """Of a file met for the first time, what is read of its end; None for the whole."""
    finished: bool = field(default=False)
    restarts: int = field(default=0)
    _identity: tuple[int, int] | None = None
    """Device and inode of the file that was read."""
    _offset: int = 0
    """Where the first line begins that was not yet whole."""

    def new_steps(self) -> list[Step]:
        try:
            with open_regular(self.path) as file:
                self._meet(file)
                file.seek(self._offset)
                added = file.read()
        except OSError:  # not there yet, or between two attempts
            return []
        whole = added[: added.rfind(b"\n") + 1]
        self._offset += len(whole)
        log = read_rank(whole.decode("utf-8", "replace").splitlines())
        self.finished = self.finished or log.end is not None
        return list(log.steps)

    def _meet(self, file: BinaryIO) -> None:
        """Begin anew where the path stands for another file than before."""
        state = os.fstat(file.fileno())
        identity = (state.st_dev, state.st_ino)
        if identity == self._identity and state.st_size >= self._offset:
            return
        self.restarts += self._identity is not None
        self._identity, self.finished = identity, False
        skipped = state.st_size - self.tail_bytes if self.tail_bytes else 0
        self._offset = max(0, skipped)
        if skipped > 0:
            file.seek(skipped - 1)
            self._offset += len(file.readline()) - 1


@dataclass
class LogFollower:
    """Looks into a foreign log now and then; event lines go before it."""

    folder: Path
    engine_name: str
    events: StepFollower
    _last: int = -1
    _next_look_s: float = 0.0
    """By the monotonic clock."""
    _size: int = 0

    @property
    def finished(self) -> bool:
        return self.events.finished

    @property
    def restarts(self) -> int:
        return self.events.restarts

    def new_steps(self) -> list[Step]:
        steps = self.events.new_steps()
        began_s = time.monotonic()
        if steps or self.events.path.exists() or began_s < self._next_look_s:
            return steps
        latest = self._latest()
        ended_s = time.monotonic()
        self._next_look_s = ended_s + max(LOOK_S, (ended_s - began_s) / LOOKING_SHARE)
        if latest is None or latest.index <= self._last:
            return []
        self._last = latest.index
        return [latest]

    def _latest(self) -> Step | None:
        """The last step of the log, None where that has not grown or has none."""
        size = sum(path.stat().st_size for path in log_files(self.folder))
        if size == self._size or size > MOST_BYTES:
            return None
        self._size = size
        path = measured_log(self.folder, self.engine_name)
        known = log_formats()
        name = self.engine_name if self.engine_name in known else path and detect(LogFile(path))
        if path is None or name is None:
            return None
        kind, log = known[name], LogContent()
        kind.read(LogFile(path, kind.begins), log)
        steps = log.steps()
        if not len(steps):
            return None
        step_time_s, loss, batch = (
            value if isfinite(value := float(steps[name][-1])) else None
            for name in ("step_time_s", "loss", "global_batch")
        )
        return Step(int(steps.index[-1]), step_time_s, loss, global_batch=batch)
