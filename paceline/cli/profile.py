"""`paceline probe profile`: profile the time or the memory of a step."""

from __future__ import annotations

import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import host_options as place
from paceline.cli import options
from paceline.cli.options import Panel, ReportFormat
from paceline.cli.output import TableForm, TableFormat, emit
from paceline.cli.printing import print_notices, print_plan
from paceline.cli.progress import progress_display
from paceline.cli.run import STATUS_EXIT
from paceline.cli.terminal import echo
from paceline.core.errors import UserError, did_you_mean
from paceline.core.run_report import RunReport
from paceline.files.recipe import recipe_names
from paceline.files.run_folder import find_run, read_record, runs_root
from paceline.machines.placement import Request
from paceline.profiles.profile import PROFILE_PAGE
from paceline.profiles.tools import tool
from paceline.runs import flow
from paceline.runs.plan import Plan, make_plan, replan
from paceline.runs.profile_report import profile_document
from paceline.runs.profiling import length_text, with_profile, write_profile

STEPS_FIELDS = ("steps", "training.steps")
"""Fields of `--set` that set the length of a training."""


class ToolChoice(StrEnum):
    """Names of the profilers, as in `profiles.tools`."""

    torch = "torch"
    nsys = "nsys"
    nccl = "nccl"
    memory = "memory"


def profile(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            help="Recipe name or file, or a run to repeat under the profiler.",
            metavar="RECIPE|RUN",
            show_default=False,
        ),
    ] = None,
    tool_name: Annotated[
        ToolChoice,
        typer.Option(
            "--tool",
            help="Profiler; only one at a time, because profilers disturb each other.",
            rich_help_panel=Panel.profiler,
        ),
    ] = ToolChoice.torch,
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            envvar="RUN_CONF_PROFILE_RANKS",
            help="Ranks to profile: 0,8 or 0-3 or all; default: one per pipeline stage and node.",
            rich_help_panel=Panel.profiler,
        ),
    ] = None,
    steps: Annotated[
        str,
        typer.Option(
            metavar="A-B", help="First and last step to profile.", rich_help_panel=Panel.limits
        ),
    ] = "20-30",
    gpu_metrics: Annotated[
        bool,
        typer.Option(
            "--gpu-metrics",
            envvar="RUN_CONF_PROFILE_GPU_METRICS",
            help="With nsys: also sample the hardware counters of the GPUs, once per node.",
            rich_help_panel=Panel.profiler,
        ),
    ] = False,
    cpu_samples: Annotated[
        bool,
        typer.Option(
            "--cpu-samples",
            envvar="RUN_CONF_PROFILE_CPU",
            help="With nsys: also sample CPU activity.",
            rich_help_panel=Panel.profiler,
        ),
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            rich_help_panel=Panel.profiler,
            help="Read an existing file of the profiler; run nothing.",
        ),
    ] = None,
    variant: options.Variant = None,
    overrides: options.Overrides = None,
    engine: options.EngineName = None,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1, help="Devices per host, as for `paceline run`.", rich_help_panel=Panel.hosts
        ),
    ] = None,
    device: options.Device = options.DeviceKind.auto,
    cluster: options.ClusterName = None,
    dry_run: options.DryRun = False,
    timeout: options.Timeout = None,
    tag: options.Tag = None,
    probe: Annotated[
        bool,
        typer.Option(help="Measure the achievable GEMM throughput of this machine first (cached)."),
    ] = True,
    force: options.Force = False,
    html: options.Html = None,
    charts: options.ChartsFolder = None,
    runs_dir: options.RunsDir = None,
    form: TableForm = TableFormat.text,
    as_json: options.Json = False,
    *,
    location: place.HostOptions,
) -> None:
    """Show where the time or the memory of a training step goes, with one profiler.

    Profiling takes a run of its own. `compare` and `runs history` leave it out, because a
    profiler slows the steps that it records; the slowdown is measured on the other steps of the
    run. The files of the profiler are kept in the run's folder `profiles/`, their evaluation in
    profile.json.

    Examples:

      paceline probe profile tiny-llama                         where the time of a step goes

      paceline probe profile last --ranks all --steps 10-12     profile the newest run once more

      paceline probe profile tiny-llama --tool memory           memory in use over a step

      paceline probe profile --from trace.json.gz               evaluate an existing PyTorch trace

      paceline probe profile tiny-llama --tool nccl --devices 2  bytes per axis, measured, expected

      paceline probe profile --tool nccl --from nccl.log        evaluate an existing NCCL log
    """
    form = TableFormat.json if as_json else form
    if source is not None:
        used_parameters = {"source", "tool_name", "html", "charts", "form", "as_json"}
        options.refuse_unused(context, "--from", used_parameters)
        read = tool(tool_name.value).read_file(source)
        emit(profile_document(read, source.name), form, page=html, charts=charts)
        return
    if name is None:
        raise UserError(
            "paceline probe profile",
            "needs an input",
            allowed="one of RECIPE, RUN and --from FILE",
        )
    request = Request(
        recipe=name,
        variant=variant,
        overrides=options.with_engine(overrides, engine),
        devices=devices,
        device=device.value,
        cluster=cluster,
        timeout_s=timeout,
        force=force,
        where=location.where(),
        runs_dir=runs_dir,
    )
    first, last = parse_steps(_steps_or_nvidia_default(context, steps))
    flags = {"gpu_metrics": gpu_metrics, "cpu_samples": cpu_samples}
    if tool_name is not ToolChoice.nsys:
        options.refuse_unused(context, f"--tool {tool_name.value}", {*context.params} - {*flags})
        flags = {}
    plan = _plan(context, request)
    profiled_ranks = None if ranks is None else parse_ranks(ranks, plan.spec.world_size)
    plan = with_profile(plan, tool_name.value, profiled_ranks, first, last, **flags)
    print_notices(plan)
    if any(text.partition("=")[0].strip() in STEPS_FIELDS for text in overrides or ()):
        echo(f"note: {length_text(plan.spec)}", err=True)
    _refuse_unwritable(html, charts)
    if dry_run:
        print_plan(plan, ReportFormat.json if form is TableFormat.json else ReportFormat.text)
        return
    raise typer.Exit(print_profile(_run(plan, runs_dir, tag, probe), form, html, charts))


