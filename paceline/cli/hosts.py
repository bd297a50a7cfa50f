"""`paceline hosts`: lists of hosts, made and looked at."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.host_options import Allocation, SshConfig, read_hosts
from paceline.cli.options import Json, RunsDir
from paceline.cli.output import OutputColumn, TableForm, TableFormat, emit_table
from paceline.cli.terminal import echo
from paceline.core.errors import UserError
from paceline.core.hardware import SshSettings
from paceline.core.hosts import Host, compress, hostfile_text
from paceline.core.units import counted, there_are
from paceline.files.documents import write_text
from paceline.files.run_folder import runs_root
from paceline.machines import host_lists
from paceline.machines.host_keys import scan, write_known_hosts
from paceline.machines.host_lists import Parts, cut, write_groups
from paceline.machines.ssh.checks import Questions, check_hosts

FROM, PART, LOOK = "Where the hosts come from", "Which of them", "Looking at them"


def hosts(
    names: Annotated[
        str | None,
        typer.Argument(metavar="[FILE|LIST]", help="A hostfile, or names: node[001-004],gpu-a."),
    ] = None,
    etc_hosts: Annotated[
        str | None,
        typer.Option(
            "--from-etc-hosts",
            metavar="PATTERN",
            rich_help_panel=FROM,
            help="Names of /etc/hosts that hold this text, or match it (`*-node-*`).",
        ),
    ] = None,
    slurm: Annotated[
        bool,
        typer.Option(
            "--slurm",
            help="The hosts of the Slurm job that this shell is in.",
            rich_help_panel=FROM,
        ),
    ] = False,
    allocation: Allocation = None,
    idle: Annotated[
        bool, typer.Option("--idle", help="Slurm's idle hosts.", rich_help_panel=FROM)
    ] = False,
    partition: Annotated[
        str | None, typer.Option(help="Only idle hosts of this one.", rich_help_panel=FROM)
    ] = None,
    first: Annotated[
        bool, typer.Option("--first", help="The first host alone.", rich_help_panel=PART)
    ] = False,
    take: Annotated[
        int | None, typer.Option(min=1, help="So many from the front.", rich_help_panel=PART)
    ] = None,
    split: Annotated[
        int | None, typer.Option(min=1, help="Groups of so many.", rich_help_panel=PART)
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Devices of each.", rich_help_panel=PART)
    ] = None,
    keyscan: Annotated[
        bool,
        typer.Option(
            "--keyscan",
            rich_help_panel=LOOK,
            help="Show the fingerprints of the keys that the hosts show.",
        ),
    ] = False,
    known_hosts: Annotated[
        Path | None,
        typer.Option(
            "--write-known-hosts",
            metavar="FILE",
            rich_help_panel=LOOK,
            help="With --keyscan: a new file for the keys; ssh does not read it by itself.",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            rich_help_panel=LOOK,
            help="Whether each can be logged into without a password, and is fit to run on.",
        ),
    ] = False,
    ssh_config: SshConfig = None,
    runs_dir: RunsDir = None,
    fail_on_findings: Annotated[
        bool,
        typer.Option(
            "--fail-on-findings",
            rich_help_panel=LOOK,
            help="With --check: exit 3 when a host cannot be run on.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A new file; with --split a folder of files."),
    ] = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Make hostfiles, and look at the hosts in them.

    The text on standard output is itself a hostfile.

    Examples:

      paceline hosts --from-etc-hosts=-node- --slots 8 > hosts.txt

      paceline hosts hosts.txt --first

      paceline hosts 'node[001-064]' --split 8 -o groups

      paceline hosts --idle --partition gpu --take 4

      paceline hosts hosts.txt --keyscan
    """

    form = TableFormat.json if as_json else form
    if ssh_config is not None and not ssh_config.is_file():
        raise UserError(str(ssh_config), "is not a file")
    selected = _source(names, etc_hosts, slurm, allocation, idle, partition)
    selected = _selected(selected, first, take, slots)
    if known_hosts is not None and not keyscan:
        raise UserError(
            "--write-known-hosts", "writes what --keyscan finds", remedy="add --keyscan"
        )
    if sum((keyscan, check, split is not None)) > 1:
        raise UserError("--split, --keyscan, --check", "are asked for together", remedy="name one")
    if output is not None and (keyscan or check):
        raise UserError(
            "--output",
            "is for hostfiles, not for what --keyscan and --check say",
            remedy="leave it out",
        )
    if keyscan:
        _show_keys(selected, ssh_config, known_hosts, form)
    elif check:
        root = runs_root(runs_dir)
        folder = root if root.is_dir() else Path.cwd()
        _show_check(selected, ssh_config, folder, form, fail_on_findings)
    elif split is not None:
        _show_groups(selected, split, output, form)
    else:
        _show(selected, output, form)


