"""`paceline recipes stage`: fetch and verify the assets of a recipe."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import host_options as place
from paceline.cli.options import ClusterName, Json, Panel, Variant
from paceline.cli.output import TableForm, TableFormat, emit
from paceline.cli.stage_progress import stage_display
from paceline.cli.terminal import echo
from paceline.core.errors import (
    EXIT_GATE_FAILED,
    EXIT_SYSTEM_FAULT,
    SystemFaultError,
    UserError,
    unknown_name,
)
from paceline.core.hardware import Cluster
from paceline.core.units import pluralize
from paceline.engines import engine_names
from paceline.files import catalog
from paceline.files.recipe import Recipe, load_recipe
from paceline.files.staged import (
    STAGE_VARIABLE,
    hub_id,
    stage_root,
    staged_names,
    staging_error,
)
from paceline.machines.placement import HostPlacement, with_placement
from paceline.staging.node_copies import (
    NodeOutcome,
    NodeShell,
    NodeSyncRequest,
    node_shells,
    sync_nodes,
)
from paceline.staging.plan import StagingPlan, disk_space, staging_plan
from paceline.staging.report import nodes_document, plan_document, verification_document
from paceline.staging.stager import DEFAULT_JOBS, Stager
from paceline.staging.verification import StageFault, verify


def stage(
    recipe: Annotated[str, typer.Argument(help="Recipe (name or file).", metavar="RECIPE")],
    engine: Annotated[
        str | None,
        typer.Option(
            help="Stage only the assets of this engine; default: of all engines.",
            show_default=False,
            rich_help_panel=Panel.recipe,
        ),
    ] = None,
    variant: Variant = None,
    asset: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Stage only this asset and the assets that it is made from. Repeatable.",
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="FOLDER",
            help=f"Destination folder; default ${STAGE_VARIABLE}, else "
            "~/.local/share/paceline/stage.",
            show_default=False,
        ),
    ] = None,
    local: Local = None,
    hosts: place.Hosts = None,
    nodes: place.Nodes = None,
    cluster: ClusterName = None,
    launcher: place.LauncherOption = "auto",
    allocation: place.Allocation = None,
    ssh_config: place.SshConfig = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print sources and sizes without fetching anything.")
    ] = False,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            metavar="MB/S",
            help="With --dry-run: estimate the download time at this bandwidth.",
        ),
    ] = None,
    query_sizes: Annotated[
        bool,
        typer.Option(
            "--query-sizes",
            help="With --dry-run: query sizes that the recipe does not state.",
        ),
    ] = False,
    check: Annotated[
        bool, typer.Option("--verify", help="Verify all staged files; fetch nothing.")
    ] = False,
    jobs: Annotated[
        int, typer.Option(min=1, max=64, help="Number of files processed in parallel.")
    ] = DEFAULT_JOBS,
    runtime: Annotated[
        str | None,
        typer.Option(
            help="Program for container images; default: the first one installed of enroot, "
            "apptainer, singularity, docker, podman and skopeo.",
            show_default=False,
        ),
    ] = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Fetch and verify what a recipe needs: models, data, code and containers.

    Examples:

      paceline recipes stage opt-350m-sft --dry-run --bandwidth 500

      paceline recipes stage opt-350m-sft-tiny --variant staged

      paceline recipes stage opt-350m-sft --local /scratch/stage --hosts hosts.txt

    An interrupted call resumes. Access tokens are taken from HF_TOKEN, `hf auth login` and
    ~/.netrc.
    """
    form = TableFormat.json if as_json else form
    for option, is_set in (
        ("--dry-run", dry_run),
        ("--query-sizes", query_sizes),
        ("--bandwidth", bandwidth is not None),
    ):
        if is_set and check:
            raise UserError(option, "has no effect with --verify", remedy="leave it out")
        if is_set and not dry_run:
            raise UserError(option, "has no effect without --dry-run", remedy="add --dry-run")
    if engine is not None and engine not in engine_names():
        raise unknown_name(
            f"--engine {engine}",
            "is unknown",
            engine,
            engine_names(),
            listing="paceline recipes engines",
        )
    where = place.where(hosts, launcher, allocation, ssh_config, nodes=nodes)
    target = node_target(local, cluster, where)
    selected_recipe = load_recipe(recipe, variant)
    if variant and not asset:
        asset = _assets_of_variant(selected_recipe) or None
    plan = staging_plan(selected_recipe, engine, _folder(to), asset or ())
    if check and target is None:
        raise typer.Exit(_verify(plan, form, jobs))
    if check and target:
        raise typer.Exit(_on_nodes(plan, target, form, verify=True))
    if not dry_run:
        plan = _stage(plan, jobs, runtime, asset or ())
    elif query_sizes:
        plan = Stager(jobs=jobs).with_sizes(plan)
    if target and not dry_run:
        raise typer.Exit(_on_nodes(plan, target, form))
    copies_to = str(target) if target else ""
    emit(plan_document(plan, disk_space(plan.root), bandwidth, copies_to), form)


