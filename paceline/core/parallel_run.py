"""ParallelRun: one training distributed over devices, as seen by a rank of one pipeline stage.

Size rules, memory and traffic of the parallel axes (core/axes) are functions of this class.
`RunSpec.parallel` creates it.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.layout import Layout
from paceline.core.pipeline import layers_per_stage
from paceline.core.shape import LoraSpec, Shape

COMPUTE_BYTES: dict[str, int] = {"fp32": 4, "fp64": 8}
"""Bytes per number in compute; 2 for all types that are not listed."""


@dataclass(frozen=True)
class ParallelRun:
    """A model, its layout and the data of a step. None leaves a setting open."""

    layout: Layout
    shape: Shape
    world_size: int
    """Number of devices, a multiple of `layout.model_devices`. `layout_problems` reports other
    numbers."""
    global_batch: int | None = None
    """Samples per step. None means one micro-batch per pipeline stage."""
    seq_len: int | None = None
    dtype: str | None = None
    device: str | None = None
    """Device type: cpu or cuda."""
    lora: LoraSpec | None = None
    fp8_recipe: str = "tensorwise"
    compiled: bool = False
    document_mask: bool = False
    pipeline_rank: int = 0

    @property
    def dp(self) -> int:
        """Number of data-parallel replicas."""
        return self.layout.dp(self.world_size)

    @property
    def data_ranks(self) -> int:
        """Number of ranks with the same weights, dp x cp. ZeRO shards over them."""
        return self.dp * self.layout.cp

    @property
    def shards(self) -> int:
        """Number of ranks over which ZeRO shards one copy."""
        return self.layout.shards(self.dp)

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches per replica and step."""
        if self.global_batch is None:
            return self.layout.pp
        return self.layout.num_microbatches(self.world_size, self.global_batch)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank, before sequence parallelism splits them."""
        assert self.seq_len is not None, "what counts tokens is asked with their number"
        return self.layout.micro_batch * self.seq_len // self.layout.cp

    @property
    def compute_bytes(self) -> int:
        """Bytes per number in compute."""
        return COMPUTE_BYTES.get(self.dtype or "", 2)

    @property
    def wide_bytes(self) -> int:
        """Bytes per number in gradients, losses and norms."""
        return max(4, self.compute_bytes)

    @property
    def stages(self) -> range:
        """Pipeline stages on this rank."""
        return range(self.pipeline_rank, self.layout.pp * self.layout.vp, self.layout.pp)

    @property
    def layers(self) -> int:
        """Number of layers on this rank."""
        sizes = layers_per_stage(self.shape, self.layout)
        return sum(sizes[stage] for stage in self.stages)

    @property
    def has_first(self) -> bool:
        """True if this rank computes the embedding."""
        return self.pipeline_rank == 0

    @property
    def has_last(self) -> bool:
        """True if this rank computes the output head and the loss."""
        return self.pipeline_rank == self.layout.pp - 1
