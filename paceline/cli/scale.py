"""`paceline scale`: measure scaling efficiency and find slow nodes."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import campaign_options, options
from paceline.cli import host_options as place
from paceline.cli.campaign import CampaignOptions, run_campaign
from paceline.cli.layout_options import LayoutOptions
from paceline.cli.options import Overrides, Panel
from paceline.cli.output import (
    TableForm,
    TableFormat,
    WhereOption,
    emit,
    select_rows,
)
from paceline.core.errors import EXIT_GATE_FAILED, EXIT_OK, UserError
from paceline.machines.placement import Request
from paceline.scaling.analysis.analysis import Analysis, AnalysisContext, analyse
from paceline.scaling.analysis.result import scale_result
from paceline.scaling.analysis.slow_nodes import HealthySpeed
from paceline.scaling.campaigns.plan import CampaignRequest
from paceline.scaling.report import scaling_document
from paceline.scaling.tables import measured_table, node_history, read_rows


class SplitWay(StrEnum):
    """Methods of grouping hosts into sub-clusters."""

    contiguous = "contiguous"
    pairs = "pairs"
    random = "random"
    topology = "topology"


class ScalingWay(StrEnum):
    """Scaling of the global batch: weak (grows with the nodes) or strong (constant)."""

    weak = "weak"
    strong = "strong"


def scale(
    context: typer.Context,
    recipe: campaign_options.Recipe = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="CSV",
            rich_help_panel=Panel.recipe,
            help="Analyse the measurements in this file instead of running a recipe.",
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="1,2,4,...,N",
            help="Nodes per sub-cluster; default 1,2,4,... and all hosts (N).",
            rich_help_panel=Panel.search,
        ),
    ] = None,
    split: Annotated[
        SplitWay,
        typer.Option(
            help="How hosts are grouped: adjacent, in rotating pairs, at random, or by network "
            "topology.",
            rich_help_panel=Panel.search,
        ),
    ] = SplitWay.contiguous,
    rounds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of groupings per size; hosts get new partners in each.",
            rich_help_panel=Panel.search,
        ),
    ] = 1,
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed.", rich_help_panel=Panel.search)
    ] = 0,
    scaling: Annotated[
        ScalingWay | None,
        typer.Option(
            help="Weak scaling grows the batch with the nodes, strong scaling keeps it; default:"
            " as in the recipe or the results.",
            rich_help_panel=Panel.search,
        ),
    ] = None,
    reference: Annotated[
        float | None,
        typer.Option(
            metavar="SAMPLES/S",
            help="Throughput of a healthy node; with it, small clusters can be judged too.",
            rich_help_panel=Panel.criteria,
        ),
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option(
            metavar="CSV",
            help="Earlier results; a node with at least 3 is compared with its own history.",
            rich_help_panel=Panel.criteria,
        ),
    ] = None,
    html: options.Html = None,
    charts: options.ChartsFolder = None,
    fail: Annotated[
        bool,
        typer.Option(
            "--fail-on-findings",
            help="Exit with 3 if a node is flagged.",
            rich_help_panel=Panel.criteria,
        ),
    ] = False,
    where: WhereOption = None,
    variant: options.Variant = None,
    overrides: Overrides = None,
    engine: options.EngineName = None,
    gpus_per_node: campaign_options.GpusPerNode = None,
    device: options.Device = options.DeviceKind.auto,
    cluster: options.ClusterName = None,
    repeats: campaign_options.Repeats = 1,
    topology: campaign_options.Topology = None,
    max_parallel: campaign_options.MaxParallel = None,
    extra_rounds: campaign_options.ExtraRounds = None,
    min_per_node: campaign_options.MinPerNode = None,
    timeout: options.Timeout = None,
    name: campaign_options.Name = None,
    resume: campaign_options.Resume = None,
    tag: options.Tag = None,
    dry_run: options.DryRun = False,
    force: options.Force = False,
    runs_dir: options.RunsDir = None,
    form: TableForm = TableFormat.text,
    as_json: options.Json = False,
    *,
    shared: LayoutOptions,
    location: place.BoundHostOptions,
) -> None:
    """Split scaling efficiency into stragglers and communication, and identify slow nodes.

    A node is flagged if its throughput is more than 1% and four robust standard deviations below
    the median of at least eight nodes. Three standard deviations are enough if repeats, groups or
    pairs with known-good nodes confirm it; otherwise the node is a suspect. The report also shows
    what replacing a node would gain, and how small a fault the test could have detected.

    Examples:

      paceline scale opt-350m-sft --hosts node[001-064] --sizes 1,2,4,...,N

      paceline scale opt-13b-sft --hosts hostfile --sizes 1,8,64 --repeat 3

      paceline scale --resume last

      paceline scale --from results.csv --where benchmark=opt-13b_bs16_zero0 --html scaling.html
    """
    form = TableFormat.json if as_json else form
    campaign_options.refuse_other_modes(recipe, resume, source)
    if source is not None:
        options.refuse_unused(context, "--from", campaign_options.USED_BY_FROM)
        analysis = _from_table(source, where, scaling, reference, history)
        emit_analysis(analysis, source.name, form, html, charts)
        raise typer.Exit(EXIT_GATE_FAILED if fail and analysis.flagged_nodes else EXIT_OK)
    if dry_run and (html or charts):
        raise UserError(
            "--html" if html else "--charts",
            "needs measurements, but --dry-run makes none",
            remedy="leave one out",
        )
    if where:
        raise UserError(f"--where {where[0]}", "requires --from CSV", remedy="leave it out")
    request = Request(
        recipe=recipe or "",
        variant=variant,
        overrides=options.with_engine((*shared.overrides, *(overrides or ())), engine),
        device=device.value,
        cluster=cluster,
        timeout_s=timeout,
        force=force,
        where=location.where(),
        runs_dir=runs_dir,
    )
    campaign_request = CampaignRequest(
        request,
        sizes=sizes,
        devices_per_node=campaign_options.devices_per_node(gpus_per_node),
        scaling=scaling.value if scaling else None,
        split=split.value,
        topology=topology,
        rounds=rounds,
        repeats=repeats,
        seed=seed,
        name=name,
    )
    how = CampaignOptions(
        form=form,
        runs_dir=runs_dir,
        resume=resume,
        allocation=location.allocation,
        max_parallel=max_parallel,
        extra_rounds=extra_rounds,
        tag=tag,
        dry_run=dry_run,
        html=html,
        charts=charts,
        fail_on_findings=fail,
        context=_analysis_context(scaling, reference, history),
        min_per_node=min_per_node,
    )
    raise typer.Exit(run_campaign(campaign_request, how))


def emit_analysis(
    analysis: Analysis,
    name: str,
    form: TableFormat,
    html: Path | None = None,
    charts: Path | None = None,
) -> None:
    """Print an analysis, and write its page and charts if requested."""
    reference = analysis.context.reference
    healthy = reference.samples_per_s if reference else None
    document = scaling_document(scale_result(analysis), analysis.measured, name, healthy)
    emit(document, form, page=html, charts=charts)


def _from_table(
    source: Path,
    where: list[str] | None,
    scaling: ScalingWay | None,
    reference: float | None,
    history: Path | None,
) -> Analysis:
    rows = read_rows(source)
    table = measured_table(
        [dict(row) for row in select_rows(rows, where, list(rows[0]))], str(source)
    )
    kind = scaling or (ScalingWay(table.scaling) if table.scaling else None)
    context = _analysis_context(kind, reference, history, table.resolution, where)
    return analyse(table.measured, context)


def _analysis_context(
    scaling: ScalingWay | None,
    reference: float | None,
    history: Path | None,
    resolution: float = 0.0,
    where: list[str] | None = None,
) -> AnalysisContext:
    if reference is not None and not 0 < reference < float("inf"):
        raise UserError(
            f"--reference {reference}", "is not a throughput", allowed="samples/s above 0"
        )
    return AnalysisContext(
        scaling=scaling.value if scaling else "weak",
        resolution=resolution,
        reference=None if reference is None else HealthySpeed(reference),
        history=_history(history, where) if history else None,
    )


def _history(path: Path, where: list[str] | None) -> dict[str, list[float]]:
    """Return each host's earlier values from the rows that `where` selects."""
    rows = read_rows(path)
    applicable = [condition for condition in where or [] if condition.partition("=")[0] in rows[0]]
    return node_history([dict(row) for row in select_rows(rows, applicable)], str(path))
