"""What is asked of an estimate, and the recipe, devices and machine that the question names."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from math import ceil

from paceline.core.errors import UserError
from paceline.core.hardware import Cluster
from paceline.core.layout import Layout
from paceline.core.run import RunSpec
from paceline.core.site import Site
from paceline.core.units import counted
from paceline.estimate.calibrate.calibration import Calibration
from paceline.estimate.calibrate.lookup import automatic_dtype, is_cpu, machine_for
from paceline.estimate.costs import Failures, Prices
from paceline.estimate.fit.origin import ANY
from paceline.estimate.model.case import CudaGraphs, Dispatcher
from paceline.estimate.model.levels import with_fabric
from paceline.estimate.model.machine import Machine
from paceline.estimate.run_case import Software, software_named
from paceline.files import catalog
from paceline.files.recipe import Recipe, load_recipe, resolve


@dataclass(frozen=True)
class Question:
    """What is to be estimated."""

    recipe: str
    device: str
    devices: int
    variant: str | None = None
    overrides: tuple[str, ...] = ()
    devices_per_node: int = 8
    intra_link: str | None = None
    inter_link: str | None = None
    stack: str = ANY
    """Software of `fit/origin.py`, or how it computes: fused, torch or softmax; of a release with
    its year and month, nemo@26.02."""
    dispatcher: Dispatcher = "any"
    """What brings tokens to their experts."""
    compiled: bool = False
    cuda_graphs: CudaGraphs = "none"
    """What is captured in CUDA graphs, so that no host starts its kernels."""
    released: float | None = None
    """When the software came out, in years; None for the newest that was looked at."""
    tokens: float | None = None
    """Length of the whole training; None takes the recipe's."""
    prices: Prices = field(default_factory=Prices)
    failures: Failures | None = None
    site: Site | None = None
    """A cluster's file, which then says all of devices and links."""
    calibration: Calibration | None = None
    """Of a processor, from a file; None for the user's own."""
    native: bool = False
    """Memory by the constants of the trainer that comes with Paceline, as on CPUs always."""

    @property
    def software(self) -> Software:
        """What computes the training."""
        named = software_named(self.stack, self.compiled, self.native, self.cuda_graphs)
        released = self.released or named.released
        return replace(named, released=released, dispatcher=self.dispatcher)


def spec_of(question: Question) -> RunSpec:
    """The recipe resolved on the devices asked for."""
    return resolve(recipe_of(question), cluster_of(question), True, question.variant)


def recipe_of(question: Question) -> Recipe:
    """The recipe asked for; `auto` is the dtype that it is estimated in on that device.

    Where it leaves open whether blocks are compiled, the question says it.
    """
    recipe = load_recipe(question.recipe, question.variant, question.overrides)
    changes: dict[str, str] = {}
    if recipe.training.dtype == "auto":
        changes["dtype"] = automatic_dtype(question.device)
    if recipe.training.compile == "auto":
        changes["compile"] = "blocks" if question.compiled else "none"
    training = recipe.training.model_copy(update=changes)
    return recipe.model_copy(update={"training": training})


def spec_of_any_layout(question: Question) -> RunSpec:
    """The recipe on the devices asked for, whether or not its own layout and batch fit there."""
    recipe, cluster = recipe_of(question), cluster_of(question)
    batch = recipe.training.batch(cluster.world_size, cluster.nodes)
    single = recipe.training.model_copy(
        update={"ramp_up": None, "global_batch": 1, "batch_per_device": None}
    )
    plain = recipe.model_copy(update={"layout": Layout(), "training": single})
    one_device = cluster.model_copy(update={"nodes": 1, "devices_per_node": 1})
    spec = resolve(plain, one_device, True, question.variant)
    training = spec.training.model_copy(update={"global_batch": batch})
    return spec.model_copy(
        update={"cluster": cluster, "layout": recipe.layout, "training": training}
    )


def cluster_of(question: Question) -> Cluster:
    """The devices asked for; raises UserError where they do not fill whole nodes."""
    if question.site is not None:
        return _part_of(question.site, question.devices)
    per_node = min(question.devices_per_node, question.devices)
    if is_cpu(question.device):
        per_node = question.devices
    cluster = Cluster(
        name="estimate",
        device=catalog.find_device(question.device).device.name,
        nodes=ceil(question.devices / per_node),
        devices_per_node=per_node,
        intra_link=question.intra_link,
        inter_link=question.inter_link,
    )
    if cluster.world_size != question.devices:
        raise UserError(
            f"--gpus {question.devices}",
            f"is no multiple of {per_node} a node",
            remedy="--per-node N",
        )
    return cluster


def machine_of(question: Question) -> Machine:
    """The devices asked for with their links.

    Raises UserError as `machine_for` does, and for a link in the place of another kind.
    """
    _check_links(question)
    dtype = recipe_of(question).training.dtype
    machine = machine_for(cluster_of(question), dtype, question.device, question.calibration)
    return with_fabric(machine, question.site) if question.site else machine


def _check_links(question: Question) -> None:
    """Raise UserError for a network inside a node, or for a node's link between nodes."""
    check_link("intra", question.intra_link)
    check_link("inter", question.inter_link)


def check_link(place: catalog.LinkPlace, name: str | None) -> None:
    """Raise UserError where the option of that place names a link of the other one."""
    if name and (words := catalog.misplaced(name, place)):
        raise UserError(
            f"--{place} {name}",
            f"is {words}",
            allowed=f"{catalog.LINK_ALLOWED}, or a rate",
            remedy=f"--{catalog.OTHER_PLACE[place]} {shlex.quote(name)} says it",
        )


def _part_of(site: Site, devices: int) -> Cluster:
    """Return the cluster with so many devices of it; raises UserError for more than it has."""
    nodes, rest = divmod(devices, site.devices_per_node)
    if rest:
        raise UserError(
            f"--gpus {devices}",
            f"is no multiple of {site.devices_per_node} a node",
            remedy="devices_per_node in the cluster's file",
        )
    if devices > site.world_size:
        raise UserError(
            f"--gpus {devices}",
            f"{site.name} has {counted(site.world_size, 'device')}",
            allowed=f"up to {site.world_size:,}",
        )
    return site.as_cluster.model_copy(update={"nodes": nodes, "launcher": "local", "hosts": ()})
