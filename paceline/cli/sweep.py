"""`paceline sweep`: run a recipe in all combinations of some settings."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from paceline.cli import host_options as place
from paceline.cli import model_options as model
from paceline.cli import options, quantities
from paceline.cli.layout_options import devices_per_host
from paceline.cli.layout_progress import sweep_display
from paceline.cli.options import Panel
from paceline.cli.output import ReportFormat, TableFormat, TableOptions, emit, render
from paceline.cli.printing import print_plan
from paceline.cli.progress import run_headline
from paceline.cli.terminal import echo
from paceline.core.axes import AXES
from paceline.core.errors import (
    EXIT_BAD_INPUT,
    EXIT_INCOMPLETE,
    EXIT_OK,
    EXIT_SYSTEM_FAULT,
    UserError,
)
from paceline.core.layout import AXIS_FIELDS, Layout
from paceline.core.units import pluralize
from paceline.estimate.estimates import MAX_P_OOM_TO_RUN
from paceline.files.documents import write_text, write_value
from paceline.files.recipe import load_recipe
from paceline.files.run_folder import runs_root
from paceline.layouts.sweep.plan import Sweep, SweepOptions, dimensions, new_sweep
from paceline.layouts.sweep.report import memory_note, sweep_document
from paceline.layouts.sweep.result import SweepResult, label
from paceline.layouts.sweep.study import study_combinations
from paceline.layouts.sweep.trials import SweepTrial, run_sweep, sweep_result, sweep_trials
from paceline.machines.placement import Request
from paceline.report.theme import EXPORT
from paceline.runs.flow import command_line
from paceline.runs.logged_run import NATIVE

SWEEP_FILE, TABLE_FILE, PAGE_FILE = "sweep.json", "results.csv", "report.html"
CHART_FILE = "speed-memory.svg"


def _list(what: str) -> object:
    return typer.Option(metavar="LIST", help=what)


def _axis_lists() -> type[Any]:
    """Return a group of options, one for the sizes of each axis."""
    help_by_axis = [(axis.name, axis.sweep_help) for axis in AXES if axis.name in AXIS_FIELDS]
    options = [(name, Annotated[str | None, _list(words)], None) for name, words in help_by_axis]
    return make_dataclass("AxisSizes", options, frozen=True)


@dataclass(frozen=True)
class AxisLists(_axis_lists()):
    """Sizes of the parallel axes that a sweep varies."""

    panel: ClassVar[Panel] = Panel.search


def sweep(
    recipe: model.Recipe,
    axes: AxisLists,
    zero: Annotated[str | None, _list("ZeRO stages: 0 to 3.")] = None,
    mbs: Annotated[str | None, _list("Micro-batch sizes, in sequences.")] = None,
    recompute: Annotated[
        str | None, _list("Activation checkpointing: none, selective, full, budget.")
    ] = None,
    gbs: Annotated[str | None, _list("Global batch sizes, in sequences.")] = None,
    study: Annotated[
        str | None,
        typer.Option(
            metavar="TABLE[,TABLE]",
            help="Run exactly the layouts of published tables of the recipe, without pruning.",
            rich_help_panel=Panel.search,
        ),
    ] = None,
    seq_len: Annotated[str | None, _list("Sequence lengths, in tokens.")] = None,
    dtype: Annotated[str | None, _list("Data types of the GEMMs, e.g. bf16,fp8.")] = None,
    steps: Annotated[str | None, _list("Numbers of training steps.")] = None,
    variant: options.Variant = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE[,VALUE...]",
            help="Override a recipe field; several values make it a dimension of the sweep.",
            rich_help_panel=Panel.recipe,
        ),
    ] = None,
    engine: options.EngineName = None,
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices",
            "--gpus-per-node",
            min=1,
            help="Devices per host; default: all GPUs, or on a CPU as many processes as the "
            "largest layout needs.",
            rich_help_panel=Panel.hosts,
        ),
    ] = None,
    gpus: options.Gpus = None,
    device: options.Device = options.DeviceKind.auto,
    cluster: options.ClusterName = None,
    nodes_per_trial: place.NodesPerTrial = None,
    max_parallel: place.MaxParallel = None,
    repeat: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of runs per combination; all combinations run once before any runs again.",
            rich_help_panel=Panel.limits,
        ),
    ] = 1,
    timeout: options.Timeout = None,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name of the sweep; a new name measures everything again.",
            rich_help_panel=Panel.output,
        ),
    ] = None,
    no_prune: Annotated[
        bool,
        typer.Option(
            "--no-prune",
            help="Also run combinations that the estimate would skip.",
            rich_help_panel=Panel.search,
        ),
    ] = False,
    prune_above: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            metavar="PROBABILITY",
            help="Skip combinations that run out of memory with a higher probability than this.",
            rich_help_panel=Panel.search,
        ),
    ] = MAX_P_OOM_TO_RUN,
    software: model.StackName = None,
    calibration: model.EvidenceFile = None,
    tag: options.Tag = None,
    dry_run: options.DryRun = False,
    force: options.Force = False,
    runs_dir: options.RunsDir = None,
    *,
    location: place.BoundHostOptions,
    output: TableOptions,
) -> None:
    """Run a recipe in all combinations of some settings and report which is fastest.

    Each list is one dimension. Combinations that cannot run are listed with the reason; runs that
    end out of memory, at the time limit or with NaN are rows like the others. Finished runs are
    not repeated: the same command resumes an interrupted sweep, and longer lists extend it.

    Examples:

      paceline sweep gpt-1b3-tiny --tp 1,2 --pp 1,2 --mbs 1,2,4 --devices 4

      paceline sweep gpt-1b3 --nodes 2 --hosts hostfile --study 32gb,32gb-no-recompute

      paceline sweep gpt-1b3 --hosts hostfile --nodes-per-trial 2 --tp 1,2,4 --mbs 1,2,4

      paceline sweep tiny-llama --zero 0,1,2,3 --set training.compile=none,blocks --repeat 3
    """
    lists = {
        **asdict(axes),
        "zero": zero,
        "mbs": mbs,
        "recompute": recompute,
        "gbs": gbs,
    }
    if seq_len is not None:  # 8k,16k
        lengths = [quantities.sequence_length(text) for text in seq_len.split(",")]
        seq_len = ",".join(map(str, lengths))
    more = {"seq_len": seq_len, "dtype": dtype, "steps": steps}
    changes = [f"training.{name}={text}" for name, text in more.items() if text is not None]
    if no_prune and prune_above != MAX_P_OOM_TO_RUN:
        raise UserError("--prune-above", "has no effect with --no-prune", remedy="leave one out")
    all_overrides = options.with_engine((*changes, *(overrides or ())), engine)
    rows: tuple[dict[str, str], ...] = ()
    if study is None:
        swept, fixed = dimensions(lists, all_overrides)
    else:
        _refuse_lists(lists)
        fixed = all_overrides
        swept, rows = study_combinations(load_recipe(recipe, variant, fixed), study)
    placement = location.where()
    hosts = placement.nodes or len(placement.hosts) or 1
    devices = devices_per_host(gpus, None, Layout(), devices, hosts)
    request = Request(
        dry_run=dry_run,
        recipe=recipe,
        variant=variant,
        overrides=fixed,
        devices=devices,
        device=device.value,
        cluster=cluster,
        timeout_s=timeout,
        force=force,
        where=placement,
        runs_dir=runs_dir,
    )
    how = RunSweepOptions(output.output_format, runs_dir, tag, dry_run, calibration)
    sweep_request = SweepOptions(
        request=request,
        dimensions=swept,
        repeats=repeat,
        name=name,
        prune=not no_prune and study is None,
        nodes_per_trial=nodes_per_trial,
        max_parallel=max_parallel,
        prune_above=prune_above,
        stack=software,
        study=rows,
    )
    raise typer.Exit(_sweep(sweep_request, how))


def _refuse_lists(lists: dict[str, Any]) -> None:
    names = [f"--{name}" for name, text in lists.items() if text is not None]
    if names:
        raise UserError(
            f"--study, {', '.join(names)}",
            "exclude each other: the table has the layouts",
            remedy="leave one out",
        )


@dataclass(frozen=True)
class RunSweepOptions:
    """Options for running and printing a sweep."""

    form: TableFormat
    runs_dir: Path | None
    tag: str | None
    dry_run: bool
    evidence: Path | None


def _sweep(request: SweepOptions, how: RunSweepOptions) -> int:

    root = runs_root(how.runs_dir)
    sweep_plan = new_sweep(request, model.given_evidence(how.evidence))
    trials = sweep_trials(sweep_plan, root)
    _announce(sweep_plan, trials)
    if how.dry_run:
        waiting = sweep_result(sweep_plan, trials, interrupted=False, command=command_line())
        emit(sweep_document(waiting), how.form)
        if how.form is TableFormat.text:
            _print_programs(sweep_plan)
        return EXIT_OK if any(choice.runs for choice in sweep_plan.choices) else EXIT_BAD_INPUT
    with sweep_display(trials) as display:
        result = run_sweep(sweep_plan, trials, root, command_line(), display, tag=how.tag)
    if any(row.runs for row in result.rows):
        _write_files(result, root / result.name)
    emit(sweep_document(result), how.form)
    if not any(choice.runs for choice in sweep_plan.choices):
        echo("error: no combination can run; the table gives the reasons", err=True)
    if result.halt_reason:
        echo(f"error: stopped: {result.halt_reason}", err=True)
    if result.resume_command:
        echo(f"incomplete; to resume: {result.resume_command}", err=True)
    return exit_code(result)


def _print_programs(sweep_plan: Sweep) -> None:
    """Print the script of the first run, and the command of every run with its settings."""
    choices = [choice for choice in sweep_plan.choices if choice.runs]
    for number, choice in enumerate(choices):
        assert choice.plan is not None
        if number == 0:
            print_plan(choice.plan, ReportFormat.text)
        if choice.plan.job.program and choice.plan.spec.engine != NATIVE:
            echo(f"{label(choice.settings)}: {shlex.join(choice.plan.job.program)}", err=True)


def exit_code(result: SweepResult) -> int:
    """Return 0 if a best combination exists, even if others failed."""
    statuses = {row.status for row in result.rows}
    if result.interrupted or result.halt_reason:
        return EXIT_INCOMPLETE
    if result.best is not None:
        return EXIT_OK
    if statuses <= {"refused", "pruned"}:
        return EXIT_BAD_INPUT
    return EXIT_INCOMPLETE if statuses <= {"refused", "pruned", "incomplete"} else EXIT_SYSTEM_FAULT


def _announce(sweep_plan: Sweep, trials: list[SweepTrial]) -> None:
    """Print to standard error what will run."""
    first = next((choice.plan for choice in sweep_plan.choices if choice.plan), None)
    if first:
        echo(run_headline(first.spec), err=True)
    todo = sum(trial.missing(sweep_plan.repeats) for trial in trials)
    have = sum(bool(trial.results) for trial in trials)
    num_refused = sum(not choice.runs for choice in sweep_plan.choices)
    parts = [pluralize(len(trials), "combination"), f"{pluralize(todo, 'run')} pending"]
    parts += [f"{have} already measured"] if have else []
    parts += [f"{num_refused} refused or pruned"] if num_refused else []
    echo(f"sweep {sweep_plan.name}: {', '.join(parts)}", err=True)
    for notice in sweep_plan.notices:
        echo(f"note: {notice}", err=True)


def _write_files(result: SweepResult, folder: Path) -> None:
    """Write the table, JSON, page and chart to the sweep's folder."""
    # Altair is slow to import, and a sweep that is only shown draws nothing.
    from paceline.layouts.sweep.charts import front_chart
    from paceline.report.charts import save_chart

    document = sweep_document(result)
    write_value(folder / SWEEP_FILE, result)
    write_text(folder / TABLE_FILE, render(document, TableFormat.csv))
    write_text(folder / PAGE_FILE, render(document, ReportFormat.html))
    chart = front_chart(result, memory_note(result), EXPORT)
    (folder / CHART_FILE).unlink(missing_ok=True)
    if chart is not None:
        save_chart(chart, folder / CHART_FILE)
    file_names = (PAGE_FILE, SWEEP_FILE, TABLE_FILE, *((CHART_FILE,) if chart is not None else ()))
    echo(f"{folder}: {', '.join(file_names)}", err=True)