def _source(
    names: str | None,
    etc_hosts: str | None,
    slurm: bool,
    allocation: str | None,
    idle: bool,
    partition: str | None,
) -> tuple[Host, ...]:
    """The hosts of the one source that was named."""
    job = allocation or (os.environ.get("SLURM_JOB_ID") if slurm else None)
    if slurm and job is None:
        raise UserError("--slurm", "this shell is in no Slurm job", remedy="--allocation JOBID")
    if job is not None and not job.isdigit():
        raise UserError("--allocation", f"{job!r} is not the number of a Slurm job")
    idle = idle or partition is not None
    if sum((names is not None, etc_hosts is not None, job is not None, idle)) != 1:
        raise UserError(
            "hosts",
            "come from one place",
            allowed="FILE, LIST, --from-etc-hosts, --slurm, --allocation, --idle",
        )
    if etc_hosts is not None:
        return host_lists.from_etc_hosts(etc_hosts)
    if job is not None:
        return host_lists.from_allocation(job)
    return host_lists.from_partition(partition) if idle else read_hosts(names)


def _selected(
    hosts: tuple[Host, ...], first: bool, take: int | None, slots: int | None
) -> tuple[Host, ...]:
    if first and take is not None:
        raise UserError("--first, --take", "are asked for together", remedy="name one")
    number = 1 if first else take
    if number is not None and number > len(hosts):
        raise UserError(f"--take {number}", there_are(len(hosts), "host"))
    chosen = hosts[:number]
    return tuple(host.model_copy(update={"slots": slots}) for host in chosen) if slots else chosen


def _show(hosts: Sequence[Host], output: Path | None, form: TableFormat) -> None:
    text = hostfile_text(hosts)
    if output is not None:
        if output.exists():
            raise UserError(str(output), "exists already", remedy="name a new file")
        write_text(output, text)
        echo(f"{counted(len(hosts), 'host')} in {output}", err=True)
    elif form is TableFormat.text:
        echo(text, nl=False)
    if form is not TableFormat.text:
        emit_table(
            _rows(hosts), [OutputColumn("host", "host"), OutputColumn("slots", "slots")], form
        )


def _rows(hosts: Sequence[Host]) -> list[dict[str, Any]]:
    return [{"host": host.name, "slots": host.slots} for host in hosts]


def _show_groups(hosts: Sequence[Host], size: int, output: Path | None, form: TableFormat) -> None:
    parts = cut(hosts, size)
    paths = write_groups(parts, output) if output is not None else ()
    rows: list[dict[str, Any]] = [
        {
            "group": number,
            "hosts": compress([host.name for host in group]),
            "nodes": len(group),
            "file": str(paths[number - 1]) if paths else None,
        }
        for number, group in enumerate(parts.groups, start=1)
    ]
    columns = [
        OutputColumn("group", "group", str, "right"),
        OutputColumn("nodes", "nodes", str, "right"),
        *([OutputColumn("file", "file")] if paths else []),
        OutputColumn("hosts", "hosts"),
    ]
    emit_table(rows, columns, form, document=_document(parts, paths))
    if parts.left_over:
        names = compress([host.name for host in parts.left_over])
        echo(f"note: left over: {names}", err=True)


def _document(parts: Parts, paths: Sequence[Path]) -> dict[str, Any]:
    return {
        "groups": [_rows(group) for group in parts.groups],
        "files": [str(path) for path in paths],
        "left_over": _rows(parts.left_over),
    }


def _show_keys(
    hosts: Sequence[Host], config: Path | None, known_hosts: Path | None, form: TableFormat
) -> None:
    keys = scan([host.name for host in hosts], config)
    columns = [
        OutputColumn("host", "host"),
        OutputColumn("kind", "key"),
        OutputColumn("state", "to ssh"),
        OutputColumn("fingerprint", "fingerprint"),
        OutputColumn("note", "note"),
    ]
    emit_table([asdict(key) for key in keys], columns, form)
    echo(
        "note: keys came over the network: compare the fingerprints on another way before "
        "you trust them",
        err=True,
    )
    if known_hosts is not None:
        number = write_known_hosts(keys, known_hosts)
        echo(
            f"{counted(number, 'key')} in {known_hosts}; ssh reads it with UserKnownHostsFile",
            err=True,
        )


def _show_check(
    hosts: Sequence[Host], config: Path | None, folder: Path, form: TableFormat, fail: bool
) -> None:
    """Ask what the SSH launcher asks before a run, and show what each host says."""
    settings = SshSettings(config=str(config.resolve()) if config else None)
    slots = sum(host.slots or 1 for host in hosts)
    questions = Questions(sys.executable, folder.resolve(), None, slots)
    checks = check_hosts([host.name for host in hosts], questions, settings)
    rows = [check.model_dump(mode="json") for check in checks]
    columns = [
        OutputColumn("host", "host"),
        OutputColumn("round_trip_s", "round trip", lambda v: f"{1e3 * v:.1f} ms", "right"),
        OutputColumn("clock_skew_s", "clock", lambda v: f"{1e3 * v:+.0f} ms", "right"),
        OutputColumn("python", "python"),
        OutputColumn("torch", "torch"),
        OutputColumn("folder", "runs folder"),
        OutputColumn("fault", "fault"),
        OutputColumn("remedy", "remedy"),
    ]
    emit_table(rows, columns, form)
    faulty = sum(check.fault is not None for check in checks)
    echo(f"{len(checks) - faulty:,} of {counted(len(checks), 'host')} can be run on", err=True)
    if fail and faulty:
        raise typer.Exit(3)
