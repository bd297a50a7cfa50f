"""Plan of a scaling test: its sizes, batches and rounds; started, resumed, found by name."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError, unreadable
from paceline.core.hosts import expand
from paceline.core.node_groups import ScalingKind, Split, split_rounds
from paceline.core.units import pluralize, there_are
from paceline.files.documents import read_text
from paceline.files.recipe import Recipe, load_recipe
from paceline.files.run_folder import new_folder, run_folders
from paceline.machines.placement import Request, choose_cluster, shared_hosts, with_slurm_nodes
from paceline.machines.probe.inventory import inventory
from paceline.machines.slurm.client import allocation_hosts
from paceline.runs.compilation import with_equal_compilation
from paceline.runs.plan import make_plan
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

FORM = "numbers, `...` for those in between, N for all hosts"


def parse_sizes(
    text: str | None, num_hosts: int, remedy: str = "list more with --hosts"
) -> tuple[int, ...]:
    """Return the sizes that `text` lists, in ascending order; 1, 2, 4, ... and all for None.

    `...` continues the two numbers before it: by their ratio if that is an integer, otherwise by
    their difference. With `...`, numbers above the number of hosts are dropped. `N` means all
    hosts. Raises UserError for any other text, and, with `remedy`, for more nodes than hosts.
    """
    text = "1,2,4,...,N" if text is None else text
    words = [word.strip() for word in text.split(",") if word.strip()]
    sizes: list[int] = []
    for at, word in enumerate(words):
        if word == "...":
            end = _number(words[at + 1], text, num_hosts) if at + 1 < len(words) else num_hosts
            sizes += _between(sizes, end, text)
        else:
            sizes.append(_number(word, text, num_hosts))
    if not sizes:
        raise UserError(f"--sizes {text}", "lists no size", allowed=FORM)
    if "..." in words:
        sizes = [size for size in sizes if size <= num_hosts] or sizes
    if max(sizes) > num_hosts:
        raise UserError(f"--sizes {text}", there_are(num_hosts, "host"), remedy=remedy)
    return tuple(sorted(set(sizes)))


def _number(word: str, text: str, num_hosts: int) -> int:
    if word in ("N", "n"):
        return num_hosts
    if not (word.isascii() and word.isdecimal() and len(word) < 7 and int(word)):
        raise UserError(f"--sizes {text}", f"{word!r} is not a number of nodes", allowed=FORM)
    return int(word)


def _between(sizes: list[int], end: int, text: str) -> list[int]:
    """Return the numbers that continue the last two of `sizes` up to `end`."""
    if len(sizes) < 2 or sizes[-1] <= sizes[-2]:
        raise UserError(
            f"--sizes {text}", "... needs two increasing numbers before it", allowed=FORM
        )
    before, last = sizes[-2:]
    between: list[int] = []
    while True:
        following = last * (last // before) if last % before == 0 else 2 * last - before
        if following > end:
            return between
        before, last = last, following
        between.append(following)


_SLURM = re.compile(r"SwitchName=(\S+)\s.*?\bNodes=(\S+)")


def read_topology(path: Path) -> dict[str, str]:
    """Return the switch of each host, from lines `HOSTS SWITCH` or Slurm's topology.conf.

    Only Slurm's lines with nodes count, in the order of the file. Raises UserError with the line
    number for a line in neither format.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(str(path), error) from error
    switches: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        place = f"{path}:{number}"
        hosts, switch = _split(line.partition("#")[0].strip(), place)
        switches |= {host: switch for host in expand(hosts, place) if host not in switches}
    return switches


def _split(text: str, where: str) -> tuple[str, str]:
    """Return the hosts and the switch of a line; no hosts if it has none."""
    if text.startswith("SwitchName="):
        match = _SLURM.match(text)
        return (match[2], match[1]) if match else ("", "")
    words = text.split()
    if len(words) not in (0, 2):
        raise UserError(where, "is not a host and its switch", allowed="node[01-16] switch-1")
    return (words[0], words[1]) if words else ("", "")


def scaling_kind(recipe: Recipe, option: ScalingKind | None) -> ScalingKind:
    """Return the option, else the recipe's kind, else "strong" if its global batch is a number."""
    default = "strong" if isinstance(recipe.training.global_batch, int) else "weak"
    return option or recipe.scaling or default


def batch_on(
    recipe: Recipe, kind: ScalingKind, num_nodes: int, devices: int, whole_node: int
) -> int:
    """Return the sequences per step on `num_nodes` nodes, using `devices` of `whole_node` devices.

    Raises UserError if the recipe does not determine the batch for this kind of scaling.
    """
    training = recipe.training
    if kind == "strong" and isinstance(training.global_batch, int):
        return training.global_batch
    if kind == "strong" and recipe.devices is None:
        raise UserError(
            f"strong scaling of {recipe.name}",
            "needs one batch for all sizes",
            remedy="--set global_batch=N",
        )
    if training.batch_per_device is not None:
        share = Fraction(training.batch_per_device)
    elif training.batch_per_node is not None:
        share = Fraction(training.batch_per_node, whole_node)
    elif recipe.devices is not None:
        share = Fraction(training.batch(recipe.devices), recipe.devices)
    else:
        raise UserError(
            f"weak scaling of {recipe.name}",
            "its batch does not grow with the devices",
            remedy='--set batch_per_device=N or --set "global_batch=N per node"; '
            "or --scaling strong",
        )
    world = num_nodes * devices if kind == "weak" else recipe.devices or 1
    batch = share * world
    if batch.denominator != 1:
        raise UserError(
            f"{kind} scaling of {recipe.name} on {pluralize(world, 'device')}",
            f"a batch of {float(batch):g} sequences is impossible",
            remedy="--set batch_per_device=N",
        )
    return int(batch)


