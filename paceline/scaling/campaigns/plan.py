"""From a recipe, hosts and sizes to the campaign that measures them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.core.host_split import Split, split_rounds
from paceline.core.node_groups import ScalingKind
from paceline.files.recipe import Recipe, load_recipe
from paceline.files.run_folder import new_folder, run_folders
from paceline.machines.host_lists import from_allocation
from paceline.machines.placement import Request, choose_cluster, hosts_of, with_slurm_nodes
from paceline.machines.probe.inventory import inventory
from paceline.runs.compilation import equally_compiled
from paceline.runs.plan import make_plan
from paceline.scaling.analysis.sizes import parse_sizes
from paceline.scaling.campaigns.batches import batch_on, scaling_kind
from paceline.scaling.campaigns.record import (
    CAMPAIGN_FILE,
    LOCK_FILE,
    Campaign,
    CampaignPoint,
    PlannedRound,
    campaign_folders,
    read_campaign,
    write_campaign,
)
from paceline.scaling.campaigns.topology import read_topology

UNNAMED = "-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class CampaignRequest:
    """What the user asked for."""

    request: Request
    sizes: str | None = None
    devices_per_node: tuple[int, ...] = ()
    """Devices used of a node; empty for the whole node alone."""
    scaling: ScalingKind | None = None
    split: Split = "contiguous"
    topology: Path | None = None
    rounds: int = 1
    repeats: int = 1
    seed: int = 0
    name: str | None = None


def new_campaign(root: Path, options: CampaignRequest, command: Sequence[str]) -> Campaign:
    """The campaign that was asked for, not yet written.

    One of that name that measures the same is gone on with. Raises UserError when something of it
    cannot run, or the name is taken.
    """
    recipe = load_recipe(options.request.recipe, options.request.variant, options.request.overrides)
    request = options.request if options.sizes == "1" else with_slurm_nodes(options.request)
    if options.devices_per_node and request.cluster:
        request = replace(request, devices_per_node=max(options.devices_per_node))
    machine = inventory()
    cluster, _ = choose_cluster(request, recipe, machine)
    hosts = hosts_of(request, cluster)
    devices = tuple(sorted({*options.devices_per_node})) or (cluster.devices_per_node,)
    names = [host.name for host in hosts]
    sizes = parse_sizes(options.sizes, len(names))
    kind = scaling_kind(recipe, options.scaling)
    topology = read_topology(options.topology) if options.topology else {}
    remote_hosts = () if cluster.runs_here else hosts
    where = replace(request.where, hosts=remote_hosts, launcher=cluster.launcher)
    request = replace(request, where=where)
    points, notices = _points(request, recipe, kind, sizes, devices, machine)
    if equal := equally_compiled(request, [point.spec for point in points]):
        points, notices = _points(equal, recipe, kind, sizes, devices, machine)
    campaign = Campaign(
        name=UNNAMED,
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        command=tuple(command),
        recipe=recipe.name,
        variant=request.variant,
        scaling=kind,
        hosts=tuple(names),
        sizes=sizes,
        devices_per_node=devices,
        split=options.split,
        rounds=options.rounds,
        repeats=options.repeats,
        seed=options.seed,
        points=points,
        plan=tuple(_rounds(options, names, points, topology)),
        notices=notices,
    )
    return _named(root, campaign, options.name)


def with_folder(root: Path, campaign: Campaign) -> Campaign:
    """The campaign with a name, and an empty folder of its own where it had none."""
    if campaign.name != UNNAMED:
        return campaign
    parts = [
        f"{datetime.now(UTC):%Y-%m-%d}",
        "scale",
        campaign.recipe,
        campaign.variant,
        f"{len(campaign.hosts)}-hosts",
        campaign.key,
    ]
    base = "-".join(re.sub(r"[^A-Za-z0-9._]+", "-", part).strip("-.") for part in parts if part)
    return campaign.model_copy(update={"name": new_folder(root, base).name})


def begin(root: Path, campaign: Campaign) -> Campaign:
    """The campaign with its file written, and the rounds that another process added meanwhile."""
    if (root / campaign.name / CAMPAIGN_FILE).exists():
        stored = read_campaign(root, campaign.name)
        campaign = campaign.model_copy(update={"plan": stored.plan})
    write_campaign(root, campaign)
    return campaign


def resumed_campaign(root: Path, name: str, allocation: str | None = None) -> Campaign:
    """The campaign of that name as planned; `allocation` is a new Slurm job for what is left.

    Raises UserError when there is none, or the new job lacks hosts of it.
    """
    campaign = read_campaign(root, name)
    job = allocation or os.environ.get("SLURM_JOB_ID")
    allocations = campaign.points[0].spec.cluster.capabilities.allocations
    if not allocations or job is None:
        return campaign
    missing = sorted({*campaign.hosts} - {host.name for host in from_allocation(job)})
    if missing:
        raise UserError(
            f"campaign {campaign.name}",
            f"needs {missing[0]}, which job {job} lacks",
            remedy="start a new campaign, or get the same nodes (--nodelist)",
        )
    points = tuple(_in_allocation(point, job) for point in campaign.points)
    return campaign.model_copy(update={"points": points})


def equivalent_campaigns(root: Path, campaign: Campaign) -> list[str]:
    """Names of other campaigns that measure the same; those that cannot be read are passed over."""
    names: list[str] = []
    for folder in campaign_folders(root):
        # A broken file of another campaign is no reason not to measure.
        with suppress(UserError):
            if (
                folder.name != campaign.name
                and read_campaign(root, folder.name).key == campaign.key
            ):
                names.append(folder.name)
    return names


def _points(
    request: Request,
    recipe: Recipe,
    kind: ScalingKind,
    sizes: Sequence[int],
    devices: Sequence[int],
    machine: dict[str, Any],
) -> tuple[tuple[CampaignPoint, ...], tuple[str, ...]]:
    """What runs at each size, points below one node first, and what is to be told about it."""
    below = [(1, count) for count in devices[:-1]]
    points: list[CampaignPoint] = []
    notices: dict[str, None] = {}
    for nodes, count in [*below, *((size, devices[-1]) for size in sizes)]:
        batch = batch_on(recipe, kind, nodes, count, devices[-1])
        plan = make_plan(_request_on(request, nodes, count, batch), machine)
        notices |= dict.fromkeys(plan.notices)
        points.append(CampaignPoint(nodes=nodes, devices_per_node=count, spec=plan.spec))
    return tuple(points), tuple(notices)


def _request_on(request: Request, nodes: int, count: int, batch: int) -> Request:
    hosts = request.where.hosts[:nodes]
    return replace(
        request,
        devices=None if request.cluster else count,
        devices_per_node=count if request.cluster else None,
        overrides=(*request.overrides, f"training.global_batch={batch}"),
        where=replace(request.where, hosts=hosts, nodes=nodes),
    )


def _rounds(
    options: CampaignRequest,
    hosts: Sequence[str],
    points: Sequence[CampaignPoint],
    topology: Mapping[str, str],
) -> list[PlannedRound]:
    """Every repeat of every size; sizes fall in every other repeat, so that a drift cancels."""
    planned: list[PlannedRound] = []
    for repeat in range(1, options.repeats + 1):
        for point in points if repeat % 2 else reversed(points):
            rounds = split_rounds(
                hosts,
                point.nodes,
                options.split,
                num_rounds=options.rounds,
                seed=options.seed,
                topology=topology,
            )
            planned += [
                PlannedRound(
                    number=len(planned) + at,
                    nodes=point.nodes,
                    devices_per_node=point.devices_per_node,
                    repeat=repeat,
                    groups=round_.groups,
                    left_over=round_.left_over,
                    made_up=round_.made_up,
                )
                for at, round_ in enumerate(rounds, start=1)
            ]
    return planned


def _named(root: Path, campaign: Campaign, name: str | None) -> Campaign:
    """The campaign under its name, or the one that stands there already and measures the same."""
    if name is None:
        return campaign
    if not _NAME.fullmatch(name) or name == "last":
        raise UserError(
            f"--name {name}",
            "cannot name a campaign",
            allowed="letters, digits, . _ and -, but not `last`",
        )
    if name in {folder.name for folder in run_folders(root)}:
        raise UserError(f"--name {name}", "is the name of a run")
    if name not in {folder.name for folder in campaign_folders(root)}:
        if {path.name for path in (root / name).glob("*")} - {LOCK_FILE}:
            raise UserError(
                f"--name {name}", "is a folder of something else", remedy="give another name"
            )
        return campaign.model_copy(update={"name": name})
    stored = read_campaign(root, name)
    if stored.key != campaign.key:
        raise UserError(
            f"--name {name}",
            "is a campaign that measures something else",
            remedy="give another name",
        )
    return stored


def _in_allocation(point: CampaignPoint, job: str) -> CampaignPoint:
    cluster = point.spec.cluster
    moved = cluster.slurm.model_copy(update={"allocation": job})
    spec = point.spec.model_copy(update={"cluster": cluster.model_copy(update={"slurm": moved})})
    return point.model_copy(update={"spec": spec})
