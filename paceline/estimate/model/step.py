"""Time of one optimizer step by part: pipeline, head, data parallelism, optimizer, jitter.

Symbols: m micro-batches of a replica, p ranks of a pipeline with v chunks each, T seconds of one
micro-batch on the slowest rank, forward and backward, t tokens of a micro-batch on a rank, h hidden
size. Functions take x, the cases, and c, the coefficients by name (coefficients.py). All results
are seconds of shape (cases,).

ZeRO-2 and 3 all-gather weights before use and reduce-scatter gradients to their owners. With P
parameters of b bytes on n ranks, each of them moves b P (n - 1) / n bytes through every rank
(Rajbhandari et al., arXiv:1910.02054). ZeRO-3 gathers in the forward and again in the backward pass
of every micro-batch. FSDP: Zhao et al., arXiv:2304.11277.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.estimate.model.block import (
    IMPLEMENTATIONS,
    Block,
    block_time,
    gemm_rate,
    gemm_seconds,
    launches_s,
    select_by_category,
    tokens,
)
from paceline.estimate.model.case import Bools, Cases, Floats
from paceline.estimate.model.collectives import (
    all_reduce_s,
    group_rate,
    latency_s,
    one_way_s,
    port_rate,
    start_s,
)
from paceline.estimate.model.weights import (
    balanced_stage_layers,
    common_weights,
    copies,
    exchanges_in_blocks,
    expert_ranks,
    expert_shards,
    ffn_weights,
    model_devices,
    num_microbatches,
    rank_weights,
    replicas,
    sequentially_updated_tensors,
    shards,
    stage_layers,
    table_weights,
)


@dataclass(frozen=True)
class ShardedExchange:
    """Seconds of one all-gather of sharded weights and one reduce-scatter of their gradients."""

    gather: Floats
    scatter: Floats
    among: Floats
    """Seconds of reducing the scattered gradients across replicas of the shards (HSDP)."""

    def total(self, x: Cases, gather: Floats, scatter: Floats | float = 1.0) -> Floats:
        """Return the seconds of `gather` all-gathers and `scatter` reduce-scatters.

        On GPUs the HSDP reduction over the network overlaps with other blocks' intra-node traffic.
        """
        shards = gather * self.gather + scatter * self.scatter
        among = scatter * self.among
        return np.where(
            x.is_category("generation", "cpu"), shards + among, np.maximum(shards, among)
        )

    def of_microbatch(self, x: Cases, gathers: float) -> Floats:
        """Return the seconds per micro-batch, with `gathers` all-gathers under ZeRO-3."""
        gather = np.where(x.zero_stage == 3, gathers, 0.0)
        return self.total(x, gather, np.where(_scatters_once(x), 0.0, 1.0))


def block_exchange(x: Cases, c: Mapping[str, float]) -> ShardedExchange:
    """Return the sharded exchange of a block's weights."""
    common = (common_weights(x) + x.more_weights) / x.tp
    return _sharded_exchange(x, c, common, ffn_weights(x) / expert_shards(x) / expert_ranks(x))


def root_exchange(x: Cases, c: Mapping[str, float]) -> ShardedExchange:
    """Return the sharded exchange of embedding and head, which FSDP treats as one more block."""
    tables = _sharded_exchange(x, c, table_weights(x), np.zeros(x.size))
    return ShardedExchange(*(np.where(x.vocab > 0, part, 0.0) for part in vars(tables).values()))


def exposed_seconds(x: Cases, c: Mapping[str, float], work: Floats, exchange: Floats) -> Floats:
    """Return the seconds that an exchange adds to the work that it overlaps with; 0 if not sharded.

    max(work, exchange) + e min(work, exchange) - work, with e the exposed share of the shorter one.
    """
    early = x.is_category("implementation", "softmax")
    exposed = np.where(early, c["zero3_exposed_early"], c["zero3_exposed"])
    both = np.maximum(work, exchange) + exposed * np.minimum(work, exchange)
    return np.where(exchanges_in_blocks(x) & (copies(x)[0] > 1), both - work, 0.0)


