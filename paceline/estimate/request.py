"""The request for an estimate, and the recipe, cluster and machine it resolves to."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil

from paceline.core.errors import UserError
from paceline.core.hardware import Cluster, Site
from paceline.core.layout import Layout
from paceline.core.run import RunSpec
from paceline.core.units import pluralize
from paceline.estimate.calibrate.calibration import Calibration
from paceline.estimate.calibrate.lookup import automatic_dtype, is_cpu, machine_for
from paceline.estimate.costs import Failures, Prices
from paceline.estimate.measured_network import NetworkRate, with_measured_network
from paceline.estimate.model.case import CudaGraphs, Dispatcher
from paceline.estimate.model.machine import Machine, with_fabric
from paceline.estimate.run_case import Software, parse_software, software_name
from paceline.files import catalog
from paceline.files.recipe import Recipe, load_recipe, resolve


@dataclass(frozen=True)
class EstimateRequest:
    """Request for an estimate; recipe, cluster and machine are resolved once, on first use."""

    recipe: str
    device: str
    devices: int
    variant: str | None = None
    overrides: tuple[str, ...] = ()
    devices_per_node: int = 8
    intra_link: str | None = None
    inter_link: str | None = None
    software: str | None = None
    """Name from SOFTWARE (`fit/origin.py`) or an implementation: fused, torch or softmax. An
    optional release has year and month: nemo@26.02. None is that of the recipe's engine."""
    dispatcher: Dispatcher = "any"
    """MoE token dispatcher."""
    compiled: bool = False
    cuda_graphs: CudaGraphs = "none"
    """Part of the step captured in CUDA graphs, which removes its CPU launch overhead."""
    software_date: float | None = None
    """Release date of the software as a decimal year; None for the newest with measurements."""
    tokens: float | None = None
    """Tokens of the whole run; None takes the recipe's."""
    prices: Prices = field(default_factory=Prices)
    failures: Failures | None = None
    site: Site | None = None
    """A cluster file, which then defines devices and links."""
    calibration: Calibration | None = None
    """Calibration of a CPU from a file; None for the one stored on this machine."""
    native: bool = False
    """True to use the native trainer's memory constants, as is always done on CPUs."""
    network: NetworkRate | None = None
    """A measured network, instead of `inter_link`."""

    @property
    def software_name(self) -> str:
        """Name of the software: as requested, else that of the recipe's engine."""
        return self.software or software_name(self.resolved_recipe.engine)

    @property
    def resolved_software(self) -> Software:
        """The software that runs the recipe."""
        name = self.software_name
        software = parse_software(name, self.compiled, self.native, self.cuda_graphs)
        software_date = self.software_date or software.software_date
        return replace(software, software_date=software_date, dispatcher=self.dispatcher)

    @cached_property
    def resolved_recipe(self) -> Recipe:
        """The recipe with its variant and overrides.

        A dtype of `auto` becomes the device's dtype, and compile `auto` becomes the request's.
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
        """The recipe resolved on the requested devices."""
        return resolve(self.resolved_recipe, self.cluster, True, self.variant)

    @cached_property
    def spec_of_any_layout(self) -> RunSpec:
        """The recipe on the requested devices, even if its own layout and batch do not fit."""
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
        """The requested devices; raises UserError if they do not fill whole nodes."""
        if self.site is not None:
            return _sub_cluster(self.site, self.devices)
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
                f"is not a multiple of {per_node} devices per node",
                remedy="set --per-node",
            )
        return cluster

    @cached_property
    def machine(self) -> Machine:
        """The requested devices with their links.

        Raises UserError as `machine_for` and `with_measured_network` do, and if a link is given in
        the wrong place.
        """
        check_link("intra", self.intra_link)
        check_link("inter", self.inter_link)
        dtype = self.resolved_recipe.training.dtype
        machine = machine_for(self.cluster, dtype, self.device, self.calibration)
        if self.network:
            return with_measured_network(machine, self.network, self.cluster.nodes)
        return with_fabric(machine, self.site) if self.site else machine


def check_link(place: catalog.LinkPlace, name: str | None) -> None:
    """Raise UserError if an intra-node link is given as the network, or the reverse."""
    if name and (words := catalog.link_place_problem(name, place)):
        raise UserError(
            f"--{place} {name}",
            f"is {words}",
            allowed=f"{catalog.LINK_ALLOWED}, or a rate",
            remedy=f"use --{catalog.OTHER_PLACE[place]} {shlex.quote(name)}",
        )


def _sub_cluster(site: Site, devices: int) -> Cluster:
    """Return the site with only `devices` devices; raises UserError if it has fewer."""
    nodes, remainder = divmod(devices, site.devices_per_node)
    if remainder:
        raise UserError(
            f"--gpus {devices}",
            f"is not a multiple of {site.devices_per_node} devices per node",
            remedy="change devices_per_node in the cluster file",
        )
    if devices > site.world_size:
        raise UserError(
            f"--gpus {devices}",
            f"{site.name} has {pluralize(site.world_size, 'device')}",
            allowed=f"up to {site.world_size:,}",
        )
    return site.as_cluster.model_copy(update={"nodes": nodes, "launcher": "local", "hosts": ()})
