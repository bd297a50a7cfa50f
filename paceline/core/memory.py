"""Static lower bound of memory per device, to find out whether a run can fit.

The bound counts what a run needs in any case: training states, compute copies, saved activations,
one chunk of logits and the driver's context. It excludes fragmentation, communication buffers and
kernel workspaces. It assumes attention that does not store its scores. (For short sequences on CPUs
the native trainer keeps the probabilities, unless `recompute` is selective or full.) A run above
the bound cannot fit, but a run below it may still run out of memory. On average the bound is a
third below the 23 memory measurements, taken with another framework, in the BigScience tr3-1B3
benchmark. Under LoRA it counts saved activations as in full training, slightly more than some
layers need.

States follow the native trainer: fp32 master weights (4 bytes per parameter), fp32 gradients (4)
and Adam's two moments (8), 16 bytes in total, plus 16-bit copies of the blocks in use. Frameworks
like Megatron compute with 16-bit weights (2 bytes). Their master weights are optimizer states,
which ZeRO-1 already shards. Their gradients count 2 bytes, as in the leanest of them. ZeRO stages
shard as in Rajbhandari et al., arXiv:1910.02054. Activations follow Korthikanti et al.,
arXiv:2205.05198.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

from paceline.core.hardware import Dtype
from paceline.core.layout import Layout
from paceline.core.parallel_run import ParallelRun
from paceline.core.pipeline import layers_in_flight, layers_per_stage
from paceline.core.recompute import (
    RecomputeLevel,
    saved_activations_per_token,
    share_not_recomputed,
    stage_levels,
)
from paceline.core.shape import (
    LoraSpec,
    Shape,
    adapted_weights,
    expert_weights,
    lora_parameters,
    parameter_parts,
)

MASTER_BYTES = 4
GRADIENT_BYTES = 4
ADAM_BYTES = 8
LOGITS_BYTES = 2**25
"""Maximum memory of a loss computed in chunks: 16 MiB of fp32 logits plus another 16 MiB."""
MAX_GATHERED_BLOCKS = 2
"""Blocks whose full weights ZeRO-3 holds at a time: the current one and the prefetched one."""
MAX_DEVICES = 2**16


@dataclass(frozen=True)
class Memory:
    """Bytes on the most loaded device, by part."""

    weights_bytes: float
    """Master weights in fp32, and frozen weights in the compute dtype."""
    gradients_bytes: float
    optimizer_bytes: float
    copies_bytes: float
    """Weights in 16 bit for compute, and weights gathered from other ranks."""
    activations_bytes: float
    logits_bytes: float
    context_bytes: float

    @property
    def states_bytes(self) -> float:
        """Weights, gradients and optimizer states.

        They take 16 bytes per parameter at ZeRO-0 without LoRA.
        """
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> float:
        """Sum of all parts."""
        return sum(astuple(self))


@dataclass(frozen=True)
class _Stage:
    """Load of one tensor-parallel rank of a pipeline rank, summed over its chunks."""

    frozen: float
    """Parameters without a gradient."""
    trainable: float
    experts: float
    """Parameters of experts among all parameters. ZeRO shards them over dp x cp / ep ranks."""
    embedding_and_head: float
    """Parameters outside the blocks: embedding, positions, head."""
    layers: int
    """Layers of all chunks on the rank."""
    layers_in_flight: int
    """Layers times the number of micro-batches whose activations are in memory at once."""
    levels: tuple[RecomputeLevel, ...]
    """Recomputation level of each block."""
    has_head: bool


def memory_per_device(
    x: ParallelRun, context_bytes: float = 0.0, *, optimizer_masters: bool = False
) -> Memory:
    """Return the memory in bytes of the most loaded rank.

    The first pipeline rank holds the embedding and the most micro-batches in flight. The last rank
    holds the head and the logits. If both have one layer less, the second rank may hold more; later
    ranks never do. ZeRO shards over dp x cp, or over `dp_shard` of these ranks with hybrid
    sharding. Selective recomputation saves only memory that the bound excludes anyway. With
    `optimizer_masters`, fp32 master weights are optimizer states. Types narrower than 16 bits count
    as 16 bits. Raises ValueError if the stages do not divide the layers (see `stage_sizes`).
    """
    masters = optimizer_masters and x.dtype != "fp32"
    ranks = {0, min(1, x.layout.pp - 1), x.layout.pp - 1}
    stages = (_stage(replace(x, pipeline_rank=rank)) for rank in ranks)
    memories = (_memory(x, stage, context_bytes, masters) for stage in stages)
    return max(memories, key=lambda memory: memory.total_bytes)


def min_devices_to_fit(
    shape: Shape,
    seq_len: int,
    dtype: Dtype,
    device_memory_bytes: float,
    lora: LoraSpec | None = None,
    context_bytes: float = 0.0,
) -> int | None:
    """Return the smallest power of two of devices on which the bound fits; None beyond 65,536.

    Each device holds one sequence with ZeRO-3 and full recomputation, the leanest data-parallel
    form. More devices only shard the states; the memory of one sequence stays the same.
    """
    layout = Layout(zero_stage=3, recompute="full", micro_batch=1)
    num_devices = 1
    while num_devices <= MAX_DEVICES:
        run = ParallelRun(layout, shape, num_devices, seq_len=seq_len, dtype=dtype, lora=lora)
        if memory_per_device(run, context_bytes).total_bytes <= device_memory_bytes:
            return num_devices
        num_devices *= 2
    return None


def _stage(x: ParallelRun) -> _Stage:
    parts, layout = parameter_parts(x.shape, x.layout.tp), x.layout
    block, more = _block_parameters_per_rank(x.shape, layout, parts)
    # The last stage has a copy of the embedding for a tied head, and for multi-token prediction.
    has_copy = layout.pp > 1 and (not parts["head"] or more > 0)
    copy = parts["embedding"] if has_copy else 0
    embedding = (parts["embedding"] + parts["projections"] / 2) / layout.tp + parts["positions"]
    head = (parts["head"] + copy + parts["projections"] / 2) / layout.tp + parts["norms"]
    embedding_and_head = embedding * x.has_first + (head + more) * x.has_last
    frozen, trainable = _frozen_and_trainable(x, x.layers * block + embedding_and_head)
    sizes, schedule = layers_per_stage(x.shape, layout), layout.effective_schedule
    return _Stage(
        frozen=frozen,
        trainable=trainable,
        experts=_expert_parameters(x),
        embedding_and_head=embedding_and_head,
        layers=x.layers,
        layers_in_flight=layers_in_flight(
            sizes, layout.pp, x.pipeline_rank, schedule, x.num_microbatches
        ),
        levels=stage_levels(x.shape, layout, x.stages),
        has_head=x.has_last,
    )


def _expert_parameters(x: ParallelRun) -> float:
    """Return the parameters of experts on one rank of a stage."""
    if x.shape.kind == "mmdit":
        return 0.0
    layers = x.layers * (1 - x.shape.first_dense_layers / x.shape.num_layers)
    layers += x.shape.mtp_layers * x.has_last
    return layers * expert_weights(x.shape) / x.layout.ep / x.layout.tp


def _block_parameters_per_rank(
    shape: Shape, layout: Layout, parts: dict[str, int]
) -> tuple[float, float]:
    """Return the parameters of an average block, and of all multi-token prediction layers."""
    blocks, spread = parts["blocks"] / shape.num_layers, 1 - 1 / layout.ep
    if shape.kind == "mmdit":
        return blocks / layout.tp, 0.0
    experts, dense = expert_weights(shape), shape.first_dense_layers / shape.num_layers
    block = blocks - (1 - dense) * experts * spread
    return block / layout.tp, (parts["mtp"] - shape.mtp_layers * experts * spread) / layout.tp


def _frozen_and_trainable(x: ParallelRun, parameters: float) -> tuple[float, float]:
    if x.lora is None:
        return 0.0, parameters
    share = x.layers / x.shape.num_layers / x.layout.tp
    adapters = lora_parameters(x.shape, x.lora) * share
    frozen = adapted_weights(x.shape, x.lora) * share if x.lora.train_rest else parameters
    return frozen, parameters - frozen + adapters


def _memory(x: ParallelRun, stage: _Stage, context_bytes: float, masters: bool) -> Memory:
    """Return the memory of one rank of a stage.

    `masters` is True if fp32 master weights are optimizer states.
    """
    zero = x.layout.zero_stage
    trains_experts = x.lora is None or x.lora.train_rest
    trained_experts = stage.experts if trains_experts else 0.0

    def trainable(from_stage: int) -> float:
        return _on_rank(x, stage.trainable, trained_experts, zero >= from_stage)

    frozen = _on_rank(x, stage.frozen, stage.experts - trained_experts, zero >= 2)
    logits = x.tokens * x.shape.padded_vocab(x.layout.tp) / x.layout.tp if stage.has_head else 0
    weights = x.compute_bytes if masters else MASTER_BYTES
    gradients = x.compute_bytes if masters else GRADIENT_BYTES
    optimizer = ADAM_BYTES + (MASTER_BYTES if masters else 0)
    # Gradients accumulate over micro-batches before ZeRO-2 or 3 shards them.
    whole_gradients = x.layout.gradient_sync == "last" and x.num_microbatches > 1
    return Memory(
        weights_bytes=weights * trainable(2) + x.compute_bytes * frozen,
        gradients_bytes=gradients * (stage.trainable if whole_gradients else trainable(2)),
        optimizer_bytes=optimizer * trainable(1),
        copies_bytes=_copies(x, stage, masters),
        activations_bytes=_activations(x, stage),
        logits_bytes=min(2 * 4 * logits, LOGITS_BYTES),
        context_bytes=context_bytes,
    )


def _on_rank(x: ParallelRun, parameters: float, experts: float, is_sharded: bool) -> float:
    """Return the parameters that a rank holds of a stage's; `experts` are those of experts."""
    if not is_sharded:
        return parameters
    return (parameters - experts) / x.shards + experts / max(1.0, x.shards / x.layout.ep)