UNNAMED = "-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class CampaignRequest:
    """Options of a scaling test."""

    request: Request
    sizes: str | None = None
    devices_per_node: tuple[int, ...] = ()
    """Numbers of devices to use per node; empty for whole nodes only."""
    scaling: ScalingKind | None = None
    split: Split = "contiguous"
    topology: Path | None = None
    rounds: int = 1
    repeats: int = 1
    seed: int = 0
    name: str | None = None


def new_campaign(root: Path, options: CampaignRequest, command: Sequence[str]) -> Campaign:
    """Return the scaling test for these options, without writing it.

    A stored test of the same name that measures the same is resumed. Raises UserError when some
    part of it cannot run, or the name is taken.
    """
    recipe = load_recipe(options.request.recipe, options.request.variant, options.request.overrides)
    request = options.request if options.sizes == "1" else with_slurm_nodes(options.request)
    if options.devices_per_node and request.cluster:
        request = replace(request, devices_per_node=max(options.devices_per_node))
    machine = inventory()
    cluster, _ = choose_cluster(request, recipe, machine)
    hosts = shared_hosts(request, cluster)
    devices = tuple(sorted({*options.devices_per_node})) or (cluster.devices_per_node,)
    names = [host.name for host in hosts]
    sizes = parse_sizes(options.sizes, len(names))
    kind = scaling_kind(recipe, options.scaling)
    topology = read_topology(options.topology) if options.topology else {}
    remote_hosts = () if cluster.runs_here else hosts
    where = replace(request.where, hosts=remote_hosts, launcher=cluster.launcher)
    request = replace(request, where=where)
    points, notices = _points(request, recipe, kind, sizes, devices, machine)
    if equal := with_equal_compilation(request, [point.spec for point in points]):
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
    return _with_name(root, campaign, options.name)


def with_folder(root: Path, campaign: Campaign) -> Campaign:
    """Return the scaling test with a name; create an empty folder for it if it had none."""
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
    """Write the scaling test's file and return it, with rounds that another process added."""
    if (root / campaign.name / CAMPAIGN_FILE).exists():
        record = read_campaign(root, campaign.name)
        campaign = campaign.model_copy(update={"plan": record.plan})
    write_campaign(root, campaign)
    return campaign


def resumed_campaign(root: Path, name: str, allocation: str | None = None) -> Campaign:
    """Return the stored scaling test; `allocation` is a new Slurm job for the remaining rounds.

    Raises UserError when there is no such test, or the new job lacks some of its hosts.
    """
    campaign = read_campaign(root, name)
    job = allocation or os.environ.get("SLURM_JOB_ID")
    allocations = campaign.points[0].spec.cluster.capabilities.allocations
    if not allocations or job is None:
        return campaign
    missing = sorted({*campaign.hosts} - {host.name for host in allocation_hosts(job)})
    if missing:
        raise UserError(
            f"scaling test {campaign.name}",
            f"needs {missing[0]}, which job {job} lacks",
            remedy="start a new scaling test, or request the same nodes (--nodelist)",
        )
    points = tuple(_in_allocation(point, job) for point in campaign.points)
    return campaign.model_copy(update={"points": points})


def equivalent_campaigns(root: Path, campaign: Campaign) -> list[str]:
    """Return the names of other scaling tests that measure the same; skip unreadable ones."""
    names: list[str] = []
    for folder in campaign_folders(root):
        # A broken file of another scaling test must not prevent this one.
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
    """Return the runs of each size, points below one node first, and the notices about them."""
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
    """Return every repeat of every size; every second repeat is reversed to cancel drift."""
    plan: list[PlannedRound] = []
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
            plan += [
                PlannedRound(
                    number=len(plan) + at,
                    nodes=point.nodes,
                    devices_per_node=point.devices_per_node,
                    repeat=repeat,
                    groups=round_.groups,
                    left_over=round_.left_over,
                    made_up=round_.made_up,
                )
                for at, round_ in enumerate(rounds, start=1)
            ]
    return plan


def _with_name(root: Path, campaign: Campaign, name: str | None) -> Campaign:
    """Return the scaling test under its name, or the stored one that measures the same."""
    if name is None:
        return campaign
    if not _NAME.fullmatch(name) or name == "last":
        raise UserError(
            f"--name {name}",
            "is not a valid name of a scaling test",
            allowed="letters, digits, . _ and -, but not `last`",
        )
    if name in {folder.name for folder in run_folders(root)}:
        raise UserError(f"--name {name}", "is the name of a run")
    if name not in {folder.name for folder in campaign_folders(root)}:
        if {path.name for path in (root / name).glob("*")} - {LOCK_FILE}:
            raise UserError(
                f"--name {name}", "is a folder with other contents", remedy="choose another name"
            )
        return campaign.model_copy(update={"name": name})
    record = read_campaign(root, name)
    if record.key != campaign.key:
        raise UserError(
            f"--name {name}",
            "is a scaling test that measures something else",
            remedy="choose another name",
        )
    return record


def _in_allocation(point: CampaignPoint, job: str) -> CampaignPoint:
    cluster = point.spec.cluster
    slurm = cluster.slurm.model_copy(update={"allocation": job})
    spec = point.spec.model_copy(update={"cluster": cluster.model_copy(update={"slurm": slurm})})
    return point.model_copy(update={"spec": spec})