def once_per_step_seconds(x: Cases, c: Mapping[str, float], slowest: Floats) -> Floats:
    """Return the exposed seconds of exchanges that happen once per step.

    These are the all-gather of ZeRO-2, which overlaps with the first forward pass, and the gradient
    reduction of PyTorch pipelines, which overlaps with the last backward pass.
    """
    layers, block, root = stage_layers(x)[0], block_exchange(x, c), root_exchange(x, c)
    gather = np.where(x.zero_stage == 2, layers * block.gather + root.gather, 0.0)
    reduction = layers * block.total(x, np.zeros(x.size)) + root.total(x, np.zeros(x.size))
    scatter = np.where(_scatters_once(x), reduction, 0.0)
    work = slowest / np.where(x.pp > 1, x.vp, 1.0)
    parts = ((gather, work / 3), (scatter, 2 * work / 3))
    return np.sum([exposed_seconds(x, c, overlap, part) for part, overlap in parts], axis=0)


def _scatters_once(x: Cases) -> Bools:
    """Return True if gradients are reduced only after the last micro-batch."""
    return (x.is_category("implementation", "torch") & (x.pp > 1)) | (x.gradients_once > 0)


def _sharded_exchange(
    x: Cases, c: Mapping[str, float], common: Floats, experts: Floats
) -> ShardedExchange:
    """Return the exchange of `common` weights (all data ranks) and `experts` (expert ranks).

    Weights are gathered in the compute dtype. FSDP reduces gradients in fp32, others in 16 bit.
    Frozen weights have no gradients.
    """
    ranks, expert_group = shards(x)
    num_elements = common * (ranks - 1) / ranks + experts * (expert_group - 1) / expert_group
    rate = group_rate(x, c, x.tp * ranks, x.tp)
    # On GPUs the CPU runs ahead, so this overhead is part of the block's launch time.
    host = np.where(
        x.is_category("generation", "cpu"), c["host_sharded_s"] * x.cpu_oversubscription, 0.0
    )
    start = np.where(ranks > 1, start_s(x, c, x.tp * ranks) + host + latency_s(x, ranks, x.tp), 0.0)
    gradient_bytes = np.where(x.is_category("implementation", "torch"), 4.0, 2.0)
    shard_bytes = gradient_bytes * (common / ranks + experts / expert_group)
    among = all_reduce_s(x, c, shard_bytes, copies(x)[0] / ranks, x.tp * ranks)
    return ShardedExchange(
        gather=x.compute_bytes * num_elements / rate + start,
        scatter=np.where(x.frozen > 0, 0.0, gradient_bytes * num_elements / rate + start),
        among=np.where(x.frozen > 0, 0.0, among),
    )


JITTER_NODE_DEVICES = 8
"""Devices per node for the jitter term, whatever the real node size."""
BACKWARD_SHARE = 0.66
"""Share of a micro-batch's time in the backward pass: two of three passes."""
OPTIMIZER_BYTES = 26
"""Optimizer traffic per parameter: 16-bit gradient read, fp32 master and two moments read and
written. The coefficient `optimizer` covers frameworks that move more."""
SEQUENTIAL_OPTIMIZER_BYTES = 82
"""The same for an optimizer that updates tensor by tensor in 16 bit: gradients flattened, scaled,
copied back around their exchange (12), checked for overflows in fp32 (10), cast (6),
flattened (8), their norm (4), unscaled (8), Adam (28), weights copied to 16 bit (6)."""
LOGIT_BYTES = 20
"""Loss traffic per logit, forward and backward, in 16 bit and fp32."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on its slowest rank by part; arrays of shape (cases,)."""

    gemm: Floats
    attention: Floats
    elementwise: Floats
    head: Floats
    tp: Floats
    cp: Floats
    ep: Floats
    zero: Floats
    """Exposed gathering of weights (ZeRO-3) and scattering of gradients (ZeRO-2 and 3)."""
    host: Floats
    bubble: Floats
    """Pipeline bubble: waiting for the pipeline to fill and drain."""
    stages: Floats
    """Exposed transfers between pipeline stages."""
    dp: Floats
    optimizer: Floats
    fixed: Floats
    jitter: Floats

    @property
    def total(self) -> Floats:
        """Seconds of the whole step."""
        return np.sum(list(vars(self).values()), axis=0)

    def pick(self, rows: NDArray[np.int64]) -> StepTime:
        """Return the given rows."""
        return StepTime(**{name: part[rows] for name, part in vars(self).items()})

    def at(self, row: int) -> dict[str, float]:
        """Return the parts of one case in seconds."""
        return {name: float(part[row]) for name, part in vars(self).items()}


