"""A cluster as somebody plans with it: its fabric in levels, failures, prices over time, power."""

from __future__ import annotations

from datetime import date
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from paceline.core.hardware import Cluster
from paceline.core.units import counted
from paceline.core.value import PositiveInt, Value

MOST_LEVELS = 4
MOST_PERIODS = 100
Hours = Annotated[float, Field(ge=1e-3, le=1e9)]
Seconds = Annotated[float, Field(ge=0, le=1e7)]
Money = Annotated[float, Field(ge=0, le=1e6)]


class FabricLevel(Value):
    """One level of a fabric: how many neighbouring devices it joins, and how fast."""

    name: str = Field(min_length=1, max_length=40)
    devices: PositiveInt | None = None
    """That it joins; None, of the last level alone, joins all."""
    link: str | None = None
    """A link of the catalog, a device's rate (450 GB/s) or a node's ports (8x400 Gb/s).

    None has the rate of the level below, and of the first two levels what is usual.
    """
    oversubscription: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """What the level below can send over what this one can carry, where all send at once."""
    latency_s: Annotated[float, Field(ge=0, le=10)] = 0.0
    """One way, beyond what links inside a node and one network have as a rule."""


class Outages(Value):
    """How often hardware fails, and what a failure costs."""

    device_mtbf_h: Hours | None = None
    """Mean hours between failures of one device that end a training."""
    node_mtbf_h: Hours | None = None
    """The same of a node beside its devices, or with them where theirs is not stated."""
    mtbf_within: Annotated[float, Field(ge=1, le=100)] = 1.0
    """Factor to either side of the stated times that holds 80 % of what they may really be."""
    restart_s: Seconds = 600.0
    """From a failure to the first step after it, without the lost work."""
    checkpoint_s: Seconds = 30.0
    """How long saving a checkpoint keeps the training waiting."""
    checkpoint_every_s: PositiveFloat | None = None
    """Of training between two checkpoints; None takes Young's interval."""
    spare_nodes: Annotated[int, Field(ge=0, le=100_000)] = 0
    """Of the cluster's nodes, which wait for others to fail; they are paid for."""
    repair_h: Hours | None = None
    """Until a failed node is back; None is not known."""

    @model_validator(mode="after")
    def _has_a_rate(self) -> Outages:
        if self.device_mtbf_h is None and self.node_mtbf_h is None:
            raise ValueError("needs device_mtbf_h or node_mtbf_h")
        return self


class PricePeriod(Value):
    """What a device hour costs from a day on."""

    since: date | None = None
    """Its first day; None, of the first period alone, is the start of the training."""
    per_device_hour: Money
    terms: Literal["reserved", "on-demand", "spot"] = "reserved"
    interrupted_every_h: Hours | None = None
    """Mean hours between two interruptions of spot capacity; None is not known, or none."""
    interrupted_for_h: NonNegativeFloat = 0.0
    """Mean hours until it is back, which nobody pays for."""

    @model_validator(mode="after")
    def _interrupts_spot_alone(self) -> PricePeriod:
        if self.terms != "spot" and (self.interrupted_every_h or self.interrupted_for_h):
            raise ValueError("only terms: spot are interrupted")
        return self


class PowerDraw(Value):
    """What machines draw while they train."""

    device_w: PositiveFloat | None = None
    """Mean of one device; None takes its data sheet, an upper bound."""
    node_w: NonNegativeFloat | None = None
    """Of a node beside its devices; None is not known, and not counted."""
    pue: Annotated[float, Field(ge=1, le=10)] = 1.0
    """A site's energy over that of its machines."""
    carbon_g_per_kwh: NonNegativeFloat | None = None


class Site(Cluster):
    """A cluster's file: what runs need of it, and what planning needs beside."""

    fabric: tuple[FabricLevel, ...] = Field(default=(), max_length=MOST_LEVELS)
    """From the links of a device outwards; the first is the fast domain."""
    placement: Literal["in-order", "scattered"] = "in-order"
    """Whether neighbouring ranks share the levels of the network, or nodes lie anywhere."""
    failures: Outages | None = None
    power: PowerDraw | None = None
    start: date | None = None
    """Of the training; needed where prices change."""
    currency: str | None = Field(default=None, min_length=1, max_length=10)
    prices: tuple[PricePeriod, ...] = Field(default=(), max_length=MOST_PERIODS)

    @model_validator(mode="after")
    def _levels_hold_each_other(self) -> Site:
        sizes = [level.devices for level in self.fabric]
        if None in sizes[:-1]:
            raise ValueError("fabric: only the last level may leave out devices")
        stated = [size for size in sizes if size is not None]
        for inner, outer in pairwise(stated):
            if outer <= inner or outer % inner:
                raise ValueError(
                    f"fabric: a level of {outer} does not hold levels of {inner}; allowed: more of "
                    f"them, as {2 * inner}"
                )
        if stated and max(stated[0], self.devices_per_node) % min(stated[0], self.devices_per_node):
            raise ValueError(
                f"fabric: {stated[0]} devices are {self._no_nodes}, or what divides it"
            )
        if stated[1:] and stated[1] % self.devices_per_node:
            raise ValueError(f"fabric: {stated[1]} devices are {self._no_nodes}")
        if len(stated) == len(sizes) > 0 and stated[-1] < self.world_size:
            raise ValueError(
                f"fabric: the last level joins {stated[-1]} of {self.world_size} devices; "
                "without a number it joins all"
            )
        if self.fabric and self.fabric[0].oversubscription != 1:
            raise ValueError("fabric: the first level has nothing below it to be oversubscribed by")
        if self.fabric and (self.intra_link or self.inter_link):
            raise ValueError("fabric: its levels have a link each, so no intra_link or inter_link")
        return self

    @model_validator(mode="after")
    def _prices_follow_each_other(self) -> Site:
        days = [period.since for period in self.prices]
        if None in days[1:]:
            raise ValueError("prices: only the first period may leave out since")
        known = [day for day in days if day is not None]
        if any(later <= day for day, later in pairwise(known)):
            raise ValueError("prices: periods must follow each other")
        if known and self.start is None:
            raise ValueError("prices: needs start, the day on which the training begins")
        if self.start and self.prices and self.prices[0].since and self.start < known[0]:
            raise ValueError(f"prices: none is stated for {self.start}, before {known[0]}")
        return self

    @model_validator(mode="after")
    def _says_what_an_interruption_costs(self) -> Site:
        if self.failures is None and any(period.interrupted_every_h for period in self.prices):
            raise ValueError("prices: interruptions need failures, which say what a restart costs")
        return self

    @model_validator(mode="after")
    def _leaves_nodes(self) -> Site:
        if self.failures and self.failures.spare_nodes >= self.nodes:
            raise ValueError(
                f"failures.spare_nodes: leaves none of {counted(self.nodes, 'node')} to train on"
            )
        return self

    @property
    def _no_nodes(self) -> str:
        return f"no whole nodes; allowed: a multiple of {self.devices_per_node}"

    @property
    def spare_nodes(self) -> int:
        """Nodes that train only when others have failed."""
        return self.failures.spare_nodes if self.failures else 0

    @property
    def training_devices(self) -> int:
        """Devices of all nodes that are no spares."""
        return (self.nodes - self.spare_nodes) * self.devices_per_node

    @property
    def as_cluster(self) -> Cluster:
        """What runs need of it."""
        fields = self.model_fields_set & set(Cluster.model_fields)
        return Cluster.model_validate({name: getattr(self, name) for name in fields})
