"""Weights, gradients, optimizer states and their copies on one rank of a pipeline stage.

All values are arrays over many cases; all results are bytes. With P parameters on a rank before
ZeRO, N ranks that hold the same parameters, and b bytes of each kind (framework.py), ZeRO leaves

    weights    b_w P, from stage 3 on b_w P / N    2 for 16-bit weights with fp32 masters
    gradients  b_g P, from stage 2 on b_g P / N    unless they accumulate to the last micro-batch
    optimizer  b_o P, from stage 1 on b_o P / N    12: an fp32 master and Adam's two moments

(Rajbhandari et al., arXiv:1910.02054). Experts are replicated on ep times fewer data ranks. Frozen
weights have neither gradients nor moments. Functions take x, the cases; f, their framework's
constants; s, the rank's stage (Stage); n, its parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from paceline.core.layout import Schedule
from paceline.core.memory import MAX_GATHERED_BLOCKS
from paceline.core.pipeline import layers_in_flight, stage_sizes
from paceline.estimate.memory.framework import Constants
from paceline.estimate.model.case import Bools, Cases, Floats
from paceline.estimate.model.weights import (
    block_weights,
    ffn_weights,
    num_microbatches,
    replicas,
    stage_layers,
)


@dataclass(frozen=True)
class Stage:
    """Layers and micro-batches of one pipeline rank, over all its tensor ranks."""

    layers: Floats
    """Number of layers over all its chunks."""
    layers_in_flight: Floats
    """Layers times the micro-batches whose activations are alive at once."""
    deferred_microbatches: Floats
    """Micro-batches whose weight gradients are deferred: zero-bubble defers as many as there are
    ranks before this one (Qi et al., arXiv:2401.10241)."""
    first: Bools
    """True if the rank is the first one, which has the embedding."""
    last: Bools
    """True if the rank is the last one, which has the head."""

    @property
    def alive(self) -> Floats:
        """Layers times micro-batches kept for either part of their backward pass."""
        return self.layers_in_flight + self.layers * self.deferred_microbatches

    def dense_share(self, x: Cases) -> Floats:
        """Return the share of this rank's blocks that have no experts; these are the first ones."""
        blocks = np.where(has_two_stages(x), 2.0, 1.0) * self.layers
        share = x.dense_share * x.layers / np.maximum(blocks, 1.0)
        return np.where(self.first, np.minimum(1.0, share), 0.0)


def stage(x: Cases, rank: int) -> Stage:
    """Return pipeline rank `rank` of every case, counted from the end if negative.

    Layers that stages cannot share equally go to the first stages. A case with fewer ranks gets its
    last rank. Cases with the same inputs are computed once.
    """
    pp, vp = np.maximum(x.pp, 1).astype(int), np.maximum(x.vp, 1).astype(int)
    ranks = np.where(rank < 0, pp - 1, np.minimum(rank, pp - 1))
    m = np.maximum(1, np.floor(num_microbatches(x))).astype(int)
    # 1f1b with chunks is the interleaved schedule.
    is_interleaved = x.is_category("schedule", "1f1b") & (vp > 1) & (pp > 1)
    schedule = np.where(is_interleaved, "interleaved", x.categories["schedule"])
    # After two full rounds of p micro-batches the count stays constant, except in gpipe, which
    # keeps all micro-batches.
    steady = (m % pp == 0) & (schedule != "gpipe")
    m = np.where(steady, np.minimum(m, 2 * pp), m)
    names = np.unique(schedule)
    schedules: list[Schedule] = [cast(Schedule, str(name)) for name in names]
    columns = [x.layers.astype(int), pp, vp, ranks, m, np.searchsorted(names, schedule)]
    unique, inverse = np.unique(np.column_stack(columns), axis=0, return_inverse=True)
    keys: list[list[int]] = unique.tolist()
    counts = [_layer_counts(key, schedules[key[-1]]) for key in keys]
    layers, in_flight = np.array(counts, dtype=float).reshape(-1, 2)[inverse.reshape(-1)].T
    is_dual, at_end = has_two_stages(x), (ranks == 0) | (ranks == pp - 1)
    split = x.is_category("schedule", "zero-bubble") & (pp > 1) & ~is_dual
    deferred_microbatches = np.where(split, np.minimum(ranks, m), 0).astype(float)
    # The mean of a rank's two stages; the last stage may have fewer layers.
    layers = np.where(is_dual & at_end, sum(stage_layers(x)) / 2, layers)
    in_flight = np.where(is_dual, layers * np.minimum(pp + 1, m), in_flight)
    first, last = (ranks == 0) | (is_dual & at_end), (ranks == pp - 1) | (is_dual & at_end)
    return Stage(layers, in_flight, deferred_microbatches, first, last)