@dataclass(frozen=True)
class StepComponents:
    """Components of a step in seconds per micro-batch."""

    block: Block
    zero: Floats
    """Exposed sharding traffic of a block under ZeRO-2 and 3."""
    root: Floats
    """The same for embedding and head; included in `head`."""
    head: Floats
    stage_transfer: Floats
    """Transfers between stages, on every rank."""
    overhead: Floats
    """Fixed time of every rank, outside of blocks."""
    layers: Floats
    """Layers of the slowest rank."""
    last_layers: Floats
    """Layers of the last rank, if the others share the rest; nan if chunks have equally many."""
    own_head: Floats
    """Head time of the slowest rank; 0 unless it is the last one."""
    own_root: Floats
    num_microbatches: Floats

    @property
    def layer(self) -> Floats:
        """One block, including the sharding traffic of ZeRO-2 and 3."""
        return self.block.total + self.zero

    @property
    def slowest(self) -> Floats:
        """The slowest rank, without transfers between stages."""
        return self.layers * self.layer + self.own_head + self.overhead


def step_components(x: Cases, c: Mapping[str, float]) -> StepComponents:
    """Return the times of block, head and stage transfers, and those of the slowest rank."""
    block, head = block_time(x, c), _head(x, c)
    zero = exposed_seconds(x, c, block.total, block_exchange(x, c).of_microbatch(x, gathers=2))
    # FSDP keeps embedding and head from the forward pass to the backward pass.
    root = exposed_seconds(x, c, head, root_exchange(x, c).of_microbatch(x, gathers=1))
    head, layer = head + root, block.total + zero
    most, last = stage_layers(x)
    is_placed = (x.mtp_layers > 0) & (x.pp > 1)
    if is_placed.any():
        balanced_most, balanced_last = balanced_stage_layers(x, head / layer)
        most = np.where(is_placed, balanced_most, most)
        last = np.where(is_placed, balanced_last, last)
    with_head = last * layer + head >= most * layer
    overhead = np.where(
        x.is_category("cuda_graphs", "iteration"),
        launches_s(x, c),
        c["host_microbatch_s"] * x.cpu_oversubscription,
    )
    own_head, own_root = (np.where(with_head, part, 0.0) for part in (head, root))
    return StepComponents(
        block,
        zero,
        root,
        head,
        _stage_exchange(x, c),
        overhead,
        layers=np.where(with_head, last, most),
        last_layers=np.where(is_placed, last, np.nan),
        own_head=own_head,
        own_root=own_root,
        num_microbatches=num_microbatches(x),
    )


def step_time(x: Cases, c: Mapping[str, float]) -> StepTime:
    """Return the seconds of a step by part in closed form, to which coefficients are fitted.

    m micro-batches pass the slowest stage, and one passes all others while the pipeline fills and
    drains: m T + (p - 1)/v T for equal stages under GPipe, 1F1B and interleaved 1F1B (Narayanan et
    al., arXiv:2104.04473), with a third of the bubble for zero-bubble schedules (core/pipeline.py).
    model/pipeline.py simulates every pass instead.
    """
    work = step_components(x, c)
    return assemble_step(x, c, work, closed_bubble(x, work))


