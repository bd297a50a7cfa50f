"""Time of one optimizer step, by part: pipeline, head, data parallelism, optimizer, jitter.

Symbols: m micro-batches of a replica, p ranks of a pipeline with v chunks each, T seconds of one
micro-batch on the slowest rank, forward and backward, t tokens of a micro-batch on a rank, h hidden
size. Functions take x, the cases, and c, the coefficients by name (coefficients.py); all results
are seconds, one value a case.

ZeRO-2 and 3 gather weights before use and scatter gradients to their owners. With P parameters on n
ranks a gathering moves b P (n - 1) / n bytes through each rank, b bytes a number, and so does a
scattering (Rajbhandari et al., arXiv:1910.02054). ZeRO-3 gathers in the forward and again in the
backward pass of every micro-batch. FSDP: Zhao et al., arXiv:2304.11277.
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
    by_word,
    launches_s,
    product_rate,
    product_s,
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
    shards,
    stage_layers,
    table_weights,
    visited,
)


@dataclass(frozen=True)
class Exchanged:
    """Seconds of gathering some weights of a rank once, and of scattering their gradients once."""

    gather: Floats
    scatter: Floats
    among: Floats
    """Of adding up the scattered gradients among copies of what is sharded (HSDP)."""

    def total(self, x: Cases, gather: Floats, scatter: Floats | float = 1.0) -> Floats:
        """Of so many gatherings and scatterings.

        On GPUs copies add up over the network while other blocks use the links inside a node.
        """
        shards = gather * self.gather + scatter * self.scatter
        among = scatter * self.among
        return np.where(x.has("generation", "cpu"), shards + among, np.maximum(shards, among))

    def of_microbatch(self, x: Cases, gathers: float) -> Floats:
        """Of one micro-batch, which gathers so often under ZeRO-3; stage 2 keeps what it has."""
        gather = np.where(x.zero_stage == 3, gathers, 0.0)
        return self.total(x, gather, np.where(_scatters_once(x), 0.0, 1.0))


def block_exchange(x: Cases, c: Mapping[str, float]) -> Exchanged:
    """Of a block's weights."""
    common = (common_weights(x) + x.more_weights) / x.tp
    return _exchanged(x, c, common, ffn_weights(x) / expert_shards(x) / expert_ranks(x))


def root_exchange(x: Cases, c: Mapping[str, float]) -> Exchanged:
    """Of embedding and head, which FSDP treats as one more block."""
    tables = _exchanged(x, c, table_weights(x), np.zeros(x.size))
    return Exchanged(*(np.where(x.vocab > 0, part, 0.0) for part in vars(tables).values()))


def added(x: Cases, c: Mapping[str, float], work: Floats, exchange: Floats) -> Floats:
    """Seconds that an exchange adds to the work beside which it runs, 0 where nothing is sharded.

    max(work, exchange) + e min(work, exchange) - work, e the share of the shorter that shows.
    """
    early = x.has("implementation", "softmax")
    exposed = np.where(early, c["zero3_exposed_early"], c["zero3_exposed"])
    both = np.maximum(work, exchange) + exposed * np.minimum(work, exchange)
    return np.where(exchanges_in_blocks(x) & (copies(x)[0] > 1), both - work, 0.0)


def once(x: Cases, c: Mapping[str, float], slowest: Floats) -> Floats:
    """What a step exchanges once, beyond what its first forward or last backward pass hides.

    Stage 2's gathering of all weights, and the gradients of PyTorch's pipelines.
    """
    layers, block, root = stage_layers(x)[0], block_exchange(x, c), root_exchange(x, c)
    gather = np.where(x.zero_stage == 2, layers * block.gather + root.gather, 0.0)
    reduced = layers * block.total(x, np.zeros(x.size)) + root.total(x, np.zeros(x.size))
    scatter = np.where(_scatters_once(x), reduced, 0.0)
    work = slowest / np.where(x.pp > 1, x.vp, 1.0)
    parts = ((gather, work / 3), (scatter, 2 * work / 3))
    return np.sum([added(x, c, beside, part) for part, beside in parts], axis=0)


def _scatters_once(x: Cases) -> Bools:
    """Gradients are reduced behind the last micro-batch: in PyTorch's pipelines, or if asked."""
    return (x.has("implementation", "torch") & (x.pp > 1)) | (x.gradients_once > 0)