def has_two_stages(x: Cases) -> Bools:
    """Return a mask of the cases whose ranks have two stages each, of opposite directions."""
    return (x.dual_pipe > 0) & (x.pp > 1)


def _layer_counts(key: list[int], schedule: Schedule) -> tuple[int, int]:
    """Return (layers, layers x micro-batches alive at once) of a rank.

    `key` starts with num_layers, pp, vp, rank and micro-batches.
    """
    num_layers, pp, vp, rank, microbatches = key[:5]
    try:
        sizes = stage_sizes(num_layers, pp, vp)
    except ValueError:
        each, remainder = divmod(num_layers, pp * vp)
        sizes = [each + (i < remainder) for i in range(pp * vp)]
    return sum(sizes[rank::pp]), layers_in_flight(sizes, pp, rank, schedule, microbatches)


ROUNDING = 1e-9
"""Tolerance for shares that should add up to 1."""
NORMS = 2
"""Number of norms of a block: before attention and before the ffn."""


@dataclass(frozen=True)
class States:
    """Bytes of one rank that persist between micro-batches, and of data derived from weights."""

    weights: Floats
    gradients: Floats
    optimizer: Floats
    gathered_weights: Floats
    """Sharded weights that are gathered while they are used."""
    copies: Floats
    """16-bit copies of fp32 weights that operations create and keep for the backward pass."""
    buffers: Floats
    """DDP's buckets in addition to the gradients, narrow copies of weights, and buffers that grow
    with the parameters."""
    of_step: Floats
    """Buffers that the end of a step allocates and the allocator keeps (`step_buffers`)."""
    trained_parameters: Floats
    """Number of trained parameters, before ZeRO."""


@dataclass(frozen=True)
class _Counts:
    """Parameters on one rank before ZeRO, and the number of ranks that shard them."""

    blocks: Floats
    """Parameters of blocks without experts."""
    experts: Floats
    """Parameters of experts."""
    ends: Floats
    """Parameters of embedding, last norm and head."""
    trained_parameters: Floats
    """Trained parameters of blocks and ends."""
    trained_experts: Floats
    ranks: Floats
    """Number of ranks over which ZeRO shards blocks and ends."""
    expert_ranks: Floats

    def local_bytes(self, where: Bools, common: Floats, experts: Floats) -> Floats:
        """Return the bytes of one rank, sharded over all ranks where `where` is true."""
        return np.where(where, common / self.ranks + experts / self.expert_ranks, common + experts)


def states(x: Cases, f: Constants, s: Stage) -> States:
    """Return the states of one rank: ZeRO-1 shards the optimizer, 2 gradients too, 3 weights too.

    FSDP's stage 2 shards weights as well and keeps them gathered (Zhao et al., arXiv:2304.11277).
    """
    n, c, zero = _counts(x, f, s), x.compute_bytes, x.zero_stage
    stages = np.where(has_two_stages(x), 2.0, 1.0)
    both_stages = _counts(x, f, replace(s, layers=stages * s.layers))
    frozen = np.where(x.frozen > 0, n.blocks + n.ends, 0.0)
    frozen_experts = np.where(x.frozen > 0, n.experts, 0.0)
    weight = np.where(f.master > 0, c, f.weight)
    gradient = f.gradient + x.summed_gradient_bytes
    moments = np.where(c < 4, f.master, 0.0) + 2 * x.moment_bytes
    return States(
        weights=both_stages.local_bytes(
            zero >= f.shards_weights_at,
            weight * both_stages.trained_parameters + c * frozen,
            weight * both_stages.trained_experts + c * frozen_experts,
        ),
        gradients=both_stages.local_bytes(
            (zero >= 2) & ~_whole_gradients(x),
            gradient * both_stages.trained_parameters,
            gradient * both_stages.trained_experts,
        ),
        optimizer=moments * n.local_bytes(zero >= 1, n.trained_parameters, n.trained_experts),
        gathered_weights=_gathered_bytes(x, f, s, n),
        copies=_copies(x, f, s, n),
        buffers=_buffers(x, f, n),
        of_step=_step_bytes(x, f, s, n),
        trained_parameters=n.trained_parameters + n.trained_experts,
    )