def assemble_step(
    x: Cases, c: Mapping[str, float], work: StepComponents, bubble: Floats
) -> StepTime:
    """Return the seconds of a step by part for a given pipeline bubble.

    m (T + transfers) + bubble + dp + optimizer + fixed, times 1 + jitter log2(nodes). The gradient
    exchange overlaps with the last backward pass, except for a fixed exposed share. ZeRO-2 and 3
    exchange in every block.
    """
    m, layers = work.num_microbatches, work.layers
    dp, optimizer = _dp(x, c, work.slowest), _optimizer(x, c)
    fixed = select_by_category(
        x, "implementation", {name: c[f"step_{name}_s"] for name in IMPLEMENTATIONS}
    )
    compiled = (
        x.is_category("implementation", "torch")
        & (x.compiled > 0)
        & ~x.is_category("generation", "cpu")
    )
    fixed = np.where(compiled, c["step_compiled_s"], fixed) * x.cpu_oversubscription
    fixed = np.where(x.is_category("cuda_graphs", "iteration"), c["step_graph_s"], fixed)
    fixed = fixed + c["host_tensor_s"] * sequentially_updated_tensors(x)
    busy = m * (work.slowest + work.stage_transfer) + bubble + dp + optimizer + fixed
    nodes = np.maximum(1.0, x.devices / JITTER_NODE_DEVICES)
    parts = {name: m * layers * part for name, part in vars(work.block).items() if name != "host"}
    return StepTime(
        **parts,
        head=m * (work.own_head - work.own_root),
        zero=m * (layers * work.zero + work.own_root),
        host=m * (layers * work.block.host + work.overhead),
        bubble=bubble,
        stages=m * work.stage_transfer,
        dp=dp,
        optimizer=optimizer,
        fixed=fixed,
        jitter=busy * c["jitter"] * np.log2(nodes),
    )


def closed_bubble(x: Cases, work: StepComponents) -> Floats:
    """Return the bubble in seconds: one micro-batch's way through the other stages, per chunk.

    With T seconds on the slowest rank and W on all others it is W / v, and a third of it for
    zero-bubble schedules. Fewer than p micro-batches cannot keep v chunks busy: each passes all
    ranks v times and the last one starts m - 1 chunks later, which gives W - (m - 1)(1 - 1/v) T.
    Waiting ranks on shared CPU cores leave their share to others.
    """
    m, slowest = work.num_microbatches, work.slowest + work.stage_transfer
    others = x.layers * work.layer + work.head - work.layers * work.layer - work.own_head
    others = others + (x.pp - 1) * (work.stage_transfer + work.overhead)
    share = np.where(x.is_category("schedule", "zero-bubble"), 1 / 3, 1.0) / x.vp
    round_trips = np.where(x.vp > 1, others - (m - 1) * (1 - 1 / x.vp) * slowest, 0.0)
    return np.where(x.pp > 1, np.maximum(share * others, round_trips) / x.cpu_oversubscription, 0.0)


def _head(x: Cases, c: Mapping[str, float]) -> Floats:
    """Return the seconds of output projection and loss, forward and backward.

    Three GEMMs of (t, h) x (h, vocabulary / tp), two if frozen, and the memory traffic of the
    logits. Each multi-token-prediction layer uses the same head with its own loss, and three GEMMs
    of (t, 2 h) x (2 h, h / tp) join its input with the next token's embedding (DeepSeek V3,
    arXiv:2412.19437, equations 21 to 24).
    """
    rate, t, rows = gemm_rate(x, c, narrow=False), tokens(x), x.vocab / x.tp
    logits_s = LOGIT_BYTES * c["logits"] * t * rows / (x.memory_bytes_per_s * c["memory"])
    gemms = np.where(x.frozen > 0, 2.0, 3.0)
    per_head = gemms * gemm_seconds(x, c, rate, t, rows, x.hidden) + logits_s
    join_s = gemms * gemm_seconds(x, c, gemm_rate(x, c), t, x.hidden / x.tp, 2 * x.hidden)
    return np.where(x.vocab > 0, (1 + x.mtp_layers) * per_head + x.mtp_layers * join_s, 0.0)