def _exchanged(x: Cases, c: Mapping[str, float], common: Floats, experts: Floats) -> Exchanged:
    """`common` are weights that all data ranks hold, `experts` those of expert ranks.

    Gathered in what blocks compute in. FSDP reduces gradients in fp32, others in 16 bit; copies of
    what is sharded (HSDP) sum up theirs. Frozen weights have none.
    """
    ranks, of_experts = shards(x)
    moved = common * (ranks - 1) / ranks + experts * (of_experts - 1) / of_experts
    rate = group_rate(x, c, x.tp * ranks, x.tp)
    # A GPU's host runs ahead: there they are part of a block's host time.
    host = np.where(x.has("generation", "cpu"), c["host_sharded_s"] * x.cpu_oversubscription, 0.0)
    start = np.where(ranks > 1, start_s(x, c, x.tp * ranks) + host + latency_s(x, ranks, x.tp), 0.0)
    reduced = np.where(x.has("implementation", "torch"), 4.0, 2.0)
    owned = reduced * (common / ranks + experts / of_experts)
    among = all_reduce_s(x, c, owned, copies(x)[0] / ranks, x.tp * ranks)
    return Exchanged(
        gather=x.compute_bytes * moved / rate + start,
        scatter=np.where(x.frozen > 0, 0.0, reduced * moved / rate + start),
        among=np.where(x.frozen > 0, 0.0, among),
    )


NODE = 8
"""Devices by which the growth with scale is counted."""
BACKWARD_SHARE = 0.66
"""Of a micro-batch's time: two passes of three."""
OPTIMIZER_BYTES = 26
"""A parameter: a 16-bit gradient read, fp32 master and two moments read and written. Frameworks
that move more show in the coefficient `optimizer`."""
VISITED_BYTES = 82
"""The same where each tensor is visited by itself, in 16 bit: gradients flattened, scaled and
copied back around their exchange (12), looked through for overflows in fp32 (10), cast (6),
flattened (8), their norm (4), unscaled (8), Adam (28), weights copied to 16 bit (6)."""
LOGIT_BYTES = 20
"""A logit: what its loss reads and writes forward and backward, in 16 bit and fp32."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on its slowest rank, by part."""

    gemm: Floats
    attention: Floats
    elementwise: Floats
    head: Floats
    tp: Floats
    cp: Floats
    ep: Floats
    zero: Floats
    """Gathering weights (ZeRO-3) and scattering gradients (2, 3), where work does not hide it."""
    host: Floats
    bubble: Floats
    """Waiting for the pipeline to fill and to drain."""
    stages: Floats
    """What passes between pipeline stages."""
    dp: Floats
    optimizer: Floats
    fixed: Floats
    jitter: Floats

    @property
    def total(self) -> Floats:
        """Seconds of the whole step."""
        return np.sum(list(vars(self).values()), axis=0)

    def pick(self, rows: NDArray[np.int64]) -> StepTime:
        """Of some of the cases, by their numbers."""
        return StepTime(**{name: part[rows] for name, part in vars(self).items()})

    def at(self, row: int) -> dict[str, float]:
        """The parts of one case."""
        return {name: float(part[row]) for name, part in vars(self).items()}


@dataclass(frozen=True)
class Pieces:
    """What a step is made of, in seconds of one micro-batch."""

    block: Block
    zero: Floats
    """Of a block under ZeRO-2 and 3."""
    root: Floats
    """The same of embedding and head, as part of `head`."""
    head: Floats
    passed: Floats
    """Between stages, by every rank."""
    beside: Floats
    """Of every rank, beside its blocks."""
    layers: Floats
    """Of the slowest rank."""
    own_head: Floats
    """Of the slowest rank: the head's where that is the last one."""
    own_root: Floats
    num_microbatches: Floats

    @property
    def layer(self) -> Floats:
        """One block, with what ZeRO-2 and 3 add."""
        return self.block.total + self.zero

    @property
    def slowest(self) -> Floats:
        """The slowest rank, without what passes between stages."""
        return self.layers * self.layer + self.own_head + self.beside