def _whole_gradients(x: Cases) -> Bools:
    return (x.gradients_once > 0) & (num_microbatches(x) > 1)


def _counts(x: Cases, f: Constants, s: Stage) -> _Counts:
    block, block_experts = _block(x)
    blocks, experts, ends = s.layers * block, s.layers * block_experts, _ends(x, f, s)
    ranks = np.where((x.dp_shard > 0) & (x.zero_stage >= 2), x.dp_shard, replicas(x) * x.cp)
    share = np.where(x.frozen > 0, x.trained_share, 1.0)
    return _Counts(
        blocks,
        experts,
        ends,
        trained_parameters=share * blocks + np.where(x.frozen > 0, 0.0, ends),
        trained_experts=share * experts,
        ranks=ranks,
        expert_ranks=np.maximum(1.0, ranks / x.ep),
    )


def _gathered_bytes(x: Cases, f: Constants, s: Stage, n: _Counts) -> Floats:
    """Return the bytes of gathered weights, in the compute dtype.

    Under stage 3 these are two blocks (the current and the next one) and the ends; under stage 2
    all.
    """
    sharded = shards_weights(x, f) & (n.ranks > 1)
    share = np.minimum(MAX_GATHERED_BLOCKS / np.maximum(s.layers, 1), 1)
    blocks = np.where(x.zero_stage >= 3, share, 1.0) * (n.blocks + n.experts)
    return np.where(sharded, x.compute_bytes * (blocks + n.ends), 0.0)


def shards_weights(x: Cases, f: Constants) -> Bools:
    """Return a mask of the cases where ZeRO shards weights, given more than one rank."""
    return x.zero_stage >= f.shards_weights_at


def has_persistent_copies(x: Cases, f: Constants) -> Bools:
    """Return a mask of the cases that keep 16-bit copies between steps (one replica, one stage)."""
    return (f.keeps_copies > 0) & (x.pp <= 1) & (replicas(x) * x.cp <= 1)


def _copies(x: Cases, f: Constants, s: Stage, n: _Counts) -> Floats:
    """Return the bytes of 16-bit copies of fp32 weights, persistent or made per micro-batch.

    Copies made per micro-batch live as long as it is in flight. With full activation checkpointing,
    one block's copies exist at a time, in addition to those of blocks that are not recomputed.
    """
    sharded = shards_weights(x, f) & (n.ranks > 1)
    casts = (f.master == 0) & (x.compute_bytes < f.weight) & ~sharded
    share = np.where(x.frozen > 0, x.trained_share, 1.0)
    copied_share, last = _copied_shares(x)
    blocks = (s.alive * copied_share + (1 - last)) / np.maximum(s.layers, 1)
    blocks = np.where(has_persistent_copies(x, f), 1.0, blocks)
    return np.where(casts, x.compute_bytes * blocks * share * (n.blocks + n.experts), 0.0)


def value_of_last_block(
    x: Cases, *, full: Floats, ffn: Floats, activation: Floats, none: Floats
) -> Floats:
    """Return the value for the last block, which recomputes the least, by its level."""
    recompute_share = x.full_recompute + x.ffn_recompute + x.activation_recompute
    # The last block belongs to the least recomputed group that exists: none if the shares leave
    # blocks over, then activation, then ffn, then full.
    parts = [recompute_share < 1 - ROUNDING, x.activation_recompute > 0, x.ffn_recompute > 0]
    return np.select(parts, [none, activation, ffn], full)


