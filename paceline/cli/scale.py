"""`paceline scale`: does it scale, and which node costs us?"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import campaign_options, options
from paceline.cli import host_options as place
from paceline.cli.campaign import Conduct, run_campaign, save_charts
from paceline.cli.output import (
    OutputColumn,
    TableForm,
    TableFormat,
    Where,
    emit_table,
    print_sentences,
    select_rows,
    write_page,
)
from paceline.cli.terminal import echo
from paceline.core.errors import EXIT_GATE_FAILED, UserError
from paceline.core.units import counted
from paceline.machines.placement import Request
from paceline.scaling.analysis.analysis import Analysis, Judging, analyse
from paceline.scaling.analysis.answer import scale_result
from paceline.scaling.analysis.result import ScaleResult
from paceline.scaling.analysis.sizes import parse_sizes
from paceline.scaling.analysis.slow_nodes import HealthySpeed
from paceline.scaling.campaigns.plan import CampaignRequest
from paceline.scaling.page import scaling_html, share, size_rows
from paceline.scaling.tables import measured_table, node_history, read_rows, simulate_cluster

MANY_NODES = 512
"""With which the analysis of a simulation takes long enough to be told of."""


class SplitWay(StrEnum):
    """How hosts are split into sub-clusters."""

    contiguous = "contiguous"
    pairs = "pairs"
    random = "random"
    topology = "topology"


class ScalingWay(StrEnum):
    """Whether the global batch grows with the nodes (weak) or stays (strong)."""

    weak = "weak"
    strong = "strong"


def scale(
    context: typer.Context,
    recipe: campaign_options.Recipe = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="CSV", help="Analyse results that were measured elsewhere."),
    ] = None,
    simulated: Annotated[
        bool, typer.Option("--simulate", help="Run the procedure on a made-up cluster.")
    ] = False,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="How many of the hosts; of a made-up cluster up to 4096 (64)."),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="1,2,4,...,N", help="Nodes a sub-cluster; default 1,2,4,... and all (N)."
        ),
    ] = None,
    split: Annotated[
        SplitWay, typer.Option(help="Who works together: neighbours, changing pairs, anybody.")
    ] = SplitWay.contiguous,
    rounds: Annotated[
        int, typer.Option(min=1, help="Arrangements of each size; each host meets others in each.")
    ] = 1,
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="FAULT", help="slow=NODE:5%, noisy=NODE:3% or link=SWITCH:4%."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the luck.")] = 0,
    scaling: Annotated[
        ScalingWay | None,
        typer.Option(
            help="Whether the batch grows with the nodes; default as the recipe or results say."
        ),
    ] = None,
    reference: Annotated[
        float | None,
        typer.Option(
            metavar="SAMPLES/S", help="What a healthy node reaches; judges few nodes too."
        ),
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option(metavar="CSV", help="Earlier results: each node by its own, from 3 on."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the page with its charts.")
    ] = None,
    charts: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also save every chart as SVG.")
    ] = None,
    fail: Annotated[
        bool, typer.Option("--fail-on-findings", help="Exit with 3 when a node is flagged.")
    ] = False,
    where: Where = None,
    variant: options.Variant = None,
    overrides: campaign_options.Overrides = None,
    engine: options.EngineName = None,
    gpus_per_node: campaign_options.GpusPerNode = None,
    device: options.Device = options.DeviceKind.auto,
    cluster: options.ClusterName = None,
    repeats: campaign_options.Repeats = 1,
    topology: campaign_options.Topology = None,
    max_parallel: campaign_options.MaxParallel = None,
    extra_rounds: campaign_options.ExtraRounds = None,
    least_per_node: campaign_options.LeastPerNode = None,
    timeout: options.Timeout = None,
    name: campaign_options.Name = None,
    resume: campaign_options.Resume = None,
    tag: options.Tag = None,
    dry_run: options.DryRun = False,
    force: options.Force = False,
    hosts: place.Hosts = None,
    launcher: place.LauncherOption = "auto",
    allocation: place.Allocation = None,
    interface: place.Interface = None,
    bind: place.Bind = None,
    ssh_config: place.SshConfig = None,
    runs_dir: options.RunsDir = None,
    form: TableForm = TableFormat.text,
    as_json: options.Json = False,
) -> None:
    """Split scaling efficiency into waiting for the slowest node and communication, and name
    slow nodes.

    A node is flagged when it is more than 1 % and four robust standard
    deviations below the median of at least eight nodes, or three, and its
    repeats, its groups or pairs with proven nodes bear it out; else it is
    suspected. The answer says what replacing it would give, and how small a
    fault would have been found.

    Examples:

      paceline scale opt-350m-sft --hosts node[001-064] --sizes 1,2,4,...,N

      paceline scale opt-13b-sft --hosts hostfile --sizes 1,8,64 --repeat 3

      paceline scale --resume last

      paceline scale --from results.csv --where benchmark=opt-13b_bs16_zero0 --html scaling.html

      paceline scale --simulate --nodes 256 --fault slow=17:5% --fault link=3:4%
    """
    form = TableFormat.json if as_json else form
    campaign_options.refuse_other_modes(recipe, resume, source, simulated)
    if source or simulated:
        mode = "--from" if source else "--simulate"
        options.refuse_unused(context, mode, campaign_options.USED[mode])
    elif dry_run and (html or charts):
        raise UserError(
            "--html" if html else "--charts",
            "draws what was measured, and --dry-run measures nothing",
            remedy="leave one out",
        )
    if source is None and not simulated:
        campaign_options.refuse_foreign(fault, where)
        placement = place.where(hosts, nodes, launcher, allocation, interface, bind, ssh_config)
        request = Request(
            recipe or "",
            variant,
            options.with_engine(overrides, engine),
            None,
            device.value,
            cluster,
            timeout,
            force,
            placement,
            runs_dir,
        )
        campaign_request = CampaignRequest(
            request,
            sizes,
            campaign_options.devices_per_node(gpus_per_node),
            scaling.value if scaling else None,
            split.value,
            topology,
            rounds,
            repeats,
            seed,
            name,
        )
        how = Conduct(
            form,
            runs_dir,
            resume,
            allocation,
            max_parallel,
            extra_rounds,
            tag,
            dry_run,
            html,
            charts,
            fail,
            _judging(scaling, reference, history),
            least_per_node,
        )
        raise typer.Exit(run_campaign(campaign_request, how))
    nodes = nodes or 64
    title = source.name if source else counted(nodes, "simulated node")
    if source:
        analysis, notes = _from_table(source, where, scaling, reference, history)
    else:
        analysis, notes = simulate_cluster(
            nodes,
            fault or [],
            seed,
            parse_sizes(sizes, nodes, "make more with --nodes"),
            split.value,
            rounds,
            _judging(scaling, reference, history),
            _tell if nodes >= MANY_NODES else str,
        )
    show_analysis(analysis, notes, title, form, html, charts)
    if fail and analysis.flagged:
        raise typer.Exit(EXIT_GATE_FAILED)


def _tell(phase: str) -> None:
    echo(f"  {phase}", err=True)


def show_analysis(
    analysis: Analysis,
    notes: list[str],
    name: str,
    form: TableFormat,
    html: Path | None = None,
    charts: Path | None = None,
) -> None:
    """Print an analysis, and write its page and charts where that is asked for."""
    result = scale_result(analysis, notes)
    reference = analysis.judging.reference
    healthy = reference.samples_per_s if reference else None
    _print(result, form)
    if html:
        write_page(html, scaling_html(result, analysis.measured, name, healthy))
    if charts:
        save_charts(result, analysis.measured, charts, healthy)


def _print(result: ScaleResult, form: TableFormat) -> None:
    shares = ("spread", "efficiency", "low", "high", "straggler", "communication")
    columns = [
        OutputColumn("nodes", "nodes", justify="right"),
        OutputColumn("n", "sub-clusters", justify="right"),
        OutputColumn("value", "samples/s", lambda value: f"{value:.6g}", "right"),
        *(OutputColumn(key, key, share, "right") for key in shares),
    ]
    more = (
        "straggler_low",
        "straggler_high",
        "communication_low",
        "communication_high",
        "naive_straggler",
        "naive_communication",
    )
    if form is TableFormat.csv:
        columns += [OutputColumn(key, key) for key in more]
    print_sentences(result.sentences, form)
    emit_table(list(size_rows(result)), columns, form, document=result.model_dump(mode="json"))


def _from_table(
    source: Path,
    where: list[str] | None,
    scaling: ScalingWay | None,
    reference: float | None,
    history: Path | None,
) -> tuple[Analysis, list[str]]:
    rows = read_rows(source)
    table = measured_table(
        [dict(row) for row in select_rows(rows, where, list(rows[0]))], str(source)
    )
    kind = scaling or (ScalingWay(table.scaling) if table.scaling else None)
    judging = _judging(kind, reference, history, table.resolution, where)
    return analyse(table.measured, judging), []


def _judging(
    scaling: ScalingWay | None,
    reference: float | None,
    history: Path | None,
    resolution: float = 0.0,
    where: list[str] | None = None,
) -> Judging:
    if reference is not None and not 0 < reference < float("inf"):
        raise UserError(f"--reference {reference}", "is no speed", allowed="samples/s above 0")
    return Judging(
        scaling=scaling.value if scaling else "weak",
        resolution=resolution,
        reference=None if reference is None else HealthySpeed(reference),
        history=_history(history, where) if history else None,
    )


def _history(path: Path, where: list[str] | None) -> dict[str, list[float]]:
    """Each host's earlier values, in the rows that `where` selects by columns that are there."""
    rows = read_rows(path)
    applicable = [condition for condition in where or [] if condition.partition("=")[0] in rows[0]]
    return node_history([dict(row) for row in select_rows(rows, applicable)], str(path))
