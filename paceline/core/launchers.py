"""Launchers and their capabilities.

A launcher is a module of `paceline.machines` and an entry in LAUNCHERS. Code that depends on how
programs start checks a capability, not the name of a launcher. A new launcher therefore needs no
edit elsewhere. The table is in `core` because engines and files also use it, and they must not
import `machines`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field

from paceline.core.errors import UserError


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a launcher."""

    module: str
    """Module that implements the protocol `paceline.machines.Launcher`."""
    runs_here: bool = False
    """Ranks are processes of this machine, so they can be inspected and prepared."""
    needs_hosts: bool = False
    """Hosts must be given. Node N of a job is the Nth host."""
    queues: bool = False
    """Jobs outside an allocation wait for nodes. The scheduler chooses the nodes if no hosts are
    given."""
    allocations: bool = False
    """Runs can be steps of a running job (`slurm.allocation`)."""
    lists_hosts: bool = False
    """The module's `available_hosts` returns the hosts if none are given."""
    restarts: bool = False
    """A job that lost a node is restarted on other nodes."""
    outlives_controller: bool = False
    """A job continues when its controller dies. The module's `attach` returns its handle to a new
    one, `ended_code` its exit code, and `cancel_orphan` ends it."""
    batch_scripts: bool = False
    """Batch scripts that come with a framework can be submitted."""
    containers: bool = False
    """Programs can run in a container image (`slurm.container_image`)."""
    needs_image: bool = False
    """Programs always run in a container image."""


LAUNCHERS = {
    "local": Capabilities("paceline.machines.local", runs_here=True),
    "ssh": Capabilities("paceline.machines.ssh", needs_hosts=True),
    "slurm": Capabilities(
        "paceline.machines.slurm",
        queues=True,
        allocations=True,
        lists_hosts=True,
        restarts=True,
        outlives_controller=True,
        batch_scripts=True,
        containers=True,
    ),
    "ray": Capabilities("paceline.machines.ray", lists_hosts=True, outlives_controller=True),
    "kubernetes": Capabilities(
        "paceline.machines.kubernetes",
        lists_hosts=True,
        outlives_controller=True,
        needs_image=True,
    ),
}


def capabilities(name: str) -> Capabilities:
    """Return the capabilities of launcher `name`; raise UserError for an unknown name."""
    if name not in LAUNCHERS:
        raise UserError(
            f"launcher {name!r}", "is not available", allowed=", ".join(sorted(LAUNCHERS))
        )
    return LAUNCHERS[name]


def _check_name(name: str) -> str:
    if name not in LAUNCHERS:
        raise ValueError(f"{name!r} is not a launcher; allowed: {', '.join(sorted(LAUNCHERS))}")
    return name


LauncherName = Annotated[
    str, AfterValidator(_check_name), Field(json_schema_extra={"enum": [*LAUNCHERS]})
]
"""Name of a launcher, validated when a file or an option is read."""