def _copied_shares(x: Cases) -> tuple[Floats, Floats]:
    """Return (mean, last block's) shares of block weights that are not used in recomputation."""
    ones = np.ones(x.size)
    of_ffn = ffn_weights(x) / block_weights(x)
    of_down = of_ffn / (2 + x.gated)
    mean = ones - x.full_recompute - x.ffn_recompute * of_ffn - x.activation_recompute * of_down
    return mean, value_of_last_block(
        x, full=0 * ones, ffn=1 - of_ffn, activation=1 - of_down, none=ones
    )


def _buffers(x: Cases, f: Constants, n: _Counts) -> Floats:
    """Return the bytes of DDP's buckets, narrow copies of weights, and buffers per parameter.

    4-bit copies take half of an 8-bit copy's bytes.
    """
    buckets = np.where(
        _two_gradients(x, f), f.gradient * (n.trained_parameters + n.trained_experts), 0.0
    )
    narrow = f.narrow_copies * np.where(x.four_bit > 0, 0.5, 1.0) * (n.blocks + n.experts)
    local = n.local_bytes(x.zero_stage >= f.shards_weights_at, n.blocks + n.ends, n.experts)
    updated_parameters = n.local_bytes(x.zero_stage >= 1, n.trained_parameters, n.trained_experts)
    parameter_buffers = f.per_parameter * local + f.per_shard * updated_parameters
    return f.fixed + buckets + np.where(x.peak_narrow > 0, narrow, 0.0) + parameter_buffers


def _step_bytes(x: Cases, f: Constants, s: Stage, n: _Counts) -> Floats:
    at_ends, matrix = s.first | s.last, x.hidden * x.ffn / x.tp
    table = vocabulary_rows(x, f) * _table_width(x) / x.tp
    largest = np.where(at_ends, np.maximum(table, matrix), matrix)
    share = n.local_bytes(x.zero_stage >= 1, n.trained_parameters, n.trained_experts)
    buffers = step_buffers(x, n.trained_parameters + n.trained_experts, share, largest)
    return np.where(f.makes_buckets > 0, buffers, 0.0)


def _two_gradients(x: Cases, f: Constants) -> Bools:
    """Return a mask of the cases with DDP over several micro-batches.

    Pipelines do without its buckets, FSDP without unsharded gradients.
    """
    ddp = (x.pp <= 1) & (x.zero_stage < 2) & (replicas(x) * x.cp > 1)
    return (f.copies_gradients > 0) & ddp & (num_microbatches(x) > 1)


def _block(x: Cases) -> tuple[Floats, Floats]:
    """Return a block's parameters on one rank: those on all data ranks, and those of experts.

    Models without a gate have biases, and norms with a bias in addition to their scale.
    """
    several = x.experts > 1
    matrices = block_weights(x)
    experts = np.where(several, ffn_weights(x), 0.0)
    heads, kv = x.heads * x.head_dim, x.kv_heads * x.head_dim
    biases = np.where(x.gated > 0, 0.0, (heads + 2 * kv + x.ffn) / x.tp + 2 * x.hidden)
    norms = NORMS * x.hidden * np.where(x.gated > 0, 1, 2)
    shared = (matrices - experts + x.more_weights) / x.tp
    return shared + biases + norms, experts / x.tp / x.ep


def _ends(x: Cases, f: Constants, s: Stage) -> Floats:
    """Return the parameters of embedding, positions, last norm and head.

    A tied embedding and head are one table on one rank, and two at the ends of a pipeline. So are
    the embeddings of the model and of its multi-token prediction, next to the head.
    """
    table = vocabulary_rows(x, f) * _table_width(x) / x.tp
    norm = x.hidden * np.where(x.gated > 0, 1, 2)
    shared_table = (x.tied > 0) & s.first
    has_copy = (x.mtp_layers > 0) & ~s.first & ~(x.tied > 0)
    return s.first * (table + x.positions * x.hidden) + s.last * (
        norm + np.where(shared_table, 0.0, table) + np.where(has_copy, table, 0.0)
    )


def _table_width(x: Cases) -> Floats:
    return np.where(x.table_width > 0, x.table_width, x.hidden)


def vocabulary_rows(x: Cases, f: Constants) -> Floats:
    """Return the rows of the embedding on all tensor ranks, including padding."""
    multiple = np.where(f.vocab_multiple > 1, f.vocab_multiple * x.tp, 1.0)
    return np.ceil(x.vocab / multiple) * multiple