def _assets_of_variant(recipe: Recipe) -> list[str]:
    """Return the assets that the settings name, by `staged:` or hub id, and those of the engine."""
    names = staged_names(recipe)
    settings = {str(value) for value in recipe.engine_settings.values()}
    others = [
        asset.name
        for asset in recipe.assets
        if hub_id(asset) in settings or recipe.engine in asset.engines
    ]
    return list(dict.fromkeys([*names, *others]))


def _folder(to: Path | None) -> Path:
    """Return the stage folder; raise UserError if a file is in its place."""
    root = stage_root(to)
    existing_path = next(path for path in (root, *root.parents) if path.exists())
    if not existing_path.is_dir():
        raise UserError(
            str(existing_path), "is not a folder", remedy="choose another folder with --to"
        )
    return root


def _stage(
    plan: StagingPlan, jobs: int, runtime: str | None, names: list[str] | tuple[()]
) -> StagingPlan:
    with stage_display() as (watch, notify):
        Stager(jobs=jobs, runtime=runtime, watch=watch, notify=notify).stage(plan)
    staged_plan = staging_plan(plan.recipe, plan.engine, plan.root, names)
    if unstaged_parts := [
        f"{part.asset.name} is {part.state}"
        for part in staged_plan.assets
        if part.state != "staged"
    ]:
        raise SystemFaultError(str(plan.root), ", ".join(unstaged_parts), remedy="run this again")
    return staged_plan


def _on_nodes(
    plan: StagingPlan, target: NodeTarget, form: TableFormat, verify: bool = False
) -> int:
    """Copy to all nodes or verify the copies, print the outcome, and return the exit code."""
    outcomes = copy_to_nodes(plan, target, verify)
    emit(nodes_document(plan, disk_space(plan.root), target.local, outcomes), form)
    return nodes_exit(outcomes)


def _verify(plan: StagingPlan, form: TableFormat, jobs: int) -> int:
    """Print the faults of the assets; return 0 if there are none."""
    faults: list[StageFault] = []
    states: dict[str, str] = {}
    for part in plan.assets:
        if part.state in ("missing", "partial"):
            states[part.asset.name] = part.state
            continue
        echo(f"  reading {part.asset.name}", err=True)
        wrong = verify(part.folder, part.asset.name, jobs)
        states[part.asset.name] = "damaged" if wrong else "verified"
        faults += wrong
    emit(verification_document(plan, states, faults), form)
    return 0 if all(state == "verified" for state in states.values()) else EXIT_GATE_FAILED


Local = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="After staging, copy the assets to this folder on the local disk of every node "
        "of --hosts, --allocation or --cluster; with --verify, check the copies there.",
    ),
]


@dataclass(frozen=True)
class NodeTarget:
    """Nodes, and the stage folder on each of them."""

    shells: tuple[NodeShell, ...]
    local: str

    def __str__(self) -> str:
        return f"{self.local} on {pluralize(len(self.shells), 'node')}"


def node_target(local: str | None, cluster: str | None, where: HostPlacement) -> NodeTarget | None:
    """Return the nodes and folder for copies, or None if no nodes are given.

    Raises UserError if the folder or the nodes are missing.
    """
    if local is None and cluster is None and not (where.hosts or where.allocation):
        return None
    if cluster is None and not where.hosts and where.launcher is None:
        where = replace(where, allocation=where.allocation or os.environ.get("SLURM_JOB_ID"))
    plain = Cluster(name="nodes", device="cpu", devices_per_node=1)
    nodes = with_placement(catalog.cluster(cluster) if cluster else plain, where)
    folder = local or nodes.stage
    if folder is None:
        raise UserError(
            "nodes",
            "are given without a destination folder",
            remedy="add --local FOLDER, or `stage:` to the cluster file",
        )
    if not folder.startswith("/"):
        raise UserError(
            f"--local {folder}", "must be an absolute path that is the same on all nodes"
        )
    return NodeTarget(node_shells(nodes, where.nodes), folder)


def copy_to_nodes(plan: StagingPlan, target: NodeTarget, verify: bool) -> tuple[NodeOutcome, ...]:
    """Copy assets to each node and return the outcomes; raise UserError if one is not staged."""
    names = [part.asset.name for part in plan.assets]
    if problem := staging_error(plan.recipe, names, plan.root):
        raise problem
    folders = tuple(part.folder for part in plan.assets)
    request = NodeSyncRequest(plan.root, target.local, folders, verify)
    with stage_display() as (watch, _):
        return sync_nodes(target.shells, request, watch)


def nodes_exit(outcomes: Sequence[NodeOutcome]) -> int:
    """Return 2 if a node failed, 3 if a node is incomplete, else 0."""
    states = {outcome.state for outcome in outcomes}
    if "failed" in states:
        return EXIT_SYSTEM_FAULT
    return 0 if states <= {"staged"} else EXIT_GATE_FAILED
