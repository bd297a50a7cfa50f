"""Time of one optimizer step, by part: pipeline, head, data parallelism, optimizer, what grows with scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.estimate.block import (
    STACKS,
    Block,
    block_time,
    by_word,
    product_rate,
    product_s,
    tokens,
)
from paceline.estimate.case import Cases, Floats
from paceline.estimate.network import group_rate
from paceline.estimate.stages import stage_layers

NODE = 8
"""Devices by which the growth with scale is counted."""


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
    """Gathering weights and scattering gradients under ZeRO-3, where work does not hide it."""
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

    def at(self, row: int) -> dict[str, float]:
        """The parts of one case."""
        return {name: float(part[row]) for name, part in vars(self).items()}


def num_microbatches(x: Cases) -> Floats:
    """Micro-batches of one replica in a step."""
    return np.maximum(1.0, x.global_batch / (replicas(x) * x.micro_batch))


def replicas(x: Cases) -> Floats:
    """Data-parallel replicas."""
    return np.maximum(1.0, x.devices / (x.tp * x.pp * x.cp))


def block_weights(x: Cases) -> Floats:
    """Parameters of the matrices of one block, all experts included."""
    return common_weights(x) + ffn_weights(x)


def attention_weights(x: Cases) -> Floats:
    """Parameters of a block's attention."""
    heads, kv = x.heads * x.head_dim, x.kv_heads * x.head_dim
    return x.hidden * (heads + 2 * kv) + heads * x.hidden


def ffn_weights(x: Cases) -> Floats:
    """Parameters of a block's ffn, of all its experts together."""
    return (2 + x.gated) * x.hidden * x.ffn * x.experts


def common_weights(x: Cases) -> Floats:
    """Parameters of a block that all its ranks hold parts of: attention, router, shared ffn."""
    router = np.where(x.experts > 1, x.hidden * x.experts, 0.0)
    return attention_weights(x) + router + (2 + x.gated) * x.hidden * x.shared_ffn


def copies(x: Cases) -> tuple[Floats, Floats]:
    """Ranks among which attention's weights are the same before ZeRO, and those of an ffn.

    Expert parallelism spreads the experts over the data ranks, so fewer of these hold the same.
    """
    ranks = replicas(x) * x.cp
    return ranks, np.maximum(1.0, ranks / expert_ranks(x))


def expert_ranks(x: Cases) -> Floats:
    """Ranks that share a block's experts."""
    return np.where(x.experts > 1, x.ep, 1.0)


def rank_weights(x: Cases) -> tuple[Floats, Floats]:
    """Parameters on one rank of the first stage before ZeRO: of all but the ffns, and of these."""
    most, _ = stage_layers(x)
    layers = most / x.tp
    table = x.vocab * x.hidden / x.tp * np.where(x.pp > 1, 1.0, 1.0 + x.gated)
    rest = common_weights(x) + x.more_weights
    return layers * rest + table, layers * ffn_weights(x) / expert_ranks(x)


@dataclass(frozen=True)
class Pieces:
    """What a step is made of, in seconds of one micro-batch."""

    block: Block
    zero: Floats
    """Of a block under ZeRO-3."""
    head: Floats
    passed: Floats
    """Between stages, by every rank."""
    beside: float
    """Of every rank, beside its blocks."""
    layers: Floats
    """Of the slowest rank."""
    own_head: Floats
    """Of the slowest rank: the head's where that is the last one."""
    num_microbatches: Floats

    @property
    def layer(self) -> Floats:
        """One block, with what ZeRO-3 adds."""
        return self.block.total + self.zero

    @property
    def slowest(self) -> Floats:
        """The slowest rank, without what passes between stages."""
        return self.layers * self.layer + self.own_head + self.beside


def pieces(x: Cases, c: Mapping[str, float]) -> Pieces:
    """Times of a block, the head and the exchange between stages, and which rank is slowest."""
    block, head = block_time(x, c), _head(x, c)
    zero, (most, last) = _zero3(x, c, block.total), stage_layers(x)
    layer = block.total + zero
    with_head = last * layer + head >= most * layer
    return Pieces(
        block, zero, head, _stage_exchange(x, c), c["host_microbatch_s"],
        layers=np.where(with_head, last, most), own_head=np.where(with_head, head, 0.0),
        num_microbatches=num_microbatches(x),
    )  # fmt: skip


