"""`paceline check`: check hosts before a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import host_options as place
from paceline.cli.options import ClusterName, Device, DeviceKind, Json, Panel, Prometheus, RunsDir
from paceline.cli.output import TableForm, TableFormat, emit
from paceline.cli.terminal import echo
from paceline.core.errors import EXIT_GATE_FAILED, EXIT_INCOMPLETE, PacelineError, UserError
from paceline.files import catalog
from paceline.files.documents import write_output
from paceline.files.run_folder import runs_root
from paceline.machines.placement import HostPlacement
from paceline.scaling.check.preflight import CheckRequest, check_document, check_metrics, node_line
from paceline.scaling.check.preflight import check as run_check

FAST = (0.5, 2, 60.0)
"""Seconds per measurement, partners per host, time limit in seconds."""
DEVICES_ONLY = (2.0, 0, 30.0)
NODE = (1.0, 0, 20.0)
"""The same three values for --node. Starting and judging take the rest of 30 s."""
HERE = place.HostOptions()
DEVICE_TIME_FRACTION = 2 / 3
"""Fraction of the time limit after which the process of a hung device is killed."""


def check(
    device: Device = DeviceKind.auto,
    devices: place.DevicesOfEach = None,
    fast: Annotated[
        bool,
        typer.Option(
            "--fast",
            help="Finish in less than 30 s: shorter measurements, two partners per host.",
            rich_help_panel=Panel.limits,
        ),
    ] = False,
    devices_only: Annotated[
        bool,
        typer.Option(
            "--devices-only",
            help="Check every device by itself in about 30 s, without pairs of hosts. "
            "Hanging devices are reported.",
            rich_help_panel=Panel.limits,
        ),
    ] = False,
    node: Annotated[
        bool,
        typer.Option(
            "--node",
            help="Check only this host in less than 30 s and print one line, for Slurm's Prolog "
            "and HealthCheckProgram. Exit code 0: fit, 3: slow or broken, 4: not finished.",
            rich_help_panel=Panel.limits,
        ),
    ] = False,
    cluster: ClusterName = None,
    max_parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of hosts that measure at the same time.",
            rich_help_panel=Panel.hosts,
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="CHECK",
            help="Compare with this earlier check (its folder or check.json).",
            rich_help_panel=Panel.criteria,
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="Maximum duration of the measurements.",
            rich_help_panel=Panel.limits,
        ),
    ] = None,
    wait: place.Wait = 600.0,
    fail_on_findings: Annotated[
        bool,
        typer.Option(
            "--fail-on-findings",
            help="Exit with 3 if a host is slow, broken or not reached.",
            rich_help_panel=Panel.criteria,
        ),
    ] = False,
    drain_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the hosts to drain to this file, one per line, for `sbatch --exclude "
            "./FILE`. Not written if most hosts fail.",
            rich_help_panel=Panel.criteria,
        ),
    ] = None,
    prometheus: Prometheus = None,
    runs_dir: RunsDir = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
    *,
    location: place.HostOptions,
) -> None:
    """Check all hosts at the same time and report which to drain, with the evidence.

    Each host is fit, suspect, slow, broken or not reached. If most hosts fail, the check itself is
    in doubt: no host is listed to drain, the drain file is not written, and the exit code is 4.

    Covers log-in, clocks, versions, limits and the shared folder; GPUs and their health; disks;
    GEMM throughput, memory bandwidth and all-reduce, within each host and in pairs of hosts. Eight
    or more hosts are compared with each other, fewer with their own earlier checks or with
    --against.

    Examples:

      paceline check --fast                        this machine

      paceline check --node                        this host, in a Slurm prolog

      paceline check --hosts hosts.txt             over SSH

      paceline check --allocation 4711 --fail-on-findings

      paceline check --cluster eks.yaml            all nodes of a Kubernetes selector

      paceline check --hosts hosts.txt --devices-only --drain-file bad.txt
    """
    if devices_only and (fast or max_parallel):
        raise UserError("--devices-only", "cannot be combined with --fast or --max-parallel")
    if node and (fast or devices_only or max_parallel or drain_file or cluster or location != HERE):
        raise UserError(
            "--node",
            "checks this host alone, one device at a time",
            remedy="leave out --fast, --devices-only, --max-parallel, --drain-file and hosts",
        )
    # Slurm sets its variables in a prolog as well, but there the check must start no step.
    placement = HostPlacement(launcher="local") if node else location.where()
    devices_only = devices_only or node
    seconds, partners, limit_s = (
        NODE if node else DEVICES_ONLY if devices_only else FAST if fast else (2.0, 7, 300.0)
    )
    request = CheckRequest(
        where=placement,
        device=device.value,
        devices=devices,
        site=catalog.cluster(cluster) if cluster else None,
        seconds=seconds,
        num_rounds=partners,
        at_once=max_parallel,
        limit_s=time_limit or limit_s,
        wait_s=wait,
        against=against,
        alone_s=DEVICE_TIME_FRACTION * (time_limit or limit_s) if devices_only else None,
    )
    if node:
        _check_node(request, runs_root(runs_dir), prometheus, as_json)
        return
    outcome = run_check(request, runs_root(runs_dir), lambda what: echo(f"  {what}", err=True))
    for notice in outcome.notices:
        echo(f"note: {notice}", err=True)
    emit(check_document(outcome), TableFormat.json if as_json else form)
    if prometheus is not None:
        write_output(prometheus, check_metrics(outcome.report))
    if outcome.report.drain_withheld:
        if drain_file is not None:
            echo(f"note: {drain_file} is not written", err=True)
        raise typer.Exit(EXIT_INCOMPLETE)
    if drain_file is not None:
        write_output(drain_file, "".join(f"{host}\n" for host in outcome.report.drain))
    if fail_on_findings and outcome.report.drain:
        raise typer.Exit(3)


def _check_node(request: CheckRequest, root: Path, prometheus: Path | None, as_json: bool) -> None:
    """Check this host and print one line; every fault of the check itself exits with 4."""
    try:
        outcome = run_check(request, root, lambda _: None)
    except (PacelineError, OSError) as error:
        echo(f"not finished: {' '.join(str(error).split())}")
        raise typer.Exit(EXIT_INCOMPLETE) from error
    if as_json:
        emit(check_document(outcome), TableFormat.json)
    else:
        echo(node_line(outcome.report))
    if prometheus is not None:
        write_output(prometheus, check_metrics(outcome.report))
    if outcome.report.drain_withheld:
        raise typer.Exit(EXIT_INCOMPLETE)
    if outcome.report.drain:
        raise typer.Exit(EXIT_GATE_FAILED)
