"""`paceline run`: train a recipe and report its speed."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import host_options as place
from paceline.cli import options
from paceline.cli.bundle_plan import bundle_plan
from paceline.cli.layout_options import LayoutOptions, devices_per_host, other_axes_of_one
from paceline.cli.options import Panel
from paceline.cli.output import emit
from paceline.cli.printing import ExecutionOptions, print_notices, print_plan
from paceline.cli.progress import progress_display
from paceline.cli.repeat import RepeatOptions, repeat_runs
from paceline.core.errors import UserError
from paceline.core.fabric import NETWORK_ONLY
from paceline.core.layout import Layout
from paceline.files.recipe import load_recipe
from paceline.files.run_folder import runs_root
from paceline.machines.placement import Request
from paceline.report.run_document import run_document
from paceline.runs import flow
from paceline.runs.plan import Plan, make_plan


class LaunchUnit(StrEnum):
    """Unit for which the user's program is started once."""

    node = "node"
    device = "device"


USED_BY_FROM = ("bundle", "dry_run", "tag", "probe", "runs_dir", "form", "as_json")
"""Parameters that --from uses."""
STATUS_EXIT = {"ok": 0, "incomplete": 4, "cancelled": 4}
"""Exit code by status; every other status is a system fault (2)."""


def run(
    context: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="Recipe (name or file), or Hugging Face model (name, folder or config.json).",
            metavar="RECIPE",
            show_default=False,
        ),
    ] = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="Your own program to measure, with its arguments.",
            metavar="-- PROGRAM ...",
            show_default=False,
        ),
    ] = None,
    launch_per: Annotated[
        LaunchUnit | None,
        typer.Option(
            help="Start PROGRAM once per `node`, as typed (default), or per `device`, "
            "with the variables that torchrun sets, such as RANK.",
            rich_help_panel=Panel.hosts,
        ),
    ] = None,
    variant: options.Variant = None,
    overrides: options.Overrides = None,
    engine: options.EngineName = None,
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices",
            "--gpus-per-node",
            min=1,
            help="Devices per host; default: all GPUs, or two processes on a CPU, or more if the"
            " layout needs them.",
            rich_help_panel=Panel.hosts,
        ),
    ] = None,
    gpus: options.Gpus = None,
    device: options.Device = options.DeviceKind.auto,
    cluster: options.ClusterName = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="BUNDLE",
            rich_help_panel=Panel.recipe,
            help="Repeat the run of a bundle; use --dry-run first to see its commands. Takes no "
            "RECIPE.",
        ),
    ] = None,
    dry_run: options.DryRun = False,
    timeout: options.Timeout = None,
    force: options.Force = False,
    *,
    shared: LayoutOptions,
    location: place.BoundHostOptions,
    repeats: RepeatOptions,
    how: ExecutionOptions,
) -> None:
    """Benchmark a recipe: train it on this machine or on hosts, measure it, and write a report.

    Examples:

      paceline run tiny-llama                        a first run on a new machine

      paceline run tiny-llama --set layout.zero_stage=3 --set steps=100

      paceline run tiny-llama --gpus 4 --tp 2 --pp 2 --seq-len 1k --steps 50

      paceline run llama31-8b --dry-run              print the commands without running them

      paceline run tiny-llama --hosts node[001-004]  over SSH, or --launcher slurm --nodes 4

      paceline run tiny-llama --repeat 5             measure the run-to-run variation

      paceline run tiny-llama --interleave "" layout.zero_stage=3

      paceline run --interleave tiny-llama tiny-gpt

      paceline run --from RUN.bundle.tar.gz --dry-run            how to repeat a bundled run

      paceline run -- torchrun --nproc-per-node 8 train.py       measure your own program

    Any parallel layout can be set. A layout that cannot run is refused with the reason
    (docs/dev/layout-rules.md).

    Progress goes to standard error, the report to standard output. A run is stored in one folder:
    job.sh, logs, steps, result.json and report.html.
    """
    if bundle is not None:
        options.refuse_unused(context, "--from", USED_BY_FROM)
        repetition = bundle_plan(bundle, how, dry_run)
        raise typer.Exit(_execute(repetition, how) if repetition else 0)
    changes = options.with_engine((*shared.overrides, *(overrides or ())), engine)
    where = location.where()
    if shared.dp and recipe:
        changes = (
            *other_axes_of_one(load_recipe(recipe, variant, changes).layout, changes),
            *changes,
        )
    if gpus or shared.dp:
        layout = load_recipe(recipe, variant, changes).layout if recipe else Layout()
        hosts = where.nodes or len(where.hosts) or 1
        devices = devices_per_host(gpus, shared.dp, layout, devices, hosts)
    request = Request(
        dry_run=dry_run,
        recipe=recipe or "",
        variant=variant,
        overrides=changes,
        devices=devices,
        device=device.value,
        cluster=cluster,
        timeout_s=timeout,
        force=force,
        where=where,
        runs_dir=how.runs_dir,
        command=tuple(command or ()),
        per=launch_per.value if launch_per else None,
    )
    if launch_per and not command:
        raise UserError(
            "--launch-per", "requires a program of your own", remedy="-- PROGRAM [ARGUMENT ...]"
        )
    if repeats.are_requested:
        raise typer.Exit(repeat_runs(request, repeats, how, dry_run))
    if recipe is None and not command:
        raise UserError("RECIPE", "is missing", remedy="`paceline run --help` shows what it takes")
    if repeats.nodes_per_trial or repeats.max_parallel:
        raise UserError(
            "--nodes-per-trial, --max-parallel",
            "apply to several runs",
            remedy="add --repeat, or use --nodes N for a single run",
        )
    plan = make_plan(request)
    transport = plan.spec.cluster.require_transport
    if where.require_transport and plan.spec.cluster.nodes == 1 and transport in NETWORK_ONLY:
        raise UserError(
            f"--require-transport {transport}",
            "applies to connections between nodes, and this run has one node",
            allowed="nvlink or sockets on one node",
        )
    print_notices(plan)
    if dry_run:
        print_plan(plan, how.output_format)
        return
    raise typer.Exit(_execute(plan, how))


def _execute(plan: Plan, how: ExecutionOptions) -> int:
    root = runs_root(how.runs_dir)
    try:
        with progress_display(plan.spec) as watch:
            report = flow.run(plan, root, flow.command_line(), watch, tag=how.tag, probe=how.probe)
    except flow.UnwrittenReportError as fault:
        emit(run_document(fault.report), how.output_format, headline=False)
        raise
    except flow.CancelledRunError as cancelled:
        report = cancelled.report
    emit(run_document(report), how.output_format, headline=False)
    fabric = report.result.fabric
    if fabric and fabric.problem and report.result.status == "failed":
        return 3
    return STATUS_EXIT.get(report.result.status, 2)
