"""One training spread over devices, as a rank of one pipeline stage sees it.

Rules of sizes, memory and traffic of the parallel axes (core/axes) are functions of this value;
`RunSpec.parallel` makes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.layout import Layout
from paceline.core.pipeline import layers_per_stage
from paceline.core.shape import LoraSpec, Shape

COMPUTE_BYTES: dict[str, int] = {"fp32": 4, "fp64": 8}
"""Bytes of a number in compute; 2 for every other type."""


@dataclass(frozen=True)
class ParallelRun:
    """A model, its layout and what a step trains on; None leaves open what depends on it."""

    layout: Layout
    shape: Shape
    world_size: int
    """Devices; a multiple of `layout.model_devices`, or `layout_problems` says so."""
    global_batch: int | None = None
    """None stands for one micro-batch for every pipeline stage."""
    seq_len: int | None = None
    dtype: str | None = None
    device: str | None = None
    """cpu or cuda."""
    lora: LoraSpec | None = None
    fp8_recipe: str = "tensorwise"
    compiled: bool = False
    document_mask: bool = False
    pipeline_rank: int = 0

    @property
    def dp(self) -> int:
        """Data-parallel replicas."""
        return self.layout.dp(self.world_size)

    @property
    def data_ranks(self) -> int:
        """Ranks that hold the same weights, dp x cp: what ZeRO shards over."""
        return self.dp * self.layout.cp

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO spreads one copy of what it shards."""
        return self.layout.shards(self.dp)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches that one replica runs in a step."""
        if self.global_batch is None:
            return self.layout.pp
        return self.layout.num_microbatches(self.world_size, self.global_batch)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank, before sequence parallelism divides them."""
        assert self.seq_len is not None, "what counts tokens is asked with their number"
        return self.layout.micro_batch * self.seq_len // self.layout.cp

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in compute."""
        return COMPUTE_BYTES.get(self.dtype or "", 2)

    @property
    def wide_bytes(self) -> int:
        """Bytes of a number in gradients, losses and norms."""
        return max(4, self.compute_bytes)

    @property
    def stages(self) -> range:
        """The pipeline stages on this rank."""
        return range(self.pipeline_rank, self.layout.pp * self.layout.vp, self.layout.pp)

    @property
    def layers(self) -> int:
        """Layers on this rank."""
        sizes = layers_per_stage(self.shape, self.layout)
        return sum(sizes[stage] for stage in self.stages)

    @property
    def has_first(self) -> bool:
        """Whether this rank embeds tokens."""
        return self.pipeline_rank == 0

    @property
    def has_last(self) -> bool:
        """Whether this rank computes the head and the loss."""
        return self.pipeline_rank == self.layout.pp - 1
