"""Options for hosts, launchers and CPU binding."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from paceline.cli.options import Panel
from paceline.core.errors import UserError, unreadable
from paceline.core.fabric import SATISFYING
from paceline.core.hardware import INTERFACE_NAME
from paceline.core.hosts import Host, expand, first_repeated, parse_hostfile
from paceline.core.launchers import LAUNCHERS
from paceline.core.text import whole_number
from paceline.files.documents import read_text
from paceline.machines.placement import HostPlacement

_FILE_NAME = re.compile(r".*/.*|hosts|hostfile|.+\.(?:txt|csv|lst|list|hosts)", re.DOTALL)
"""Text that looks like a file name, so a missing hostfile is not taken for a host."""

_LAUNCHER_NAMES = f"auto, {', '.join([*LAUNCHERS][:-1])} or {[*LAUNCHERS][-1]}"

Hosts = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|LIST",
        help="Hostfile with lines such as `node-1 slots=8`, or host names: node[001-004],gpu-a.",
        rich_help_panel=Panel.hosts,
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of hosts to use, or of nodes to request.",
        rich_help_panel=Panel.hosts,
    ),
]
LauncherOption = Annotated[
    str,
    typer.Option(
        "--launcher",
        help=f"How processes are started: {_LAUNCHER_NAMES}.",
        rich_help_panel=Panel.hosts,
    ),
]
Allocation = Annotated[
    str | None,
    typer.Option(
        metavar="JOBID",
        help="Run inside this Slurm job; default: the job of this shell.",
        rich_help_panel=Panel.hosts,
    ),
]
Interface = Annotated[
    str | None,
    typer.Option(
        help="Network interface for rendezvous and collectives.", rich_help_panel=Panel.hosts
    ),
]
DevicesOfEach = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Devices per host (on CPUs: processes); default: the slots of the hostfile, "
        "else all GPUs, else 1.",
        rich_help_panel=Panel.hosts,
    ),
]
Wait = Annotated[
    float,
    typer.Option(
        min=1,
        metavar="SECONDS",
        help="Maximum time to wait in Slurm's queue (exit code 4).",
        rich_help_panel=Panel.limits,
    ),
]
TimeLimit = Annotated[
    float,
    typer.Option(
        min=1,
        metavar="SECONDS",
        help="Maximum duration of the measurements.",
        rich_help_panel=Panel.limits,
    ),
]
Bind = Annotated[
    str | None,
    typer.Option(
        metavar="auto|none|FILE",
        help="CPU binding of the ranks.",
        rich_help_panel=Panel.hosts,
    ),
]
RequireTransport = Annotated[
    str | None,
    typer.Option(
        metavar="TRANSPORT",
        help="Transport that must carry collectives, else the run fails (exit code 3): "
        f"{', '.join(SATISFYING)}.",
        rich_help_panel=Panel.hosts,
    ),
]
SshConfig = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="SSH configuration file (default ~/.ssh/config).",
        rich_help_panel=Panel.hosts,
    ),
]


RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Ray cluster, or its dashboard as http://HOST:PORT (default RAY_ADDRESS).",
        rich_help_panel=Panel.hosts,
    ),
]
NodesPerTrial = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=Panel.parallel,
        help="Partition the hosts into groups of N nodes; each group executes runs one at a "
        "time. Default with --max-parallel: an even split.",
    ),
]
MaxParallel = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=Panel.parallel,
        help="Maximum number of concurrent runs. Default: one per group of hosts, 128 in "
        "Slurm's queue, 1 on a single machine.",
    ),
]


@dataclass(frozen=True)
class HostOptions:
    """Hosts to run on, and how processes are started there."""

    panel: ClassVar[Panel] = Panel.hosts
    hosts: Hosts = None
    nodes: Nodes = None
    launcher: LauncherOption = "auto"
    allocation: Allocation = None
    interface: Interface = None
    ssh_config: SshConfig = None
    ray_address: RayAddress = None

    def where(self) -> HostPlacement:
        """Return the placement that the options describe; raise UserError for invalid hosts."""
        return where(
            self.hosts,
            self.launcher,
            self.allocation,
            self.ssh_config,
            nodes=self.nodes,
            interface=self.interface,
            ray_address=self.ray_address,
        )


@dataclass(frozen=True)
class BoundHostOptions(HostOptions):
    """Host options of a training, whose ranks can be bound to cores."""

    bind: Bind = None
    require_transport: RequireTransport = None

    def where(self) -> HostPlacement:
        """Return the placement that the options describe; raise UserError for invalid hosts."""
        if self.bind not in (None, "auto", "none") and not Path(self.bind).is_file():
            raise typer.BadParameter("must be auto, none or a file", param_hint="--bind")
        transport = next((name for name in SATISFYING if name == self.require_transport), None)
        if self.require_transport and not transport:
            allowed = ", ".join(SATISFYING)
            raise typer.BadParameter(f"must be one of {allowed}", param_hint="--require-transport")
        return replace(super().where(), bind=self.bind, require_transport=transport)


def where(
    hosts: str | None,
    launcher: str,
    allocation: str | None,
    ssh_config: Path | None,
    *,
    nodes: int | None = None,
    interface: str | None = None,
    ray_address: str | None = None,
) -> HostPlacement:
    """Return the placement that the options describe; raise UserError for invalid hosts."""
    if launcher not in ("auto", *LAUNCHERS):
        raise typer.BadParameter(f"must be {_LAUNCHER_NAMES}", param_hint="--launcher")
    if interface is not None and not INTERFACE_NAME.fullmatch(interface):
        raise typer.BadParameter("is not a network interface", param_hint="--interface")
    if allocation is not None and whole_number(allocation) is None:
        raise typer.BadParameter("must be the number of a Slurm job", param_hint="--allocation")
    if ssh_config is not None and not ssh_config.is_file():
        raise UserError(str(ssh_config), "is not a file")
    return HostPlacement(
        hosts=read_hosts(hosts),
        nodes=nodes,
        launcher=None if launcher == "auto" else launcher,
        allocation=allocation,
        interface=interface,
        ssh_config=ssh_config,
        ray_address=ray_address,
    )


def read_hosts(text: str | None) -> tuple[Host, ...]:
    """Return the hosts of a hostfile or a list; raise UserError for anything else."""
    if text is None:
        return ()
    path = Path(text)
    if path.is_file():
        try:
            return parse_hostfile(read_text(path), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise unreadable(str(path), error) from error
    if _FILE_NAME.fullmatch(text):
        raise UserError(
            text, "is not a file", allowed="a hostfile, or host names: node[001-004],gpu-a"
        )
    names = expand(text, "--hosts")
    duplicate = first_repeated(names)
    if duplicate or not names:
        what = f"lists {duplicate} twice" if duplicate else "lists no host"
        raise UserError("--hosts", what)
    return tuple(Host(name=name) for name in names)
