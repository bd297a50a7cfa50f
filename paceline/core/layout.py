"""Parallel layouts: how a model is distributed over devices.

core/axes declares the meaning, the rules and the traffic of each axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm, prod
from typing import Annotated, Literal

from pydantic import Field

from paceline.core.value import NonNegativeInt, PositiveInt, Value

Recompute = Literal["none", "selective", "full", "budget"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
Exchange = Literal["all-gather", "all-to-all", "ring"]
GradientSync = Literal["every", "last"]


@dataclass(frozen=True)
class AxisSize:
    """Mark of a `Layout` field that holds the size of a parallel axis."""

    splits_model: bool
    """True if the size multiplies the number of devices of one replica."""


ModelAxis = Annotated[PositiveInt, AxisSize(splits_model=True)]
OtherAxis = Annotated[PositiveInt, AxisSize(splits_model=False)]


class Layout(Value):
    """Sizes of the parallel axes. Data parallelism uses the remaining devices."""

    tp: ModelAxis = 1
    """Tensor-parallel size."""
    pp: ModelAxis = 1
    """Pipeline-parallel size."""
    cp: ModelAxis = 1
    """Context-parallel size."""
    vp: OtherAxis = 1
    """Virtual pipeline stages per rank."""
    ep: OtherAxis = 1
    """Expert-parallel size."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """ZeRO stage: 0 is DDP, 1 shards the optimizer, 2 also the gradients, 3 also the weights
    (FSDP)."""
    micro_batch: PositiveInt = 1
    """Sequences per forward pass."""
    recompute: Recompute = "none"
    """Activation checkpointing: of attention (`selective`), whole blocks (`full`), or as much as
    `recompute_budget` requires."""
    recompute_budget: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of activations to keep, from 0 (full recomputation) to 1 (none)."""
    schedule: Schedule = "1f1b"
    """Pipeline schedule. `1f1b` with `vp` above 1 is interleaved."""
    sequence_parallel: bool = False
    """Shard activations along the sequence in tensor-parallel groups."""
    dp_shard: PositiveInt | None = None
    """Data-parallel ranks that share one sharded copy (HSDP). Unset is all."""
    cp_exchange: Exchange = "all-gather"
    """Exchange of keys and values between context-parallel ranks."""
    gradient_sync: GradientSync | None = None
    """Reduce gradients after `every` micro-batch or the `last` one. Unset is `last` for ZeRO 0
    and 1, else `every`."""

    @property
    def model_devices(self) -> int:
        """Number of devices of one replica: the product of MODEL_AXES."""
        return prod(getattr(self, axis) for axis in MODEL_AXES)

    @property
    def smallest_world(self) -> int:
        """Smallest number of devices for the layout: one replica, or one hybrid shard."""
        return self.model_devices // self.cp * lcm(self.cp, self.dp_shard or 1)

    @property
    def effective_schedule(self) -> Schedule:
        """Pipeline schedule that runs. 1F1B with several chunks per rank is interleaved."""
        is_chunked = self.schedule == "1f1b" and self.pp > 1 and self.vp > 1
        return "interleaved" if is_chunked else self.schedule

    @property
    def recomputation(self) -> str:
        """Recomputation in words: `none`, `full`, `budget 0.5`."""
        share = self.recompute_budget
        return self.recompute if share is None else f"{self.recompute} {share:g}"

    def dp(self, world_size: NonNegativeInt) -> int:
        """Return the number of data-parallel replicas on `world_size` devices."""
        return world_size // self.model_devices

    def shards(self, dp: int) -> int:
        """Return the number of ranks over which ZeRO shards one copy."""
        return self.dp_shard if self.dp_shard and self.zero_stage >= 2 else dp * self.cp

    def num_microbatches(self, world_size: int, global_batch: int) -> int:
        """Return the number of micro-batches per replica and step (gradient accumulation)."""
        return global_batch // (self.dp(world_size) * self.micro_batch)

    def label(self, world_size: int) -> str:
        """Return the axes larger than one, in the field's order: `dp 4 tp 2 zero 3`."""
        sizes = {axis: size for axis in AXIS_FIELDS if (size := getattr(self, axis)) > 1}
        zero = {"zero": self.zero_stage} if self.zero_stage else {}
        sizes = {"dp": self.dp(world_size), **sizes, **zero}
        return " ".join(f"{axis} {size}" for axis, size in sizes.items())

    def full_label(self, world_size: int) -> str:
        """Return the label with batch and recomputation.

        Example: `dp 4 tp 2 micro-batch 2 recompute full`.
        """
        return layout_label(self.label(world_size), self.micro_batch, self.recomputation)


def _sizes() -> dict[str, AxisSize]:
    return {
        name: mark
        for name, field in Layout.model_fields.items()
        for mark in field.metadata
        if isinstance(mark, AxisSize)
    }


AXIS_FIELDS: tuple[str, ...] = tuple(_sizes())
"""Fields of `Layout` that are axis sizes, in order. Data parallelism has no field."""
MODEL_AXES: tuple[str, ...] = tuple(name for name, mark in _sizes().items() if mark.splits_model)
"""Axes whose sizes multiply to the number of devices of one replica."""


def layout_label(axes: str, micro_batch: int, recomputation: str) -> str:
    """Return the axes of a layout with its micro-batch and its recomputation, if any."""
    recomputed = "" if recomputation == "none" else f" recompute {recomputation}"
    return f"{axes} micro-batch {micro_batch}{recomputed}"