def _stage_exchange(x: Cases, c: Mapping[str, float]) -> Floats:
    """Return the exposed seconds of pipeline transfers of a micro-batch, for all chunks of a rank.

    2 t h bytes in 16 bit either way, through the outermost level that the whole run reaches: the
    slowest pair of stages sets the pace, and all ranks of a stage send simultaneously. Tensor ranks
    split the bytes with sequence parallelism, and in Megatron core also without (Narayanan et al.,
    arXiv:2104.04473, 4.1).
    """
    shared = np.where(
        (x.sequence_parallel > 0) | x.is_category("implementation", "fused"), x.tp, 1.0
    )
    span = model_devices(x) * replicas(x)
    transfer_s = 2 * tokens(x) * x.hidden / shared / port_rate(x, c, span)
    total_s = transfer_s + start_s(x, c, span) + one_way_s(x, span)
    exposed = np.where(
        x.is_category("implementation", "softmax"), c["pp_exposed"], c["pp_exposed_fused"]
    )
    return np.where(x.pp > 1, 2 * x.vp * total_s * exposed, 0.0)


def _dp(x: Cases, c: Mapping[str, float], slowest: Floats) -> Floats:
    """Return the exposed seconds of the gradient and weight exchange between data-parallel ranks.

    (b + 2) P (n - 1) / n bytes pass through each of n ranks, with P the parameters that one rank
    has of its stage and gradients of b bytes. b is 4, as they are accumulated, or 2 in Megatron of
    2020 to 2022 and in DeepSpeed without ZeRO. The last backward pass overlaps with a part, except
    in these two. Stage 2 gathers only weights: gradients are scattered in every block. Copies of
    experts are as far apart as all expert ranks reach. Only a few ranks of a domain therefore share
    the traffic that leaves it.
    """
    (ranks, expert_copies), weights = copies(x), rank_weights(x)
    early, sequential = (
        x.is_category("implementation", "softmax"),
        sequentially_updated_tensors(x) > 0,
    )
    # Bytes per gradient element: 2 in Megatron of 2020 to 2022 (unless gradients accumulate in a
    # wider buffer) and in DeepSpeed without ZeRO, else 4. The 2 added below are the gathered 16-bit
    # weights.
    gradient = np.where((early & (x.summed_gradient_bytes == 0)) | sequential, 2.0, 4.0)
    span = x.tp * ranks
    strides = (x.tp, expert_shards(x) * expert_ranks(x))
    exchange_s = start_s(x, c, span) * np.log2(np.maximum(ranks, 2)) + latency_s(x, ranks, x.tp)
    for parameters, group_size, stride in zip(
        weights, (ranks, expert_copies), strides, strict=True
    ):
        num_bytes = (gradient + 2) * _trained_share(x) * parameters * (group_size - 1) / group_size
        exchange_s = exchange_s + num_bytes / group_rate(x, c, span, stride)
    last_backward = BACKWARD_SHARE * slowest / np.where(x.pp > 1, x.vp, 1.0)
    share = {name: c[f"dp_exposed_{name}"] for name in ("softmax", "fused")}
    exposed_share = select_by_category(x, "implementation", {**share, "torch": c["dp_exposed"]})
    # At least the part that is longer than the last backward pass is exposed. `behind` (DeepSpeed
    # without ZeRO) exchanges after that pass, so all of it is exposed.
    exposed = np.maximum(exchange_s - last_backward, exposed_share * exchange_s)
    unsharded_s = np.where(ranks > 1, np.where(sequential, exchange_s, exposed), 0.0)
    return np.where(exchanges_in_blocks(x), once_per_step_seconds(x, c, slowest), unsharded_s)


def _optimizer(x: Cases, c: Mapping[str, float]) -> Floats:
    """Return the seconds of the optimizer's memory traffic on one rank."""
    non_ffn, ffns = rank_weights(x)
    sharded = x.zero_stage >= 1
    parameters = sum(
        part / np.where(sharded, group_size, 1.0)
        for part, group_size in zip((non_ffn, ffns), shards(x), strict=True)
    )
    num_bytes = (
        np.where(sequentially_updated_tensors(x) > 0, SEQUENTIAL_OPTIMIZER_BYTES, OPTIMIZER_BYTES)
        * _trained_share(x)
        * parameters
    )
    return c["optimizer"] * num_bytes / (x.memory_bytes_per_s * c["memory"])


def _trained_share(x: Cases) -> Floats:
    """Return the share of the weights that are trained."""
    return np.where(x.frozen > 0, x.trained_share, 1.0)
