"""Signs of life in what a run's ranks write, at a cost that hardly grows with their number.

A rank's watchdog shows that it lives by the times of its files, and a rank that fails leaves a
mark, which changes its folder's time. So folders are listed when they have changed, and of the
files only a few are looked at each second: as many as go around all of them several times while a
job may be silent.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

from paceline.files.events import read_rank
from paceline.files.run_folder import LOGS_FOLDER, STEPS_FOLDER
from paceline.runs.ending import file_text

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
