"""Launchers: each renders a Job as a script, starts exactly that script and monitors it.

local, ssh, slurm, ray and kubernetes are the launchers; placement chooses one for a request. node
holds the programs that every node of a job runs under all of them but local. probe measures a
machine's properties and achievable rates.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from paceline.core.hardware import Cluster
from paceline.core.hosts import Host
from paceline.core.job import Job
from paceline.core.launchers import LAUNCHERS, capabilities
from paceline.core.result import Status


@dataclass(frozen=True)
class JobEnd:
    """End of a job as known to its launcher: a lost host, or a state of the batch system."""

    status: Status
    reason: str
    hosts: tuple[str, ...] = ()
    """Hosts at fault."""


@dataclass(frozen=True)
class UnfitHost:
    """Reason for starting no job on a host."""

    reason: str
    reached: bool = True
    """False if the host did not answer; the network or this machine may be the cause."""


class Handle(Protocol):
    """A started job. Subclasses may omit the methods that have a body here."""

    @property
    def timed_out(self) -> bool:
        """True when the job's time limit has passed."""
        ...

    def poll(self) -> int | None:
        """Return the exit code if the job has ended, else None."""
        ...

    def stop(self) -> int:
        """End every process of the job and return the exit code."""
        ...

    def sweep(self) -> None:
        """End processes that a finished job has left behind."""
        ...

    def verdict(self) -> JobEnd | None:
        """Return what the launcher knows of the job's end; None if only the ranks can tell."""
        ...

    def restart(self) -> bool:
        """Restart a job that ended through a fault of the machine.

        Returns False if it is not restarted.
        """
        return False

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about how the job was started, for the run's record."""
        return ()

    @property
    def waiting(self) -> bool:
        """True while the job waits for resources before it starts."""
        return False

    @property
    def phase(self) -> str:
        """Reason why the job waits, or where it runs; empty if there is nothing to report."""
        return ""


class Launcher(Protocol):
    """Interface of a launcher's module, which is registered in `core.launchers.LAUNCHERS`."""

    def render(self, job: Job) -> str:
        """Return the script that starts `job`, as shown by a dry run."""
        ...

    def prepare(self, job: Job, folder: Path) -> None:
        """Write the job's files and its script into the run folder."""
        ...

    def submit(self, job: Job, folder: Path) -> Handle:
        """Start the script that `prepare` wrote."""
        ...

    def unfit_hosts(self, cluster: Cluster, folder: Path) -> dict[str, UnfitHost]:
        """Return the named hosts on which no job can be started, each with the reason."""
        ...

    def available_hosts(self, cluster: Cluster) -> tuple[Host, ...]:
        """Return the hosts to use if none are given (capability `lists_hosts`)."""
        ...

    def attach(self, job: Job, folder: Path) -> Handle | None:
        """Return a job that has lost its controller (capability `outlives_controller`)."""
        ...

    def ended_code(self, folder: Path) -> int | None:
        """Return the recorded exit code of a job (capability `outlives_controller`)."""
        ...

    def cancel_orphan(self, folder: Path) -> str | None:
        """End a job that has lost its controller, and return its name, if there is one."""
        ...


def launcher(name: str) -> Launcher:
    """Return the launcher called `name`; raises UserError if there is none."""
    return cast(Launcher, importlib.import_module(capabilities(name).module))


def cancel_orphan(folder: Path) -> str | None:
    """End the job of a run whose controller has died; return launcher and name, if there is any.

    Raises SystemFaultError if the job may still run.
    """
    for name, can in LAUNCHERS.items():
        if can.outlives_controller and (job := launcher(name).cancel_orphan(folder)):
            return f"{name} job {job}"
    return None