def pieces(x: Cases, c: Mapping[str, float]) -> Pieces:
    """Times of a block, the head and the exchange between stages, and which rank is slowest."""
    block, head, (most, last) = block_time(x, c), _head(x, c), stage_layers(x)
    zero = added(x, c, block.total, block_exchange(x, c).of_microbatch(x, gathers=2))
    # FSDP keeps embedding and head from the forward pass to the backward pass.
    root = added(x, c, head, root_exchange(x, c).of_microbatch(x, gathers=1))
    head, layer = head + root, block.total + zero
    with_head = last * layer + head >= most * layer
    beside = np.where(
        x.has("cuda_graphs", "iteration"),
        launches_s(x, c),
        c["host_microbatch_s"] * x.cpu_oversubscription,
    )
    own_head, own_root = (np.where(with_head, part, 0.0) for part in (head, root))
    return Pieces(
        block,
        zero,
        root,
        head,
        _stage_exchange(x, c),
        beside,
        layers=np.where(with_head, last, most),
        own_head=own_head,
        own_root=own_root,
        num_microbatches=num_microbatches(x),
    )


def step_time(x: Cases, c: Mapping[str, float]) -> StepTime:
    """Seconds of a step by part, in closed form: what coefficients are fitted by.

    m micro-batches go through the slowest stage, and one through all others while the pipeline
    fills and drains: m T + (p - 1)/v T for equal stages under GPipe, 1F1B and its interleaved form
    (Narayanan et al., arXiv:2104.04473), a third of it for zero-bubble, as in core/pipeline.py.
    model/pipeline.py follows every pass instead.
    """
    work = pieces(x, c)
    return step_of(x, c, work, closed_bubble(x, work))


def step_of(x: Cases, c: Mapping[str, float], work: Pieces, bubble: Floats) -> StepTime:
    """Seconds of a step by part, with what its slowest rank waits for others.

    m (T + passed) + bubble + dp + optimizer + fixed, and of all that jitter log2(nodes). Data
    parallelism exposes what the last backward pass cannot hide and at least a share of its
    exchange; ZeRO-2 and 3 exchange in every block.
    """
    m, layers = work.num_microbatches, work.layers
    dp, optimizer = _dp(x, c, work.slowest), _optimizer(x, c)
    fixed = by_word(x, "implementation", {name: c[f"step_{name}_s"] for name in IMPLEMENTATIONS})
    compiled = x.has("implementation", "torch") & (x.compiled > 0) & ~x.has("generation", "cpu")
    fixed = np.where(compiled, c["step_compiled_s"], fixed) * x.cpu_oversubscription
    fixed = np.where(x.has("cuda_graphs", "iteration"), c["step_graph_s"], fixed)
    fixed = fixed + c["host_tensor_s"] * visited(x)
    busy = m * (work.slowest + work.passed) + bubble + dp + optimizer + fixed
    nodes = np.maximum(1.0, x.devices / NODE)
    parts = {name: m * layers * part for name, part in vars(work.block).items() if name != "host"}
    return StepTime(
        **parts,
        head=m * (work.own_head - work.own_root),
        zero=m * (layers * work.zero + work.own_root),
        host=m * (layers * work.block.host + work.beside),
        bubble=bubble,
        stages=m * work.passed,
        dp=dp,
        optimizer=optimizer,
        fixed=fixed,
        jitter=busy * c["jitter"] * np.log2(nodes),
    )


def closed_bubble(x: Cases, work: Pieces) -> Floats:
    """Filling and draining: a micro-batch's way through the other stages, a chunk at a time.

    With T of the slowest rank and W of all others that is W/v, a third of it for zero-bubble. Fewer
    than p micro-batches do not keep v chunks busy: each goes round all ranks v times, and the last
    one m - 1 chunks later, which adds up to W - (m - 1)(1 - 1/v) T. Ranks that wait leave their
    cores to those that share them.
    """
    m, slowest = work.num_microbatches, work.slowest + work.passed
    others = x.layers * work.layer + work.head - work.layers * work.layer - work.own_head
    others = others + (x.pp - 1) * (work.passed + work.beside)
    share = np.where(x.has("schedule", "zero-bubble"), 1 / 3, 1.0) / x.vp
    round_trips = np.where(x.vp > 1, others - (m - 1) * (1 - 1 / x.vp) * slowest, 0.0)
    return np.where(x.pp > 1, np.maximum(share * others, round_trips) / x.cpu_oversubscription, 0.0)


