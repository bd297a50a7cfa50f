"""Expert parallelism: data-parallel ranks that each hold a part of the experts.

Every block sends each token to the ranks of its experts and back (Lepikhin et al.,
arXiv:2006.16668, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.core.axes.axis import Axis, AxisTraffic, Rule, refuse
from paceline.core.axes.weights import decoder, stacked_experts
from paceline.core.parallel_run import ParallelRun
from paceline.core.recompute import stage_levels
from paceline.core.units import pluralize

COUNT_BYTES = 8
"""Bytes of the number of rows that a rank sends to one expert."""

RULES: tuple[Rule, ...] = (
    refuse(
        "ep",
        "hybrid",
        native=True,
        why="ep > 1 is not for hybrid sharding, because experts are sharded over all ranks that "
        "hold the same ones: use layout.ep=1, or leave layout.dp_shard out",
    ),
)


def whole_experts(x: ParallelRun) -> str | None:
    """ep divides the experts and dp x cp."""
    ep, shape, ranks = x.layout.ep, x.shape, x.data_ranks
    experts = shape.num_experts if shape.kind == "decoder" else 1
    if experts % ep == 0 and ranks % ep == 0:
        return None
    if experts == 1:
        return f"ep {ep} spreads experts over ranks, and the model has none: use layout.ep=1"
    return (
        f"{experts} experts on dp x cp = {pluralize(ranks, 'rank')} cannot be split over ep {ep}, "
        "because expert ranks are data ranks that hold equally many experts: use an ep that "
        "divides both"
    )


def whole_expert_shards(x: ParallelRun) -> str | None:
    """With ep > 1 and ZeRO 2 or 3, dp x cp / ep divides `hidden_size` and `ffn_size` / tp."""
    layout, shape = x.layout, x.shape
    if layout.ep == 1 or layout.zero_stage < 2 or x.data_ranks % layout.ep:
        return None
    copies, widths = x.data_ranks // layout.ep, (shape.hidden_size, shape.ffn_size // layout.tp)
    odd = [width for width in widths if width % copies]
    if not odd:
        return None
    return (
        f"experts {odd[0]} wide cannot be sharded over dp x cp / ep = {pluralize(copies, 'rank')}, "
        "because FSDP shards them along their width: use another ep, or layout.zero_stage=1"
    )


def traffic(x: ParallelRun) -> Iterator[AxisTraffic]:
    """Yield the traffic of tokens, and that of the weights of experts.

    A rank sends the rows of its own tokens and receives those for its experts. Both are k per token
    on average over the ranks of the axis, whatever the router chooses. `expert_data` are the ranks
    that hold the same experts.
    """
    layout, shape, w = x.layout, decoder(x), x.wide_bytes
    if layout.ep == 1:
        return
    levels = stage_levels(shape, layout, x.stages)
    recomputed = levels.count("full") + levels.count("ffn")
    m, passes = x.num_microbatches, x.layers + recomputed
    rows = x.tokens * shape.experts_per_token * shape.hidden_size * x.compute_bytes
    counts = shape.num_experts * COUNT_BYTES * passes
    yield AxisTraffic("ep", "all_to_all", m * (2 * (passes + x.layers) * rows + counts), "tokens")
    copies, zero = x.data_ranks // layout.ep, layout.zero_stage
    weights = x.layers * sum(p.size for p in stacked_experts(x))
    if zero < 2:
        yield AxisTraffic("ep", "all_reduce", w, "norm")
    if copies == 1:
        return
    if zero < 2:
        yield AxisTraffic("expert_data", "all_reduce", w * weights, "gradients")
        if zero == 1:
            collective = "broadcast" if x.device == "cpu" else "all_gather"
            yield AxisTraffic("expert_data", collective, w * weights, "weights")
        return
    gathers = 2 * m if zero == 3 else 1
    yield AxisTraffic("expert_data", "all_gather", gathers * weights * x.compute_bytes, "weights")
    times = 1 if layout.gradient_sync == "last" else m
    yield AxisTraffic("expert_data", "reduce_scatter", times * weights * w, "gradients")


EXPERT = Axis(
    name="ep",
    long_name="expert parallelism",
    size_name="expert-parallel ranks",
    shards="the experts of every block",
    sweep_help="Expert-parallel sizes.",
    rules=RULES,
    size_rules=(whole_experts,),
    native_size_rules=(whole_expert_shards,),
    traffic=traffic,
)
