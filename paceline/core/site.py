"""Site: a cluster with the levels of its network, for planning."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from paceline.core.hardware import Cluster
from paceline.core.value import PositiveInt, Value

MAX_LEVELS = 4


class FabricLevel(Value):
    """One level of a fabric: the number of neighboring devices that it connects, and its speed."""

    name: str = Field(min_length=1, max_length=40)
    """Name of the level."""
    devices: PositiveInt | None = None
    """Number of devices that the level connects. Unset, allowed for the last level only,
    connects all."""
    link: str | None = None
    """Name of a link in the catalog, a rate per device (450 GB/s) or the ports of a node (8x400
    Gb/s). Unset uses the rate of the level below."""
    oversubscription: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """Bandwidth of the level below divided by the bandwidth of this level."""
    latency_s: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Additional one-way latency in seconds."""


class Site(Cluster):
    """File of a cluster: the settings for runs, and the fabric for estimates."""

    fabric: tuple[FabricLevel, ...] = Field(default=(), max_length=MAX_LEVELS)
    """Levels of the network, starting at the links of a device. The first level is the NVLink
    domain."""
    placement: Literal["in-order", "scattered"] = "in-order"
    """Placement of ranks: `in-order` if neighboring ranks share a switch, `scattered` if nodes can
    be anywhere."""

    @model_validator(mode="after")
    def _levels_hold_each_other(self) -> Site:
        sizes = [level.devices for level in self.fabric]
        if None in sizes[:-1]:
            raise ValueError("fabric: only the last level may omit devices")
        level_sizes = [size for size in sizes if size is not None]
        for inner, outer in pairwise(level_sizes):
            if outer <= inner or outer % inner:
                raise ValueError(
                    f"fabric: a level of {outer} devices is not a multiple of the level of {inner} "
                    f"below it; allowed: a larger multiple, such as {2 * inner}"
                )
        if level_sizes and max(level_sizes[0], self.devices_per_node) % min(
            level_sizes[0], self.devices_per_node
        ):
            raise ValueError(
                f"fabric: {level_sizes[0]} devices are {self._partial_nodes}, or a divisor of it"
            )
        if level_sizes[1:] and level_sizes[1] % self.devices_per_node:
            raise ValueError(f"fabric: {level_sizes[1]} devices are {self._partial_nodes}")
        if len(level_sizes) == len(sizes) > 0 and level_sizes[-1] < self.world_size:
            raise ValueError(
                f"fabric: the last level connects {level_sizes[-1]} of {self.world_size} devices; "
                "omit its number to connect all"
            )
        if self.fabric and self.fabric[0].oversubscription != 1:
            raise ValueError(
                "fabric: the first level cannot be oversubscribed, because no level is below it"
            )
        if self.fabric and (self.intra_link or self.inter_link):
            raise ValueError(
                "fabric: set the link of each level instead of intra_link and inter_link"
            )
        return self

    @property
    def _partial_nodes(self) -> str:
        return f"not whole nodes; allowed: a multiple of {self.devices_per_node}"

    @property
    def as_cluster(self) -> Cluster:
        """The cluster settings that runs use."""
        fields = self.model_fields_set & set(Cluster.model_fields)
        return Cluster.model_validate({name: getattr(self, name) for name in fields})
