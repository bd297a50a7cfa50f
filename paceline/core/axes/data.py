"""Data parallelism: replicas of the model, and ZeRO shards of their states.

ZeRO: Rajbhandari et al., arXiv:1910.02054. States are sharded over dp x cp, because
context-parallel ranks hold the same weights as data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.core.axes.axis import Axis, AxisTraffic, Rule, refuse
from paceline.core.axes.weights import block_weights, decoder, end_weights
from paceline.core.parallel_run import ParallelRun
from paceline.core.units import pluralize

LOAD_BYTES = 8
"""Bytes of the number of rows of one expert, which all ranks add up once per step."""
RULES: tuple[Rule, ...] = (
    refuse(
        "dp-shard",
        "zero0",
        why="dp_shard needs zero_stage 2 or 3, because ZeRO-0 shards nothing: set "
        "layout.zero_stage, or leave layout.dp_shard out",
    ),
    refuse(
        "dp-shard",
        "zero1",
        why="dp_shard needs zero_stage 2 or 3, because ZeRO-1 spreads its optimizer over all of "
        "dp x cp: set layout.zero_stage, or leave layout.dp_shard out",
    ),
    *(
        refuse(
            "sync-every",
            f"zero{stage}",
            why=f"gradient_sync every needs zero_stage 2 or 3, because ZeRO-{stage} keeps whole "
            "gradients and adds up micro-batches in them: use layout.gradient_sync=last, or set "
            "layout.zero_stage",
        )
        for stage in (0, 1)
    ),
)


def whole_batches(x: ParallelRun) -> str | None:
    """`global_batch` is a multiple of dp x `micro_batch`."""
    dp, micro_batch = x.dp, x.layout.micro_batch
    if x.global_batch is None or x.global_batch % (dp * micro_batch) == 0:
        return None
    return (
        f"global_batch {x.global_batch} is not a multiple of dp {dp} x micro_batch {micro_batch} = "
        f"{dp * micro_batch}, but all replicas run the same number of whole micro-batches"
    )


def whole_shards(x: ParallelRun) -> str | None:
    """`dp_shard` divides dp x cp."""
    if not x.layout.dp_shard or x.data_ranks % x.layout.dp_shard == 0:
        return None
    return (
        f"dp x cp = {pluralize(x.data_ranks, 'rank')} cannot be split into groups of dp_shard "
        f"{x.layout.dp_shard}, "
        "because each group holds one copy of the states: use a dp_shard that divides them"
    )


def traffic(x: ParallelRun) -> Iterator[AxisTraffic]:
    """Yield the traffic of gradients and weights over the dp x cp ranks with the same weights."""
    layout, w, ranks = x.layout, x.wide_bytes, x.data_ranks
    if ranks == 1:
        return
    shards, m = x.shards, x.num_microbatches
    axis = "dp" if shards == ranks or layout.zero_stage < 2 else "dp_shard"
    num_experts = decoder(x).num_experts if decoder(x).num_experts > 1 else 0
    loads = x.layers * num_experts * LOAD_BYTES
    yield AxisTraffic(axis, "all_reduce", loads, "expert loads")
    block, ends = block_weights(x), end_weights(x)
    if layout.zero_stage < 2:
        weights = w * (x.layers * sum(p.size for p in block) + sum(p.size for p in ends))
        yield AxisTraffic("dp", "all_reduce", weights, "gradients")
        if layout.zero_stage == 1:
            collective = "broadcast" if x.device == "cpu" else "all_gather"
            yield AxisTraffic("dp", collective, weights, "weights")
        return
    blocks, root = (sum(p.padded(shards) for p in weights) for weights in (block, ends))
    blocks *= x.layers
    # Embedding and head stay gathered from the forward to the backward pass. Stage 2 gathers once
    # per step.
    gathered_elements = m * (2 * blocks + root) if layout.zero_stage == 3 else blocks + root
    yield AxisTraffic(axis, "all_gather", gathered_elements * x.compute_bytes, "weights")
    times = 1 if layout.gradient_sync == "last" else m
    yield AxisTraffic(axis, "reduce_scatter", times * (blocks + root) * w, "gradients")
    if shards < ranks:
        shard_bytes = (blocks + root) // shards * w
        yield AxisTraffic("dp_replicate", "all_reduce", times * shard_bytes, "gradients")
        yield AxisTraffic("dp_replicate", "all_reduce", loads, "expert loads")
    yield AxisTraffic(axis, "all_reduce", w, "norm")


DATA = Axis(
    name="dp",
    long_name="data parallelism",
    size_name="data-parallel replicas",
    shards="the samples of a batch, and with ZeRO the training states",
    sweep_help="Data-parallel sizes follow from the devices and the other axes.",
    mesh_position=1,
    rules=RULES,
    size_rules=(whole_batches, whole_shards),
    traffic=traffic,
)
