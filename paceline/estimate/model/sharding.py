"""What ZeRO-2 and 3 exchange: weights gathered before use, gradients scattered to their owners.

With P parameters on n ranks a gathering moves b P (n - 1) / n bytes through each rank, b bytes a
number, and so does a scattering (Rajbhandari et al., arXiv:1910.02054). ZeRO-3 gathers in the
forward and again in the backward pass of every micro-batch. FSDP: Zhao et al., arXiv:2304.11277.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.estimate.model.case import Bools, Cases, Floats
from paceline.estimate.model.collectives import all_reduce_s, group_rate, latency_s, start_s
from paceline.estimate.model.stages import stage_layers
from paceline.estimate.model.weights import (
    common_weights,
    copies,
    exchanges_in_blocks,
    expert_ranks,
    expert_shards,
    ffn_weights,
    shards,
    table_weights,
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
    early = x.has("stack", "softmax")
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
    return (x.has("stack", "torch") & (x.pp > 1)) | (x.gradients_once > 0)


def _exchanged(x: Cases, c: Mapping[str, float], common: Floats, experts: Floats) -> Exchanged:
    """`common` are weights that all data ranks hold, `experts` those of expert ranks.

    Gathered in what blocks compute in. FSDP reduces gradients in fp32, others in 16 bit; copies of
    what is sharded (HSDP) sum up theirs. Frozen weights have none.
    """
    ranks, of_experts = shards(x)
    moved = common * (ranks - 1) / ranks + experts * (of_experts - 1) / of_experts
    rate = group_rate(x, c, x.tp * ranks, x.tp)
    # A GPU's host runs ahead: there they are part of a block's host time.
    host = np.where(x.has("generation", "cpu"), c["host_sharded_s"] * x.crowding, 0.0)
    start = np.where(ranks > 1, start_s(x, c, x.tp * ranks) + host + latency_s(x, ranks, x.tp), 0.0)
    reduced = np.where(x.has("stack", "torch"), 4.0, 2.0)
    owned = reduced * (common / ranks + experts / of_experts)
    among = all_reduce_s(x, c, owned, copies(x)[0] / ranks, x.tp * ranks)
    return Exchanged(
        gather=x.compute_bytes * moved / rate + start,
        scatter=np.where(x.frozen > 0, 0.0, reduced * moved / rate + start),
        among=np.where(x.frozen > 0, 0.0, among),
    )
