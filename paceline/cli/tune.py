"""`paceline tune`: find the fastest layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from paceline.cli import host_options as place
from paceline.cli import model_options as model
from paceline.cli import options, quantities
from paceline.cli.layout_options import TrainingOptions
from paceline.cli.layout_progress import tune_display
from paceline.cli.options import Panel
from paceline.cli.output import TableFormat, TableOptions, emit
from paceline.cli.progress import run_headline
from paceline.cli.terminal import echo
from paceline.core.errors import (
    EXIT_BAD_INPUT,
    EXIT_INCOMPLETE,
    EXIT_OK,
    EXIT_SYSTEM_FAULT,
    UserError,
)
from paceline.core.units import pluralize
from paceline.estimate.calibrate.lookup import FileEvidence
from paceline.files import catalog
from paceline.files.recipe import load_recipe
from paceline.files.run_folder import runs_root
from paceline.layouts.search.space import SearchSpace
from paceline.layouts.tune.ranking import rank_layouts
from paceline.layouts.tune.report import ranking_document, tuning_document
from paceline.layouts.tune.result import TuneResult
from paceline.layouts.tune.search import ALLOWED, parse_budget
from paceline.layouts.tune.tuning import SCHEDULES, TuneOptions, Tuning, headline, new_tuning
from paceline.machines.placement import HostPlacement, Request, with_placement
from paceline.runs.flow import command_line

T = TypeVar("T")


_COMMON_PARAMETERS = {
    *("recipe", "gpus", "device", "estimate_only", "dry_run", "variant", "overrides", "engine"),
    *("max_tp", "max_cp", "calibration", "form", "as_json", "gbs", "seq_len", "dtype"),
}
_ESTIMATE_PARAMETERS = {"top", "max_ep", "per_node", "intra", "inter", "software"}
"""Parameters that only --estimate-only uses: trials run on this machine, with the native trainer,
which has no experts."""
_SET_BY_CLUSTER = {"device", "per_node", "intra", "inter"}
"""Parameters that a cluster file sets."""


def tune(
    context: typer.Context,
    recipe: model.Recipe,
    gpus: Annotated[
        int | None,
        typer.Option(
            parser=quantities.whole_number,
            metavar="N",
            help="Total number of GPUs (on CPUs: processes).",
            rich_help_panel=Panel.hosts,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Budget for trials: 10m, 1h or `20 trials`.",
            rich_help_panel=Panel.limits,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            "--gpu",
            help="Type of device: auto, cpu or cuda; with --estimate-only a name of `paceline "
            "recipes devices`.",
            rich_help_panel=Panel.hosts,
        ),
    ] = None,
    estimate_only: Annotated[
        bool,
        typer.Option(
            "--estimate-only", help="Rank layouts by estimate only, without running them."
        ),
    ] = False,
    top: Annotated[
        int,
        typer.Option(min=1, help="Number of layouts in the ranking.", rich_help_panel=Panel.output),
    ] = 50,
    variant: options.Variant = None,
    overrides: options.Overrides = None,
    engine: options.EngineName = None,
    max_tp: Annotated[
        int, typer.Option(min=1, help="Maximum tensor-parallel size.", rich_help_panel=Panel.search)
    ] = 8,
    max_cp: Annotated[
        int,
        typer.Option(min=1, help="Maximum context-parallel size.", rich_help_panel=Panel.search),
    ] = 16,
    max_ep: Annotated[
        int, typer.Option(min=1, help="Maximum expert-parallel size.", rich_help_panel=Panel.search)
    ] = 64,
    calibration: model.EvidenceFile = None,
    per_node: model.PerNode = None,
    intra: model.Intra = None,
    inter: model.Inter = None,
    software: model.StackName = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Steps per trial; default: as in the recipe.", rich_help_panel=Panel.limits
        ),
    ] = None,
    timeout: options.Timeout = None,
    save_recipe: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Save the best layout as a recipe in this file.",
            rich_help_panel=Panel.output,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the tuning; a new name measures everything again.",
            rich_help_panel=Panel.output,
        ),
    ] = None,
    oversubscribe: Annotated[
        bool,
        typer.Option(
            "--oversubscribe",
            help="Allow more processes than physical cores.",
            rich_help_panel=Panel.hosts,
        ),
    ] = False,
    dry_run: options.DryRun = False,
    force: options.Force = False,
    tag: options.Tag = None,
    cluster: options.ClusterName = None,
    runs_dir: options.RunsDir = None,
    *,
    shared: TrainingOptions,
    location: place.BoundHostOptions,
    output: TableOptions,
) -> None:
    """Find the fastest layout of a recipe, with a few runs or by estimate only.

    The time model ranks the layouts. The most promising one runs, the model learns from it, and so
    on until no other layout is likely to be faster or the budget is spent. The best layout is
    saved as a recipe. The same command resumes an interrupted tuning.

    Examples:

      paceline tune tiny-llama --gpus 2 --budget 10m

      paceline tune llama31-8b --gpus 8 --budget "20 trials" --steps 30 --save-recipe fast.yaml

      paceline tune llama31-405b --device H100 --gpus 16384 --estimate-only

    With --estimate-only, layouts whose sizes do not divide are only counted, and layouts that
    probably run out of memory are left out.
    """
    changes = options.with_engine((*shared.overrides, *(overrides or ())), engine)
    load_recipe(recipe, variant, changes)  # What is wrong comes before what is missing.
    file_evidence = model.given_evidence(calibration)
    if estimate_only:
        used_parameters = _COMMON_PARAMETERS | _ESTIMATE_PARAMETERS | {"cluster"}
        options.refuse_unused(context, "--estimate-only", used_parameters)
        site = catalog.site(cluster) if cluster else None
        if site is not None:
            options.refuse_unused(context, "--cluster", used_parameters - _SET_BY_CLUSTER)
        question = model.question(
            recipe,
            site.device if site else _require(device, "--device", "or --cluster FILE"),
            gpus or site.world_size if site else _require(gpus, "--gpus", "or --cluster FILE"),
            software,
            variant=variant,
            overrides=changes,
            per_node=per_node,
            intra=intra,
            inter=inter,
            evidence=file_evidence,
        )
        question = replace(question, site=site)
        space = SearchSpace(max_tp=max_tp, max_cp=max_cp, max_ep=max_ep)
        ranking = rank_layouts(question, model.chosen_evidence(file_evidence, question), space, top)
        emit(ranking_document(ranking), output.output_format)
        return
    if budget is None:
        raise UserError(
            "paceline tune",
            "needs --budget",
            allowed=ALLOWED,
            remedy="or use --estimate-only, which runs nothing",
        )
    trial_parameters = {
        parameter.name or "" for parameter in context.command.params
    } - _ESTIMATE_PARAMETERS
    options.refuse_unused(context, "--budget", trial_parameters)
    if device not in (None, "auto", "cpu", "cuda"):
        raise UserError(
            f"--device {device}",
            "is not a device to run on",
            allowed="auto, cpu, cuda",
            remedy="--estimate-only ranks layouts for other devices",
        )
    placement = location.where()
    devices = (
        _check_cluster_size(cluster, gpus, placement)
        if cluster
        else _per_host(_require(gpus, "--gpus"), placement)
    )
    request = Request(
        recipe=recipe,
        variant=variant,
        overrides=changes,
        devices=devices,
        device=device or "auto",
        cluster=cluster,
        timeout_s=timeout,
        force=force,
        where=placement,
        runs_dir=runs_dir,
    )
    space = SearchSpace(max_tp=max_tp, max_cp=max_cp, schedules=SCHEDULES)
    tune_request = TuneOptions(
        request=request,
        budget=parse_budget(budget),
        space=space,
        steps=steps,
        name=name,
        write=save_recipe,
        oversubscribe=oversubscribe,
        tag=tag,
    )
    raise typer.Exit(
        _tune(tune_request, runs_root(runs_dir), output.output_format, file_evidence, dry_run)
    )


def _require(value: T | None, option: str, remedy: str | None = None) -> T:
    """Return the value of a required option; raise UserError if it is missing."""
    if value is None:
        raise UserError(
            "paceline tune", f"needs {option}", allowed=model.NEEDED[option], remedy=remedy
        )
    return value


def _check_cluster_size(name: str, gpus: int | None, where: HostPlacement) -> None:
    """Raise UserError if a cluster has another number of devices than --gpus."""
    has = with_placement(catalog.cluster(name), where).world_size
    if gpus not in (None, has):
        raise UserError(
            f"--gpus {gpus}",
            f"{name} has {pluralize(has, 'device')} here",
            remedy="leave --gpus out, or set --nodes",
        )


def _per_host(gpus: int, where: HostPlacement) -> int:
    """Return the devices per host."""
    nodes = where.nodes or len(where.hosts) or 1
    if gpus % nodes:
        raise UserError(f"--gpus {gpus}", f"is not a multiple of the {pluralize(nodes, 'host')}")
    return gpus // nodes


def _tune(
    request: TuneOptions,
    root: Path,
    form: TableFormat,
    file_evidence: FileEvidence | None,
    dry_run: bool,
) -> int:
    tuning = new_tuning(request, file_evidence, root, command_line())
    _announce(tuning, headline(tuning))
    if dry_run:
        emit(tuning_document(tuning.result()), form)
        return EXIT_OK
    with tune_display(tuning.runs.order) as display:
        result = tuning.run(display)
    emit(tuning_document(result), form)
    return exit_code(result)


def exit_code(result: TuneResult) -> int:
    """Return 0 if a best layout exists, even if others failed."""
    if result.stop == "interrupted":
        return EXIT_INCOMPLETE
    if result.best is not None:
        return EXIT_OK
    statuses = {row.status for row in result.rows}
    if statuses <= {"refused"}:
        return EXIT_BAD_INPUT
    return EXIT_INCOMPLETE if statuses <= {"refused", "incomplete"} else EXIT_SYSTEM_FAULT


def _announce(tuning: Tuning, line: str) -> None:
    """Print the candidates to standard error."""
    candidates = tuning.search.candidates
    echo(run_headline(candidates.spec), err=True)
    echo(line, err=True)
    notes = [*candidates.notices]
    if candidates.x is None:
        notes.append("the time model does not know this machine; layouts are compared by runs only")
    if tuning.oversubscribed:
        notes.append(
            "more processes than physical cores; a machine with enough cores behaves otherwise"
        )
    for note in notes:
        echo(f"note: {note}", err=True)
