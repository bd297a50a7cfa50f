"""The launchers and what each can do.

A launcher is a module of `paceline.machines` and its line in LAUNCHERS. Whoever depends on how
programs start asks for a capability, never for a launcher's name, so a new launcher needs no edit
elsewhere. The table is here because engines and files, which must not import `machines`, ask too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field

from paceline.core.errors import UserError


@dataclass(frozen=True)
class Capabilities:
    """What a launcher can do."""

    module: str
    """The module that offers what `paceline.machines.Launcher` names."""
    runs_here: bool = False
    """Ranks are processes of this machine, which therefore can be inspected and prepared."""
    needs_hosts: bool = False
    """Hosts must be named; node N of a job is the Nth of them."""
    queues: bool = False
    """Jobs outside an allocation wait for nodes; the scheduler picks them if no hosts are named."""
    allocations: bool = False
    """Runs can be steps of a job that runs already (`slurm.allocation`)."""
    restarts: bool = False
    """A job that lost a node is started again on others."""
    batch_scripts: bool = False
    """Batch scripts that a framework brings along can be submitted."""
    containers: bool = False
    """Programs can run in a container image (`slurm.container_image`)."""


LAUNCHERS = {
    "local": Capabilities("paceline.machines.local", runs_here=True),
    "ssh": Capabilities("paceline.machines.ssh", needs_hosts=True),
    "slurm": Capabilities(
        "paceline.machines.slurm",
        queues=True,
        allocations=True,
        restarts=True,
        batch_scripts=True,
        containers=True,
    ),
}


def capabilities(name: str) -> Capabilities:
    """Return what the launcher called `name` can do; raises UserError when there is none."""
    if name not in LAUNCHERS:
        raise UserError(
            f"launcher {name!r}", "is not available", allowed=", ".join(sorted(LAUNCHERS))
        )
    return LAUNCHERS[name]


def _known(name: str) -> str:
    if name not in LAUNCHERS:
        raise ValueError(f"{name!r} is not a launcher; allowed: {', '.join(sorted(LAUNCHERS))}")
    return name


LauncherName = Annotated[
    str, AfterValidator(_known), Field(json_schema_extra={"enum": [*LAUNCHERS]})
]
"""The name of a launcher, checked where a file or an option gives it."""
