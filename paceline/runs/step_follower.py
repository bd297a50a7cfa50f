"""What a run's ranks write while it goes on: the first rank's steps, and signs of life of all."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from math import ceil, isfinite
from pathlib import Path
from typing import BinaryIO, Protocol

from paceline.core.steps import Step
from paceline.engines import log_formats
from paceline.engines.log_reading.log_content import LogContent
from paceline.files.documents import open_regular
from paceline.files.events import read_rank
from paceline.files.log_file import LogFile
from paceline.files.run_folder import LOGS_FOLDER, STEPS_FOLDER
from paceline.logs.parser import detect
from paceline.runs.ending import file_text
from paceline.runs.logged_run import NATIVE, log_files, measured_log

MIN_LOG_PAUSE_S = 2.0
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
        self._next_look_s = ended_s + max(MIN_LOG_PAUSE_S, (ended_s - began_s) / LOOKING_SHARE)
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


SILENCE_GRACE_S = 15.0
"""How much longer than hang_limit_s, at least, all ranks may be silent, watchdogs included."""
LOOK_S = 1.0
"""At the least between two looks at the files of the ranks."""
ROUNDS_PER_LIMIT = 8
"""How often each file is looked at while all ranks may be silent."""
FEW_FILES = 256
"""So many are looked at each time, however many there are."""
LAST_LINES_BYTES = 8192
SETTLED_NS = 2 * 10**9
"""Age from which on a folder's time tells that nothing has come since."""
FAILED = ".failed"
"""Ending of the mark that a rank leaves beside its event lines when it has told its failure."""


@dataclass
class SignsOfLife:
    """What was seen of a run's files; time in which this process stood still is left out."""

    folder: Path
    hang_limit_s: float
    silent_s: float = 0.0
    """How long no rank has written anything or shown that its watchdog is alive."""
    failed_s: float = 0.0
    """How long ago the first rank wrote that it had failed."""
    _files: list[str] = field(default_factory=list[str])
    _folders: dict[str, int] = field(default_factory=dict[str, int])
    """When each folder was changed, as of its last listing."""
    _seen: dict[str, int] = field(default_factory=dict[str, int])
    """When each file was last written, as of the last look at it."""
    _next: int = 0
    """Where in the files the next look begins."""
    _looked: float = field(default_factory=time.monotonic)

    @property
    def limit_s(self) -> float:
        """Silence after which the ranks' own watchdogs, which come first, cannot act."""
        return self.hang_limit_s + max(self.hang_limit_s, SILENCE_GRACE_S)

    def look(self) -> None:
        """Look again, at most once a second."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        passed_s, self._looked = min(now - self._looked, 5 * LOOK_S), now
        listed, failed = self._list()
        changed = [path for path in self._some() if self._is_new(path)]
        self.silent_s = 0.0 if listed or changed or not self._files else self.silent_s + passed_s
        failed = failed or any(map(_tells_failure, changed))
        if self.failed_s or failed:
            self.failed_s += passed_s

    def _list(self) -> tuple[bool, bool]:
        """List the folders that have changed; whether any has, and whether a rank's mark is new."""
        changed = failed = False
        for name in (STEPS_FOLDER, LOGS_FOLDER):
            folder = os.path.join(self.folder, name)  # noqa: PTH118
            when = _written(folder)
            if when is None or when == self._folders.get(folder):
                continue
            names = [entry for entry in os.listdir(folder) if entry.startswith("rank-")]  # noqa: PTH208
            # What comes within the same tick of the file system's clock does not change its time.
            settled = time.time_ns() - when > SETTLED_NS
            self._folders[folder] = when if settled else -1
            paths = {os.path.join(folder, entry) for entry in names}  # noqa: PTH118
            known = {path for path in self._files if os.path.dirname(path) == folder}  # noqa: PTH120
            new = paths - known
            changed = changed or bool(new)
            failed = failed or any(path.endswith(FAILED) for path in new)
            kept = [path for path in self._files if path not in known or path in paths]
            self._files = kept + sorted(new)
        return changed, failed

    def _some(self) -> list[str]:
        """The files whose turn it is."""
        rounds = self.limit_s / ROUNDS_PER_LIMIT / LOOK_S
        count = min(len(self._files), max(FEW_FILES, ceil(len(self._files) / rounds)))
        first = self._next if self._next < len(self._files) else 0
        self._next = (first + count) % max(1, len(self._files))
        return (self._files[first:] + self._files[:first])[:count]

    def _is_new(self, path: str) -> bool:
        """Whether a file was written since the last look at it; one may be removed meanwhile."""
        when = _written(path)
        if when is None or when == self._seen.get(path):
            return False
        self._seen[path] = when
        return True


def _written(path: str) -> int | None:
    """When a file or folder was last changed, in ns; None where there is none."""
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116
    except FileNotFoundError:
        return None


def _tells_failure(path: str) -> bool:
    """Whether a rank's event lines end with one that tells of a failure."""
    if not path.endswith(".jsonl"):
        return False
    end = read_rank(file_text(Path(path), LAST_LINES_BYTES).splitlines()[-1:]).end
    return end is not None and end.status != "ok"
