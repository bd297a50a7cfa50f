"""Machines: each renders a Job as a script, starts that very script and watches it.

local, ssh and slurm are the launchers; placement chooses one for a request. node holds what every
node of a job runs, the same under ssh and Slurm; probe measures what a machine is and can reach.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from paceline.core.hardware import Cluster
from paceline.core.job import Job
from paceline.core.launchers import capabilities
from paceline.core.result import Status


@dataclass(frozen=True)
class JobEnd:
    """How a launcher itself knows that a job ended: a lost host, a state of the batch system."""

    status: Status
    reason: str
    hosts: tuple[str, ...] = ()
    """The hosts at fault."""


class Handle(Protocol):
    """A started job; what has a body here may be left out by a class that derives from this one."""

    @property
    def timed_out(self) -> bool:
        """True when the job's time limit has passed."""
        ...

    def poll(self) -> int | None:
        """The exit code when the job has ended, else None."""
        ...

    def stop(self) -> int:
        """End every process of the job; the exit code."""
        ...

    def sweep(self) -> None:
        """End what a finished job has left behind."""
        ...

    def verdict(self) -> JobEnd | None:
        """What the launcher knows of a job's end that the ranks cannot tell; None if nothing."""
        ...

    def restart(self) -> bool:
        """Start a job anew whose end the machine is to blame for; False where that is not done."""
        return False

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the run's record must tell of how it was started."""
        return ()

    @property
    def waiting(self) -> bool:
        """Whether the job has yet to begin, for lack of a place."""
        return False

    @property
    def phase(self) -> str:
        """What the job waits for or where it runs; empty where there is nothing to tell."""
        return ""


class Launcher(Protocol):
    """What the module of a launcher offers; `core.launchers.LAUNCHERS` has its line."""

    def render(self, job: Job) -> str:
        """The script that starts `job`; what a dry run prints."""
        ...

    def prepare(self, job: Job, folder: Path) -> None:
        """Write the job's files and its script into the run folder."""
        ...

    def submit(self, job: Job, folder: Path) -> Handle:
        """Start the script that `prepare` wrote."""
        ...

    def unfit_hosts(self, cluster: Cluster, folder: Path) -> dict[str, str]:
        """Return the named hosts on which nothing can be started, each with the reason."""
        ...


def launcher(name: str) -> Launcher:
    """Return the launcher called `name`; raises UserError when there is none."""
    return cast(Launcher, importlib.import_module(capabilities(name).module))
