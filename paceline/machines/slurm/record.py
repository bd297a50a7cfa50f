"""Record of a run's Slurm jobs in slurm.json: jobs, nodes, ends and excluded nodes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import StringConstraints

from paceline.core.errors import UserError
from paceline.core.text import whole_number
from paceline.core.value import NonNegativeInt, Value
from paceline.files.documents import read_lines, read_value, write_value
from paceline.files.run_folder import LOGS_FOLDER, STEPS_FOLDER
from paceline.machines.slurm.script import ATTEMPTS_FOLDER, OPTIONAL_FOLDERS, STATUS_FILE

RECORD_FILE = "slurm.json"


JOB_NUMBER = re.compile(r"[0-9]+(_[0-9]+)?")
"""Number of a job, or of a task of an array; anything else is an option or a list to scancel."""
JobNumber = Annotated[str, StringConstraints(pattern=f"^{JOB_NUMBER.pattern}$")]


class SlurmAttempt(Value):
    """One job, or one restart of it by Slurm itself."""

    job: JobNumber
    restart: NonNegativeInt = 0
    """Number of times that Slurm had restarted this job before."""
    nodes: str = ""
    state: str = "PENDING"
    reason: str | None = None
    exit_code: int | None = None


class SlurmRecord(Value):
    """Contents of slurm.json in a run folder."""

    attempts: tuple[SlurmAttempt, ...] = ()
    excluded: dict[str, str] = {}
    """Nodes excluded from the next attempt, each with the reason."""
    warnings: tuple[str, ...] = ()


class JobMarkers(Value):
    """Markers that job.sh itself has written about its latest start."""

    restart: int = 0
    nodes: str = ""
    code: int | None = None
    """Exit code of job.sh, once it has ended."""


@dataclass
class SlurmJournal:
    """Writer of slurm.json while a run is in progress, and of the folders of earlier attempts."""

    folder: Path
    record: SlurmRecord = field(default_factory=SlurmRecord)

    @property
    def last(self) -> SlurmAttempt:
        """Attempt that is in progress or ended last."""
        return self.record.attempts[-1]

    def begin(self, job: str, restart: int = 0) -> None:
        """Add an attempt."""
        self._write(attempts=(*self.record.attempts, SlurmAttempt(job=job, restart=restart)))

    def note(self, **changes: object) -> None:
        """Update the last attempt."""
        last = self.last.model_copy(update=changes)
        if last != self.last:
            self._write(attempts=(*self.record.attempts[:-1], last))

    def warn(self, text: str) -> None:
        """Add a warning."""
        self._write(warnings=(*self.record.warnings, text))

    def exclude(self, hosts: Iterable[str], reason: str) -> tuple[str, ...]:
        """Exclude nodes from the next attempt; return all nodes excluded so far."""
        self._write(excluded={**self.record.excluded, **dict.fromkeys(hosts, reason)})
        return tuple(self.record.excluded)

    def archive_output(self) -> Path:
        """Move the output of the last attempt into a folder of its own, unless job.sh has done so.

        Returns the path of that folder, relative to the run folder.
        """
        subfolder = Path(ATTEMPTS_FOLDER) / f"{self.last.job}.{self.last.restart}"
        place = self.folder / subfolder
        with contextlib.suppress(FileExistsError):
            place.mkdir(parents=True)
            for name in (LOGS_FOLDER, STEPS_FOLDER):
                (self.folder / name).rename(place / name)
                (self.folder / name).mkdir(exist_ok=True)
            for name in OPTIONAL_FOLDERS:
                if (self.folder / name).is_dir():
                    (self.folder / name).rename(place / name)
        return subfolder

    def _write(self, **changes: object) -> None:
        self.record = self.record.model_copy(update=changes)
        write_value(self.folder / RECORD_FILE, self.record)


class OrphanJob(Value):
    """A job that had not ended when its controller last checked."""

    job: str
    code: int | None = None
    """Exit code that job.sh has written since; None if it has not ended."""


def orphan_job(folder: Path) -> OrphanJob | None:
    """Return the job that a run without a controller has left in Slurm's queue, if any."""
    record = read_slurm_record(folder)
    if record is None or not record.attempts or record.attempts[-1].exit_code is not None:
        return None
    job = record.attempts[-1].job
    markers = read_markers(folder, job)
    return OrphanJob(job=job, code=markers.code if markers else None)


def record_cancelled(folder: Path) -> None:
    """Record the last attempt of a run without a controller as cancelled."""
    record = read_slurm_record(folder)
    if record is not None and record.attempts:
        end = {"state": "CANCELLED", "reason": "its controller had died", "exit_code": 143}
        last = record.attempts[-1].model_copy(update=end)
        update = record.model_copy(update={"attempts": (*record.attempts[:-1], last)})
        write_value(folder / RECORD_FILE, update)


def read_slurm_record(folder: Path) -> SlurmRecord | None:
    """Return slurm.json of a run folder, or None if the run did not use Slurm."""
    try:
        return read_value(folder / RECORD_FILE, SlurmRecord)
    except UserError:
        return None


def read_markers(folder: Path, job: str) -> JobMarkers | None:
    """Return the latest start of a job by its own markers; None before it has started."""
    try:
        lines = list(read_lines(folder / STATUS_FILE))
    except OSError:
        return None
    markers: JobMarkers | None = None
    for line in lines:
        event, number, restart, detail = [*line.rstrip("\n").split(" ", 3), "", "", ""][:4]
        num_restarts = whole_number(restart)
        if number != job or num_restarts is None:
            continue
        if event == "start":
            markers = JobMarkers(restart=num_restarts, nodes=detail)
        elif event == "end" and markers and (code := whole_number(detail)) is not None:
            markers = markers.model_copy(update={"code": code})
    return markers