def _refuse_unwritable(html: Path | None, charts: Path | None) -> None:
    """Raise UserError, before anything runs, if an output file cannot be written."""
    if html and (html.is_dir() or not html.absolute().parent.is_dir()):
        raise UserError(
            f"--html {html}", "is not a file in an existing folder", allowed="path of a file"
        )
    if charts and charts.exists() and not charts.is_dir():
        raise UserError(
            f"--charts {charts}", "is not a folder", allowed="a folder; a missing one is created"
        )


def print_profile(
    report: RunReport, form: TableFormat, html: Path | None = None, charts: Path | None = None
) -> int:
    """Print and save the profile of a finished run, and return the run's exit code.

    A failed or cancelled run may have no profile. Raises UserError if a successful run has none.
    """
    status = STATUS_EXIT.get(report.result.status, 2)
    if status:
        echo(f"the run is {report.result.status}: {report.result.reason}", err=True)
    try:
        read = write_profile(report)
    except UserError as error:
        if not status:
            raise
        if report.result.status != "cancelled":
            echo(error, err=True)
        return status
    document = profile_document(read, report.result.recipe)
    emit(document, form, page=html, charts=charts)
    echo(f"page: {Path(report.folder) / PROFILE_PAGE}", err=True)
    return status


def _steps_or_nvidia_default(context: typer.Context, steps: str) -> str:
    """Return the value of the option, else that of NVIDIA's variables if they are set."""
    source = context.get_parameter_source("steps")
    bounds = [os.environ.get(f"RUN_CONF_PROFILE_{edge}_STEP") for edge in ("START", "STOP")]
    if source is None or source.name == "COMMANDLINE" or not any(bounds):
        return steps
    first, last = steps.split("-")
    return f"{bounds[0] or first}-{bounds[1] or last}"


def parse_steps(text: str) -> tuple[int, int]:
    """Return (first, last) of `20-30` or `20`; raise UserError for anything else."""
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise UserError(f"--steps {text}", "is not a range of steps", allowed="20-30 or 20, from 1")
    return first, last


def parse_ranks(text: str, world_size: int) -> list[int]:
    """Return the ranks of `0,8`, `0-3` or `all`; raise UserError for anything else."""
    if text == "all":
        return list(range(world_size))
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7}))?\s*", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise UserError(
                f"--ranks {text}", "is not a list of ranks", allowed="0,8 or 0-3 or all"
            )
        if int(match[2] or match[1]) >= world_size:
            allowed = f"0 to {world_size - 1}, all"
            raise UserError(
                f"--ranks {text}",
                f"contains a rank that does not exist among {world_size}",
                allowed=allowed,
            )
        ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(ranks)


def _plan(context: typer.Context, request: Request) -> Plan:
    """Return the plan of a recipe, or of the repetition of a stored run."""
    name, names = request.recipe, recipe_names()
    if name in names or name.endswith((".yaml", ".yml")):
        return make_plan(request)
    try:
        record = read_record(find_run(runs_root(request.runs_dir), name))
    except UserError as error:
        hint = did_you_mean(name, names)
        what = f"is not a recipe, and {error}"
        raise UserError(f"RECIPE|RUN {name!r}", what, remedy=hint or None) from error
    if record.spec is None or record.spec.bare:
        raise UserError(record.name, "was not started from a recipe, so it cannot be run again")
    used_parameters = {"name", "tool_name", "ranks", "steps", "dry_run", "tag", "probe"}
    used_parameters |= {
        "runs_dir",
        "html",
        "charts",
        "form",
        "as_json",
        "gpu_metrics",
        "cpu_samples",
    }
    options.refuse_unused(context, f"the stored run {record.name}", used_parameters)
    return replan(record.spec)


def _run(plan: Plan, runs_dir: Path | None, tag: str | None, probe: bool) -> RunReport:
    try:
        with progress_display(plan.spec) as watch:
            root, command = runs_root(runs_dir), flow.command_line()
            return flow.run(plan, root, command, watch, tag=tag, probe=probe)
    except flow.CancelledRunError as cancelled:
        return cancelled.report