def step_time(x: Cases, c: Mapping[str, float], bubble: Floats | None = None) -> StepTime:
    """Seconds of a step by part; `bubble` instead of the closed form's.

    m micro-batches go through the slowest stage, and one through all others while the pipeline
    fills and drains: m T + (p - 1)/v T for equal stages under GPipe, 1F1B and its interleaved form
    (Narayanan et al., arXiv:2104.04473), a third of it for zero-bubble, as in core/pipeline.py.
    estimate/pipeline.py follows every pass instead. Data parallelism exposes what the last backward
    pass cannot hide and at least a share of its exchange; ZeRO-3 exchanges in every block.
    """
    one = pieces(x, c)
    m, layers = one.num_microbatches, one.layers
    waits = _bubble(x, one) if bubble is None else bubble
    dp, optimizer = _dp(x, c, one.slowest), _optimizer(x, c)
    fixed = by_word(x, "stack", {name: c[f"step_{name}_s"] for name in STACKS})
    busy = m * (one.slowest + one.passed) + waits + dp + optimizer + fixed
    nodes = np.maximum(1.0, x.devices / NODE)
    parts = {name: m * layers * part for name, part in vars(one.block).items() if name != "host"}
    return StepTime(
        **parts,
        head=m * one.own_head,
        zero=m * layers * one.zero,
        host=m * (layers * one.block.host + one.beside),
        bubble=waits,
        stages=m * one.passed,
        dp=dp,
        optimizer=optimizer,
        fixed=fixed,
        jitter=busy * c["jitter"] * np.log2(nodes),
    )


def _bubble(x: Cases, one: Pieces) -> Floats:
    """Filling and draining: a micro-batch's way through the other stages, a chunk at a time."""
    share = np.where(x.has("schedule", "zero-bubble"), 1 / 3, 1.0) / x.vp
    others = x.layers * one.layer + one.head - one.layers * one.layer - one.own_head
    whole = others + (x.pp - 1) * (one.passed + one.beside)
    return np.where(x.pp > 1, share * whole, 0.0)


def _zero3(x: Cases, c: Mapping[str, float], block: Floats) -> Floats:
    """What gathering a block's weights twice and scattering its gradients adds to the block.

    Frozen weights have no gradients to scatter.
    """
    ranks, expert_copies = copies(x)
    common = (common_weights(x) + x.more_weights) / x.tp * (ranks - 1) / ranks
    ffn = ffn_weights(x) / x.tp / expert_ranks(x) * (expert_copies - 1) / expert_copies
    times = np.where(x.frozen > 0, 2.0, 3.0)
    rate = group_rate(x, c, x.tp * ranks, x.tp)
    exchange = times * (2 * (common + ffn) / rate + c["inter_start_s"])
    both = np.maximum(block, exchange) + c["zero3_exposed"] * np.minimum(block, exchange)
    return np.where((x.zero_stage == 3) & (ranks > 1), both - block, 0.0)


def _head(x: Cases, c: Mapping[str, float]) -> Floats:
    """The output projection and the loss, forward and backward; a frozen one has no gradient."""
    rate, t, rows = product_rate(x, c, narrow=False), tokens(x), x.vocab / x.tp
    moved = 20 * c["logits"] * t * rows / (x.memory_bytes_per_s * c["memory"])
    products = np.where(x.frozen > 0, 2.0, 3.0)
    return np.where(x.vocab > 0, products * product_s(x, c, rate, t, rows, x.hidden) + moved, 0.0)


def _stage_exchange(x: Cases, c: Mapping[str, float]) -> Floats:
    """What a micro-batch passes to the next stage and back, for every chunk of a rank."""
    shared = np.where(x.sequence_parallel > 0, x.tp, 1.0)
    inside = x.tp * x.cp * replicas(x) * x.pp <= x.domain
    rate = np.where(inside, x.intra_bytes_per_s * c["intra"], x.inter_bytes_per_s * c["inter"])
    one_way = 2 * tokens(x) * x.hidden / shared / rate + c["inter_start_s"]
    exposed = np.where(x.has("stack", "softmax"), c["pp_exposed"], c["pp_exposed_fused"])
    return np.where(x.pp > 1, 2 * x.vp * one_way * exposed, 0.0)


def _dp(x: Cases, c: Mapping[str, float], slowest: Floats) -> Floats:
    """Gradients (4 bytes a parameter) and weights (2) among the data-parallel ranks."""
    ranks, expert_copies = copies(x)
    rest, ffns = rank_weights(x)
    moved = rest * (ranks - 1) / ranks + ffns * (expert_copies - 1) / expert_copies
    start = c["inter_start_s"] * np.log2(np.maximum(ranks, 2))
    needed = 6 * _trained(x) * moved / group_rate(x, c, x.tp * ranks, x.tp) + start
    last = 0.66 * slowest / np.where(x.pp > 1, x.vp, 1.0)
    exposed = np.maximum(needed - last, c["dp_exposed"] * needed)
    return np.where((x.zero_stage < 3) & (ranks > 1), exposed, 0.0)


def _optimizer(x: Cases, c: Mapping[str, float]) -> Floats:
    """Reading and writing weights, gradients and moments."""
    rest, ffns = rank_weights(x)
    sharded = x.zero_stage >= 1
    held = sum(
        part / np.where(sharded, same, 1.0)
        for part, same in zip((rest, ffns), copies(x), strict=True)
    )
    return c["optimizer"] * 26 * _trained(x) * held / (x.memory_bytes_per_s * c["memory"])


def _trained(x: Cases) -> Floats:
    """Share of the weights that are trained."""
    return np.where(x.frozen > 0, x.trained_share, 1.0)
