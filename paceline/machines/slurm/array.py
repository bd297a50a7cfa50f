"""Runs of several threads that are submitted together, as arrays of Slurm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition

from paceline.core.errors import PacelineError, SystemFaultError
from paceline.core.job import Job
from paceline.machines import Handle
from paceline.machines.slurm import submit as submit_alone
from paceline.machines.slurm import submit_array
from paceline.machines.slurm.script import batch_options

Submit = Callable[[Job, Path], Handle]
LOOK_S = 0.2


@dataclass
class Gathering:
    """Waits until every expected job was handed in or given up, then submits all that came.

    Jobs that ask Slurm for different things become an array for each kind.
    """

    expected: int
    place: Path
    """Where the arrays' script is written, of which Slurm keeps a copy of its own."""
    at_once: int | None = None
    """Tasks of an array that may run at the same time."""
    abandoned: Callable[[], bool] = bool
    _handed_in: list[tuple[Job, Path]] = field(default_factory=list[tuple[Job, Path]])
    _runs: dict[Path, Handle] = field(default_factory=dict[Path, Handle])
    _fault: PacelineError | None = None
    _changed: Condition = field(default_factory=Condition)

    @contextmanager
    def place_for_one(self) -> Iterator[Submit]:
        """A function that submits one job; where it is not called the others stop waiting."""
        handed_in = False

        def submit(job: Job, folder: Path) -> Handle:
            nonlocal handed_in
            if job.batch:  # a script of somebody else is no task of an array
                return submit_alone(job, folder)
            handed_in = True
            return self._submit(job, folder)

        try:
            yield submit
        finally:
            if not handed_in:
                with self._changed:
                    self.expected -= 1
                    self._look()

    def _submit(self, job: Job, folder: Path) -> Handle:
        with self._changed:
            self._handed_in.append((job, folder))
            self._look()
            while folder not in self._runs and self._fault is None:
                self._changed.wait(LOOK_S)
                if self.abandoned() and folder not in self._runs:
                    raise SystemFaultError("sbatch", "the sweep was stopped before it was called")
        if folder not in self._runs and self._fault is not None:
            raise self._fault
        return self._runs[folder]  # of a kind that was submitted before another one was refused

    def _look(self) -> None:
        """Submit when nobody is waited for any more."""
        if self._runs or self._fault or not self._handed_in or len(self._handed_in) < self.expected:
            return
        kinds: dict[tuple[str, ...], list[tuple[Job, Path]]] = {}
        for job, folder in self._handed_in:
            kinds.setdefault(tuple(batch_options(job)[1:]), []).append((job, folder))
        try:
            for group in kinds.values():
                jobs, folders = [job for job, _ in group], [folder for _, folder in group]
                runs = submit_array(jobs, folders, self.place, at_once=self.at_once)
                self._runs |= dict(zip(folders, runs, strict=True))
        except PacelineError as fault:
            self._fault = fault
        self._changed.notify_all()
