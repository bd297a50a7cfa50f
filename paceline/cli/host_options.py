"""Options that say on which hosts something runs, and how programs start there."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from paceline.core.errors import UserError, unreadable
from paceline.core.hardware import INTERFACE_NAME
from paceline.core.hosts import Host, expand, first_repeated, parse_hostfile
from paceline.core.launchers import LAUNCHERS
from paceline.machines.placement import Where

_FILE_NAME = re.compile(r".*/.*|hosts|hostfile|.+\.(?:txt|csv|lst|list|hosts)", re.DOTALL)
"""A hostfile that is not there, which is no host that cannot be reached."""

_LAUNCHER_NAMES = f"auto, {', '.join([*LAUNCHERS][:-1])} or {[*LAUNCHERS][-1]}"

Hosts = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|LIST",
        help="A hostfile (`node-1 slots=8` a line), or names: node[001-004],gpu-a.",
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option(min=1, help="Number of hosts to use, or of nodes from Slurm."),
]
LauncherOption = Annotated[
    str,
    typer.Option(
        "--launcher",
        help=f"{_LAUNCHER_NAMES}. auto: Slurm inside an allocation, SSH with --hosts, Slurm "
        "where it is installed and --nodes is above 1, else this machine.",
    ),
]
Allocation = Annotated[
    str | None,
    typer.Option(
        metavar="JOBID",
        help="Run as steps inside this Slurm job; default the one that this shell is in.",
    ),
]
Interface = Annotated[
    str | None,
    typer.Option(help="Network interface for rendezvous and collectives."),
]
DevicesOfEach = Annotated[
    int | None,
    typer.Option(min=1, help="Devices (CPU: processes) of each host; default slots, GPUs or 1."),
]
Wait = Annotated[
    float,
    typer.Option(
        min=1, metavar="SECONDS", help="Give up when Slurm has no place for so long (exit 4)."
    ),
]
Bind = Annotated[
    str | None,
    typer.Option(
        metavar="auto|none|FILE",
        help="Bind ranks to the cores nearest their device, or as a file says.",
    ),
]
SshConfig = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="ssh's configuration, instead of ~/.ssh/config."),
]


NodesPerTrial = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel="Place",
        help="Share the hosts out in parts of so many nodes, on each of which one run after the "
        "other goes on. Default with --max-parallel: as many as share the hosts evenly.",
    ),
]
MaxParallel = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel="Place",
        help="Runs at the same time: on parts of the hosts as many as fit, in Slurm's queue 128; "
        "on one machine 1, and more share its cores or GPUs and disturb each other.",
    ),
]


@dataclass(frozen=True)
class HostOptions:
    """On which hosts something runs, and how programs start there."""

    panel: ClassVar[str] = "Place"
    hosts: Hosts = None
    nodes: Nodes = None
    launcher: LauncherOption = "auto"
    allocation: Allocation = None
    interface: Interface = None
    ssh_config: SshConfig = None

    def where(self) -> Where:
        """Return the place that the options name; raises UserError for unreadable hosts."""
        return where(
            self.hosts,
            self.launcher,
            self.allocation,
            self.ssh_config,
            nodes=self.nodes,
            interface=self.interface,
        )


@dataclass(frozen=True)
class BoundHostOptions(HostOptions):
    """The same for a training, whose ranks can be bound to cores."""

    bind: Bind = None

    def where(self) -> Where:
        """Return the place that the options name; raises UserError for unreadable hosts."""
        if self.bind not in (None, "auto", "none") and not Path(self.bind).is_file():
            raise typer.BadParameter("must be auto, none or a file", param_hint="--bind")
        return replace(super().where(), bind=self.bind)


def where(
    hosts: str | None,
    launcher: str,
    allocation: str | None,
    ssh_config: Path | None,
    *,
    nodes: int | None = None,
    interface: str | None = None,
) -> Where:
    """Return the place that the options name; raises UserError for unreadable hosts."""
    if launcher not in ("auto", *LAUNCHERS):
        raise typer.BadParameter(f"must be {_LAUNCHER_NAMES}", param_hint="--launcher")
    if interface is not None and not INTERFACE_NAME.fullmatch(interface):
        raise typer.BadParameter("is no network interface", param_hint="--interface")
    if allocation is not None and not allocation.isdigit():
        raise typer.BadParameter("must be the number of a Slurm job", param_hint="--allocation")
    if ssh_config is not None and not ssh_config.is_file():
        raise UserError(str(ssh_config), "is not a file")
    return Where(
        hosts=read_hosts(hosts),
        nodes=nodes,
        launcher=None if launcher == "auto" else launcher,
        allocation=allocation,
        interface=interface,
        ssh_config=ssh_config,
    )


def read_hosts(text: str | None) -> tuple[Host, ...]:
    """The hosts of a hostfile, or of a list; raises UserError for what is neither."""
    if text is None:
        return ()
    path = Path(text)
    if path.is_file():
        try:
            return parse_hostfile(path.read_text(encoding="utf-8-sig"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise unreadable(str(path), error) from error
    if _FILE_NAME.fullmatch(text):
        raise UserError(text, "is not a file", allowed="a hostfile, or names: node[001-004],gpu-a")
    names = expand(text, "--hosts")
    repeated = first_repeated(names)
    if repeated or not names:
        what = f"names {repeated} twice" if repeated else "names no host"
        raise UserError("--hosts", what)
    return tuple(Host(name=name) for name in names)
