"""The first rank's step file, followed while it grows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from paceline.core.steps import Step
from paceline.engines import Engine


@dataclass
class StepFollower:
    """Reads the lines that one rank has added to its step file since the last look."""

    path: Path
    engine: Engine
    _file: IO[str] | None = None
    _rest: str = ""
    finished: bool = field(default=False)

    def new_steps(self) -> list[Step]:
        if self._file is None:
            if not self.path.exists():
                return []
            self._file = self.path.open(encoding="utf-8", errors="replace")
        text = self._rest + self._file.read()
        complete, newline, self._rest = text.rpartition("\n")
        log = self.engine.read_rank(complete.splitlines() if newline else [])
        self.finished = self.finished or log.end is not None
        return list(log.steps)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