def _copies(x: ParallelRun, stage: _Stage, masters: bool) -> float:
    """Return the bytes of weights held only for compute.

    With ZeRO-2 and 3 these are gathered weights, otherwise 16-bit copies of the master weights. The
    backward pass keeps the copies of weights that are not recomputed, and the copies of one whole
    block.
    """
    trainable_ends = stage.embedding_and_head if x.lora is None or x.lora.train_rest else 0.0
    zero = x.layout.zero_stage if x.shards > 1 else 0
    if zero == 3:
        block = (stage.frozen + stage.trainable - stage.embedding_and_head) / max(1, stage.layers)
        return x.compute_bytes * (
            min(MAX_GATHERED_BLOCKS, stage.layers) * block + stage.embedding_and_head
        )
    if zero == 2:
        return x.compute_bytes * (stage.frozen + stage.trainable)
    if x.compute_bytes == MASTER_BYTES or masters:
        return 0.0
    blocks = stage.trainable - trainable_ends
    shares = [share_not_recomputed(x.shape, level) for level in stage.levels] or [1.0]
    return x.compute_bytes * blocks * (sum(shares) + 1 - shares[-1]) / len(shares)


def _activations(x: ParallelRun, stage: _Stage) -> float:
    """Return the bytes kept for the backward pass.

    All blocks keep their saved activations. The last block is recomputed, so its full activations
    count as well.
    """
    if not stage.levels:
        return 0.0
    numbers = [saved_activations_per_token(x.shape, x.layout, level) for level in stage.levels]
    recomputed = saved_activations_per_token(x.shape, x.layout)
    if stage.levels[-1] != "full":
        recomputed -= numbers[-1]
    shares = stage.layers_in_flight * sum(numbers) / len(numbers) + recomputed
    return x.tokens * x.compute_bytes * shares
