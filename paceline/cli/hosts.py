"""`paceline check hosts`: create hostfiles, and check the hosts in them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.host_options import Allocation, SshConfig, read_hosts
from paceline.cli.options import RunsDir
from paceline.cli.output import TableFormat, TableOptions, emit_table
from paceline.cli.terminal import echo
from paceline.core.errors import UserError
from paceline.core.hardware import SshSettings
from paceline.core.hosts import Host, hostfile_text
from paceline.core.text import whole_number
from paceline.core.units import pluralize, there_are
from paceline.files.documents import write_output
from paceline.files.run_folder import runs_root
from paceline.machines.slurm.client import allocation_hosts, partition_hosts
from paceline.machines.ssh.checks import HostRequirements, check_hosts
from paceline.report.document import Column


def hosts(
    names: Annotated[
        str | None,
        typer.Argument(metavar="[FILE|LIST]", help="Hostfile, or host names: node[001-004],gpu-a."),
    ] = None,
    slurm: Annotated[
        bool,
        typer.Option(
            "--slurm",
            help="Use the hosts of this shell's Slurm job.",
        ),
    ] = False,
    allocation: Allocation = None,
    idle: Annotated[bool, typer.Option("--idle", help="Use the idle hosts of Slurm.")] = False,
    partition: Annotated[
        str | None,
        typer.Option(help="Use only the idle hosts of this Slurm partition."),
    ] = None,
    head: Annotated[bool, typer.Option("--head", help="Select only the first host.")] = False,
    take: Annotated[int | None, typer.Option(min=1, help="Select the first N hosts.")] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Devices per host.")] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Check that every host accepts a log-in without a password and can run Paceline.",
        ),
    ] = False,
    ssh_config: SshConfig = None,
    runs_dir: RunsDir = None,
    fail_on_findings: Annotated[
        bool,
        typer.Option(
            "--fail-on-findings",
            help="With --check: exit with 3 if a host cannot be used.",
        ),
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the hostfile to this new file.")
    ] = None,
    *,
    table: TableOptions,
) -> None:
    """Create hostfiles, and check the hosts in them.

    The text on standard output is itself a hostfile.

    Examples:

      paceline check hosts 'node[001-064]' --slots 8 > hosts.txt

      paceline check hosts hosts.txt --head

      paceline check hosts --idle --partition gpu --take 4

      paceline check hosts hosts.txt --check
    """
    if ssh_config is not None and not ssh_config.is_file():
        raise UserError(str(ssh_config), "is not a file")
    selected_hosts = _select_hosts(
        _source(names, slurm, allocation, idle, partition), head, take, slots
    )
    if not check:
        _show(selected_hosts, output, table.output_format)
        return
    if output is not None:
        raise UserError(
            "--output", "writes hostfiles and does not apply to --check", remedy="leave it out"
        )
    root = runs_root(runs_dir)
    folder = root if root.is_dir() else Path.cwd()
    _show_check(selected_hosts, ssh_config, folder, table.output_format, fail_on_findings)


def _source(
    names: str | None, slurm: bool, allocation: str | None, idle: bool, partition: str | None
) -> tuple[Host, ...]:
    """Return the hosts of the selected source."""
    job = allocation or (os.environ.get("SLURM_JOB_ID") if slurm else None)
    if slurm and job is None:
        raise UserError(
            "--slurm", "this shell does not run in a Slurm job", remedy="--allocation JOBID"
        )
    if job is not None and whole_number(job) is None:
        raise UserError("--allocation", f"{job!r} is not the number of a Slurm job")
    idle = idle or partition is not None
    if sum((names is not None, job is not None, idle)) != 1:
        raise UserError(
            "hosts", "need exactly one source", allowed="FILE, LIST, --slurm, --allocation, --idle"
        )
    if job is not None:
        return allocation_hosts(job)
    return partition_hosts(partition) if idle else read_hosts(names)


def _select_hosts(
    hosts: tuple[Host, ...], first: bool, take: int | None, slots: int | None
) -> tuple[Host, ...]:
    if first and take is not None:
        raise UserError("--head, --take", "exclude each other", remedy="name one")
    number = 1 if first else take
    if number is not None and number > len(hosts):
        raise UserError(f"--take {number}", there_are(len(hosts), "host"))
    selected_hosts = hosts[:number]
    return (
        tuple(host.model_copy(update={"slots": slots}) for host in selected_hosts)
        if slots
        else selected_hosts
    )


def _show(hosts: Sequence[Host], output: Path | None, form: TableFormat) -> None:
    text = hostfile_text(hosts)
    if output is not None:
        if output.exists():
            raise UserError(str(output), "exists already", remedy="name a new file")
        write_output(output, text)
        echo(f"{pluralize(len(hosts), 'host')} in {output}", err=True)
    elif form is TableFormat.text:
        echo(text, nl=False)
    if form is not TableFormat.text:
        rows = [{"host": host.name, "slots": host.slots} for host in hosts]
        emit_table(rows, [Column("host", "host"), Column("slots", "slots")], form)


def _show_check(
    hosts: Sequence[Host], config: Path | None, folder: Path, form: TableFormat, fail: bool
) -> None:
    """Run the checks that the SSH launcher runs before a job, and print them per host."""
    settings = SshSettings(config=str(config.resolve()) if config else None)
    slots = sum(host.slots or 1 for host in hosts)
    questions = HostRequirements(sys.executable, folder.resolve(), None, slots)
    checks = check_hosts([host.name for host in hosts], questions, settings)
    rows = [check.model_dump(mode="json") for check in checks]
    columns = [
        Column("host", "host"),
        Column("round_trip_s", "round trip", lambda v: f"{1e3 * v:.1f} ms", "right"),
        Column("clock_skew_s", "clock", lambda v: f"{1e3 * v:+.0f} ms", "right"),
        Column("python", "python"),
        Column("torch", "torch"),
        Column("folder", "runs folder"),
        Column("fault", "fault"),
        Column("remedy", "remedy"),
    ]
    emit_table(rows, columns, form)
    faulty = sum(check.fault is not None for check in checks)
    echo(f"{len(checks) - faulty:,} of {pluralize(len(checks), 'host')} can be used", err=True)
    if fail and faulty:
        raise typer.Exit(3)
