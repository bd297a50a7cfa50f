"""Machines: each renders a Job as a script, starts that very script and watches it.

One file per kind of machine, found by its name.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Protocol, cast

from paceline.core.run import Job
from paceline.errors import UserError


class Handle(Protocol):
    """A started job."""

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


class Launcher(Protocol):
    """What a module of this folder offers."""

    def render(self, job: Job) -> str:
        """The script that starts `job`; what a dry run prints."""
        ...

    def prepare(self, job: Job, folder: Path) -> None:
        """Write the job's files and its script into the run folder."""
        ...

    def submit(self, job: Job, folder: Path) -> Handle:
        """Start the script that `prepare` wrote."""
        ...


def launcher_names() -> list[str]:
    """Every kind of machine that there is a file for."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def launcher(name: str) -> Launcher:
    """The launcher called `name`; raises UserError when there is none."""
    names = launcher_names()
    if name not in names:
        raise UserError(f"launcher {name!r}", "is not available", allowed=", ".join(names))
    return cast(Launcher, importlib.import_module(f"{__name__}.{name}"))