BUCKET_ELEMENTS = 5e8
"""Default of DeepSpeed's reduce_bucket_size and allgather_bucket_size, in elements."""
FP32_BUCKET_ELEMENTS = 5e9
"""Number of elements that BF16_Optimizer gathers at once if its size is not set: usually all. That
the engine of early 2022 does not set it is inferred: with BUCKET five rows are missed by 8 to 11%,
with this value by -0.3 to +5%."""


def step_buffers(x: Cases, parameters: Floats, share: Floats, largest: Floats) -> Floats:
    """Return the bytes that DeepSpeed's ZeRO-1 allocates at the end of a step, beyond the passes.

    The allocator keeps them. With P `parameters` on a rank before ZeRO, of which it updates the
    `share` P / N, and t elements of the `largest` tensor:

        table     2 t                 gradient of one micro-batch, before it is accumulated
        bucket    2 min(P, 5e8)       gradients joined for the reduction
        check     4 t', 8 t'          for overflow in fp32, for the norm in fp64; t' at most P / N
        shard     2 P / N + 4 P / N   gradients of the updated shard, joined, and in fp32
        gathered  2 P / floor(P / 5e8)  output of all-gather before the copy to the weights
                                      (5e9 where gradients accumulate in fp32)

    A buffer reuses an earlier one if it is no larger. But memory handed to NCCL's stream is free
    only after the device has reached that point, and the host runs far ahead of it. The buckets of
    all parameters therefore exist at once, as do all gathered outputs: 4 P in total. Where the host
    waits for each kernel, one exists at a time. Gradients that accumulate in fp32 (BF16_Optimizer)
    are in one piece: one tensor's 16-bit gradient at a time is converted to fp32 and added, without
    bucket or shard.

    microsoft/DeepSpeed (2021, 2022): deepspeed/runtime/zero/stage_1_and_2.py (allreduce_bucket,
    step, get_grad_norm_direct, has_overflow), deepspeed/runtime/fp16/fused_optimizer.py (ZeRO-0),
    deepspeed/runtime/bf16_optimizer.py (update_hp_grads). PyTorch: ProcessGroupNCCL.cpp
    (recordStream).
    """
    table, piece = 2 * largest, np.minimum(largest, share)
    bucket = 2 * np.minimum(parameters, BUCKET_ELEMENTS)
    at_once = np.where(x.summed_gradient_bytes > 0, FP32_BUCKET_ELEMENTS, BUCKET_ELEMENTS)
    gather_output = 2 * parameters / np.maximum(1, np.floor(parameters / at_once))
    gather_output = np.where(x.zero_stage >= 1, gather_output, 0.0)
    # Without ZeRO every gradient is converted to fp32 separately before they are joined.
    shard = np.where(x.zero_stage >= 1, 2 + 4, 4 + 4) * share
    one_by_one = _new_bytes([table, bucket, 4 * piece, 8 * piece, gather_output])
    waiting = np.maximum(one_by_one, table + shard)
    ahead = np.where(x.zero_stage >= 1, 2 + 2, 2) * parameters + shard
    accumulating = _new_bytes([4 * largest, gather_output])
    separate = np.where(x.blocking_launches > 0, waiting, ahead)
    return np.where(x.summed_gradient_bytes > 0, accumulating, separate)


def beyond_logits(buffers: Floats, parameters: Floats, logits: Floats) -> Floats:
    """Return the bytes of a step's buffers that do not fit in the freed memory of the logits.

    `logits` is the number of one micro-batch's logits. Their gradients, in fp32 and in 16 bit, are
    freed blocks that hold whole buckets.
    """
    bucket = np.maximum(1.0, 2 * np.minimum(parameters, BUCKET_ELEMENTS))
    freed_bytes = bucket * (np.floor(4 * logits / bucket) + np.floor(2 * logits / bucket))
    return np.maximum(0.0, buffers - freed_bytes)


def _new_bytes(buffers: Sequence[Floats]) -> Floats:
    """Return the bytes of consecutive buffers: each one larger than all before is new."""
    largest = total = np.zeros_like(buffers[0])
    for buffer in buffers:
        total = total + np.where(buffer > largest, buffer, 0.0)
        largest = np.maximum(largest, buffer)
    return total
