"""Followers of a running job: the steps of its first rank, and the activity of all ranks."""

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
"""Minimum time between two reads of another program's log."""
MAX_READ_SHARE = 0.02
"""Maximum fraction of time for reading logs: the training may use the same cores."""
MAX_READ_BYTES = 16 << 20
"""Maximum size of a rank's lines that one call reads; the next call continues."""
MAX_LOG_BYTES = 4 << 20
"""Maximum total size of other programs' logs to follow, since each read starts over."""


class Follower(Protocol):
    """Source of the steps since the last call."""

    @property
    def finished(self) -> bool:
        """True if the rank has written its end event."""
        ...

    @property
    def restarts(self) -> int:
        """Number of restarts of the job."""
        ...

    def new_steps(self) -> list[Step]:
        """Return the steps since the last call, of at most MAX_READ_BYTES of lines."""
        ...


def make_follower(folder: Path, engine_name: str) -> Follower:
    """Return a follower of event lines; for other programs, of event lines and log."""
    events = StepFollower(folder / STEPS_FOLDER / "rank-00000.jsonl")
    return events if engine_name == NATIVE else LogFollower(folder, engine_name, events)


@dataclass
class StepFollower:
    """Follower of the lines that one rank adds to its step file.

    No file stays open between two calls: a job may have more ranks than the limit of open files,
    and a restart moves the file away and creates another.
    """

    path: Path
    tail_bytes: int | None = None
    """Bytes to read from the end of a new file; None reads the whole file."""
    finished: bool = field(default=False)
    restarts: int = field(default=0)
    _identity: tuple[int, int] | None = None
    """Device and inode of the file that was read."""
    _offset: int = 0
    """Start of the first incomplete line."""

    def new_steps(self) -> list[Step]:
        try:
            with open_regular(self.path) as file:
                self._check_identity(file)
                file.seek(self._offset)
                new_bytes = file.read(MAX_READ_BYTES)
        except OSError:  # the file does not exist yet, or the job is between two attempts
            return []
        whole = new_bytes[: new_bytes.rfind(b"\n") + 1]
        # The rest of a longer line is skipped like any damaged line.
        self._offset += len(whole) or (len(new_bytes) if len(new_bytes) == MAX_READ_BYTES else 0)
        log = read_rank(whole.decode("utf-8", "replace").splitlines())
        self.finished = self.finished or log.end is not None
        return list(log.steps)

    def _check_identity(self, file: BinaryIO) -> None:
        """Start over if the path is another file than before."""
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
    """Follower that reads another program's log periodically; event lines take precedence."""

    folder: Path
    engine_name: str
    events: StepFollower
    _last: int = -1
    _next_read_s: float = 0.0
    """Monotonic time of the next read."""
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
        if steps or self.events.path.exists() or began_s < self._next_read_s:
            return steps
        latest = self._latest()
        ended_s = time.monotonic()
        self._next_read_s = ended_s + max(MIN_LOG_PAUSE_S, (ended_s - began_s) / MAX_READ_SHARE)
        if latest is None or latest.index <= self._last:
            return []
        self._last = latest.index
        return [latest]

    def _latest(self) -> Step | None:
        """Return the last step of the log; None if it has not grown or has none."""
        size = sum(path.stat().st_size for path in log_files(self.folder))
        if size == self._size or size > MAX_LOG_BYTES:
            return None
        self._size = size
        path = measured_log(self.folder, self.engine_name)
        formats = log_formats()
        name = self.engine_name if self.engine_name in formats else path and detect(LogFile(path))
        if path is None or name is None:
            return None
        kind, log = formats[name], LogContent()
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
"""Minimum extra time beyond hang_limit_s before silent ranks count as hung."""
CHECK_PERIOD_S = 1.0
"""Minimum time between two checks of the ranks' files."""
ROUNDS_PER_LIMIT = 8
"""Number of checks of each file within the silence limit."""
MIN_FILES = 256
"""Minimum number of files per check."""
LAST_LINES_BYTES = 8192
MIN_AGE_NS = 2 * 10**9
"""Age from which a folder's modification time proves that no file was added since."""
FAILED_SUFFIX = ".failed"
"""Suffix of the file that a rank creates after it has written its failure."""