def _head(x: Cases, c: Mapping[str, float]) -> Floats:
    """The output projection and the loss, forward and backward; a frozen one has no gradient.

    Three products of t x h by h x vocabulary / tp, and the logits' way through memory. A layer
    that predicts one token more passes through the same head and has a loss of its own, and three
    products of t x 2 h by 2 h x h / tp join what comes in with the next token's embedding
    (DeepSeek V3, arXiv:2412.19437, equations 21 to 24).
    """
    rate, t, rows = product_rate(x, c, narrow=False), tokens(x), x.vocab / x.tp
    moved = LOGIT_BYTES * c["logits"] * t * rows / (x.memory_bytes_per_s * c["memory"])
    products = np.where(x.frozen > 0, 2.0, 3.0)
    once = products * product_s(x, c, rate, t, rows, x.hidden) + moved
    joined = products * product_s(x, c, product_rate(x, c), t, x.hidden / x.tp, 2 * x.hidden)
    return np.where(x.vocab > 0, (1 + x.mtp_layers) * once + x.mtp_layers * joined, 0.0)


def _stage_exchange(x: Cases, c: Mapping[str, float]) -> Floats:
    """What a micro-batch passes to the next stage and back, for every chunk of a rank.

    2 t h bytes in 16 bit either way, through the outermost level that the whole training reaches:
    the slowest pair of stages sets the pace, and all ranks of a stage send at once.
    Tensor ranks share it out with sequence parallelism, and in Megatron core without it as well
    (Narayanan et al., arXiv:2104.04473, 4.1).
    """
    shared = np.where((x.sequence_parallel > 0) | x.has("implementation", "fused"), x.tp, 1.0)
    span = model_devices(x) * replicas(x)
    moved = 2 * tokens(x) * x.hidden / shared / port_rate(x, c, span)
    one_way = moved + start_s(x, c, span) + one_way_s(x, span)
    exposed = np.where(x.has("implementation", "softmax"), c["pp_exposed"], c["pp_exposed_fused"])
    return np.where(x.pp > 1, 2 * x.vp * one_way * exposed, 0.0)


def _dp(x: Cases, c: Mapping[str, float], slowest: Floats) -> Floats:
    """Gradients and weights (2 bytes a parameter) among the data-parallel ranks, once a step.

    (b + 2) P (n - 1) / n bytes through each of n ranks, with P the parameters that one rank has of
    its stage and gradients of b bytes: 4, as they are summed, or 2 in Megatron of 2020 to 2022 and
    in DeepSpeed without ZeRO. The last backward pass hides a part, but nothing does in these. Stage
    2 gathers weights alone: gradients are scattered in every block. Copies of experts lie as far
    apart as all expert ranks reach, so that few of a domain share what leaves it.
    """
    (ranks, expert_copies), weights = copies(x), rank_weights(x)
    early, behind = x.has("implementation", "softmax"), visited(x) > 0
    gradient = np.where((early & (x.summed_gradient_bytes == 0)) | behind, 2.0, 4.0)
    span = x.tp * ranks
    strides = (x.tp, expert_shards(x) * expert_ranks(x))
    needed = start_s(x, c, span) * np.log2(np.maximum(ranks, 2)) + latency_s(x, ranks, x.tp)
    for held, same, stride in zip(weights, (ranks, expert_copies), strides, strict=True):
        moved = (gradient + 2) * _trained(x) * held * (same - 1) / same
        needed = needed + moved / group_rate(x, c, span, stride)
    last_backward = BACKWARD_SHARE * slowest / np.where(x.pp > 1, x.vp, 1.0)
    share = {name: c[f"dp_exposed_{name}"] for name in ("softmax", "fused")}
    shown = by_word(x, "implementation", {**share, "torch": c["dp_exposed"]})
    exposed = np.maximum(needed - last_backward, shown * needed)
    unsharded = np.where(ranks > 1, np.where(behind, needed, exposed), 0.0)
    return np.where(exchanges_in_blocks(x), once(x, c, slowest), unsharded)


def _optimizer(x: Cases, c: Mapping[str, float]) -> Floats:
    """Reading and writing weights, gradients and moments of the parameters that a rank updates."""
    rest, ffns = rank_weights(x)
    sharded = x.zero_stage >= 1
    held = sum(
        part / np.where(sharded, same, 1.0)
        for part, same in zip((rest, ffns), shards(x), strict=True)
    )
    moved = np.where(visited(x) > 0, VISITED_BYTES, OPTIMIZER_BYTES) * _trained(x) * held
    return c["optimizer"] * moved / (x.memory_bytes_per_s * c["memory"])


def _trained(x: Cases) -> Floats:
    """Share of the weights that are trained."""
    return np.where(x.frozen > 0, x.trained_share, 1.0)
