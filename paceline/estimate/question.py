"""What is asked of an estimate, and the recipe, devices and machine that the question names."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from functools import cached_property
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
from paceline.estimate.model.machine import Machine, with_fabric
from paceline.estimate.run_case import Software, software_named
from paceline.files import catalog
from paceline.files.recipe import Recipe, load_recipe, resolve


@dataclass(frozen=True)
class Question:
    """What is to be estimated; recipe, cluster and machine are looked up once, when first used."""

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

    @cached_property
    def resolved_recipe(self) -> Recipe:
        """The recipe with its variant and overrides; `auto` is the dtype of that device.

        Where it leaves open whether blocks are compiled, the question says it.
        """
        recipe = load_recipe(self.recipe, self.variant, self.overrides)
        changes: dict[str, str] = {}
        if recipe.training.dtype == "auto":
            changes["dtype"] = automatic_dtype(self.device)
        if recipe.training.compile == "auto":
            changes["compile"] = "blocks" if self.compiled else "none"
        training = recipe.training.model_copy(update=changes)
        return recipe.model_copy(update={"training": training})

    @cached_property
    def spec(self) -> RunSpec:
        """The recipe resolved on the devices asked for."""
        return resolve(self.resolved_recipe, self.cluster, True, self.variant)

    @cached_property
    def spec_of_any_layout(self) -> RunSpec:
        """The recipe on the devices, whether or not its own layout and batch fit there."""
        recipe, cluster = self.resolved_recipe, self.cluster
        batch = recipe.training.batch(cluster.world_size, cluster.nodes)
        single = recipe.training.model_copy(
            update={"ramp_up": None, "global_batch": 1, "batch_per_device": None}
        )
        plain = recipe.model_copy(update={"layout": Layout(), "training": single})
        one_device = cluster.model_copy(update={"nodes": 1, "devices_per_node": 1})
        spec = resolve(plain, one_device, True, self.variant)
        training = spec.training.model_copy(update={"global_batch": batch})
        return spec.model_copy(
            update={"cluster": cluster, "layout": recipe.layout, "training": training}
        )

    @cached_property
    def cluster(self) -> Cluster:
        """The devices asked for; raises UserError where they do not fill whole nodes."""
        if self.site is not None:
            return _part_of(self.site, self.devices)
        per_node = min(self.devices_per_node, self.devices)
        if is_cpu(self.device):
            per_node = self.devices
        cluster = Cluster(
            name="estimate",
            device=catalog.find_device(self.device).device.name,
            nodes=ceil(self.devices / per_node),
            devices_per_node=per_node,
            intra_link=self.intra_link,
            inter_link=self.inter_link,
        )
        if cluster.world_size != self.devices:
            raise UserError(
                f"--gpus {self.devices}",
                f"is no multiple of {per_node} a node",
                remedy="--per-node N",
            )
        return cluster

    @cached_property
    def machine(self) -> Machine:
        """The devices asked for with their links.

        Raises UserError as `machine_for` does, and for a link in the place of another kind.
        """
        check_link("intra", self.intra_link)
        check_link("inter", self.inter_link)
        dtype = self.resolved_recipe.training.dtype
        machine = machine_for(self.cluster, dtype, self.device, self.calibration)
        return with_fabric(machine, self.site) if self.site else machine


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
