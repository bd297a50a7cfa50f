"""slurm.json: which jobs a run was, on which nodes, how they ended and what was left out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.errors import UserError
from paceline.core.value import NonNegativeInt, Value
from paceline.files.documents import read_value, write_value
from paceline.files.run_folder import LOGS_FOLDER, STEPS_FOLDER
from paceline.machines.slurm.script import ATTEMPTS_FOLDER, MAY_BE_THERE, STATUS_FILE

RECORD_FILE = "slurm.json"


class SlurmAttempt(Value):
    """One job, or one more start of it by Slurm itself."""

    job: str
    restart: NonNegativeInt = 0
    """How often Slurm had started this job before."""
    nodes: str = ""
    state: str = "PENDING"
    reason: str | None = None
    exit_code: int | None = None


class SlurmRecord(Value):
    """slurm.json of a run folder."""

    attempts: tuple[SlurmAttempt, ...] = ()
    excluded: dict[str, str] = {}
    """Nodes that the next attempt was kept from, with the reason."""
    warnings: tuple[str, ...] = ()


class Marks(Value):
    """What job.sh itself has written of its latest start."""

    restart: int = 0
    nodes: str = ""
    code: int | None = None
    """Its exit code, once it has ended."""


@dataclass
class Diary:
    """slurm.json of one run folder while the run goes on, and the folders of earlier attempts."""

    folder: Path
    record: SlurmRecord = field(default_factory=SlurmRecord)

    @property
    def last(self) -> SlurmAttempt:
        """The attempt that goes on or ended last."""
        return self.record.attempts[-1]

    def begin(self, job: str, restart: int = 0) -> None:
        """Note one more attempt."""
        self._write(attempts=(*self.record.attempts, SlurmAttempt(job=job, restart=restart)))

    def note(self, **changes: object) -> None:
        """Change what is known of the last attempt."""
        last = self.last.model_copy(update=changes)
        if last != self.last:
            self._write(attempts=(*self.record.attempts[:-1], last))

    def warn(self, text: str) -> None:
        """Add a warning."""
        self._write(warnings=(*self.record.warnings, text))

    def exclude(self, hosts: Iterable[str], reason: str) -> tuple[str, ...]:
        """Note nodes that the next attempt must do without; all that were noted so far."""
        self._write(excluded={**self.record.excluded, **dict.fromkeys(hosts, reason)})
        return tuple(self.record.excluded)

    def put_away(self) -> Path:
        """Move what the last attempt wrote apart, unless job.sh has; where, in the run folder."""
        kept = Path(ATTEMPTS_FOLDER) / f"{self.last.job}.{self.last.restart}"
        place = self.folder / kept
        with contextlib.suppress(FileExistsError):
            place.mkdir(parents=True)
            for name in (LOGS_FOLDER, STEPS_FOLDER):
                (self.folder / name).rename(place / name)
                (self.folder / name).mkdir(exist_ok=True)
            for name in MAY_BE_THERE:
                if (self.folder / name).is_dir():
                    (self.folder / name).rename(place / name)
        return kept

    def _write(self, **changes: object) -> None:
        self.record = self.record.model_copy(update=changes)
        write_value(self.folder / RECORD_FILE, self.record)


class LeftJob(Value):
    """A job that had not ended when its controller last looked."""

    job: str
    code: int | None = None
    """What job.sh ended with since; None when it has not."""


def left_job(folder: Path) -> LeftJob | None:
    """The job in Slurm's queue that a run without its controller has left, if there is one."""
    record = read_slurm_record(folder)
    if record is None or not record.attempts or record.attempts[-1].exit_code is not None:
        return None
    job = record.attempts[-1].job
    marks = read_marks(folder, job)
    return LeftJob(job=job, code=marks.code if marks else None)


def note_abandoned(folder: Path) -> None:
    """Close the last attempt of a run whose job was cancelled on behalf of nobody any more."""
    record = read_slurm_record(folder)
    if record is not None and record.attempts:
        closed = {"state": "CANCELLED", "reason": "its controller had died", "exit_code": 143}
        last = record.attempts[-1].model_copy(update=closed)
        changed = record.model_copy(update={"attempts": (*record.attempts[:-1], last)})
        write_value(folder / RECORD_FILE, changed)


def read_slurm_record(folder: Path) -> SlurmRecord | None:
    """slurm.json of a run folder, None where the run was none of Slurm's."""
    try:
        return read_value(folder / RECORD_FILE, SlurmRecord)
    except UserError:
        return None


def read_marks(folder: Path, job: str) -> Marks | None:
    """The latest start of a job by its own marks; None before it has begun."""
    try:
        text = (folder / STATUS_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    marks: Marks | None = None
    for line in text.splitlines():
        what, number, restart, rest = [*line.split(" ", 3), "", "", ""][:4]
        if number != job or not restart.isdigit():
            continue
        if what == "start":
            marks = Marks(restart=int(restart), nodes=rest)
        elif what == "end" and marks and rest.isdigit():
            marks = marks.model_copy(update={"code": int(rest)})
    return marks