@dataclass
class JobHeartbeat:
    """Activity of a run's files; time in which this process was suspended does not count."""

    folder: Path
    hang_limit_s: float
    silent_s: float = 0.0
    """Seconds since any rank's main thread or watchdog wrote a file."""
    failed_s: float = 0.0
    """Seconds since the first rank wrote its failure."""
    _files: list[str] = field(default_factory=list[str])
    _folder_times: dict[str, int] = field(default_factory=dict[str, int])
    """Modification time of each folder at its last listing."""
    _file_times: dict[str, int] = field(default_factory=dict[str, int])
    """Modification time of each file at its last check."""
    _next_file: int = 0
    """Index of the first file of the next check."""
    _last_check_s: float = field(default_factory=time.monotonic)

    @property
    def limit_s(self) -> float:
        """Silence after which the ranks' own watchdogs, which act earlier, have failed."""
        return self.hang_limit_s + max(self.hang_limit_s, SILENCE_GRACE_S)

    def check(self) -> None:
        """Check the files again, at most once a second."""
        now = time.monotonic()
        if now - self._last_check_s < CHECK_PERIOD_S:
            return
        passed_s, self._last_check_s = min(now - self._last_check_s, 5 * CHECK_PERIOD_S), now
        has_new_files, failed = self._list_folders()
        written_files = [path for path in self._next_files() if self._was_written(path)]
        self.silent_s = (
            0.0 if has_new_files or written_files or not self._files else self.silent_s + passed_s
        )
        failed = failed or any(map(_has_failure, written_files))
        if self.failed_s or failed:
            self.failed_s += passed_s

    def _list_folders(self) -> tuple[bool, bool]:
        """List changed folders; return (a file is new, a failure marker is new)."""
        has_new = failed = False
        for name in (STEPS_FOLDER, LOGS_FOLDER):
            folder = os.path.join(self.folder, name)  # noqa: PTH118
            when = _modified_ns(folder)
            if when is None or when == self._folder_times.get(folder):
                continue
            names = [entry for entry in os.listdir(folder) if entry.startswith("rank-")]  # noqa: PTH208
            # A file added in the same tick of the file system's clock does not change the time.
            is_stable = time.time_ns() - when > MIN_AGE_NS
            self._folder_times[folder] = when if is_stable else -1
            paths = {os.path.join(folder, entry) for entry in names}  # noqa: PTH118
            listed_before = {path for path in self._files if os.path.dirname(path) == folder}  # noqa: PTH120
            new = paths - listed_before
            has_new = has_new or bool(new)
            failed = failed or any(path.endswith(FAILED_SUFFIX) for path in new)
            remaining = [path for path in self._files if path not in listed_before or path in paths]
            self._files = remaining + sorted(new)
        return has_new, failed

    def _next_files(self) -> list[str]:
        """Return the files of this check."""
        rounds = self.limit_s / ROUNDS_PER_LIMIT / CHECK_PERIOD_S
        count = min(len(self._files), max(MIN_FILES, ceil(len(self._files) / rounds)))
        first = self._next_file if self._next_file < len(self._files) else 0
        self._next_file = (first + count) % max(1, len(self._files))
        return (self._files[first:] + self._files[:first])[:count]

    def _was_written(self, path: str) -> bool:
        """Return True if a file was written since its last check; it may have been removed."""
        when = _modified_ns(path)
        if when is None or when == self._file_times.get(path):
            return False
        self._file_times[path] = when
        return True


def _modified_ns(path: str) -> int | None:
    """Return the modification time of a file or folder in ns; None if it does not exist."""
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116
    except FileNotFoundError:
        return None


def _has_failure(path: str) -> bool:
    """Return True if a rank's last event is a failure."""
    if not path.endswith(".jsonl"):
        return False
    end = read_rank(file_text(Path(path), LAST_LINES_BYTES).splitlines()[-1:]).end
    return end is not None and end.status != "ok"
