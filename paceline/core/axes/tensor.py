"""Tensor parallelism: the matrices of a block are split by heads and by columns of the MLP.

Source: Shoeybi et al., arXiv:1909.08053. Sequence parallelism: Korthikanti et al.,
arXiv:2205.05198, section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.core.axes.axis import Axis, AxisTraffic, Rule, refuse
from paceline.core.axes.weights import block_weights, decoder, end_weights, router_weights
from paceline.core.parallel_run import ParallelRun
from paceline.core.recompute import stage_levels
from paceline.core.shape import vectors_of_norm

LOSS_NUMBERS = 3
"""Numbers per token that tensor-parallel ranks gather: largest logit, sum, logit of the target."""

RULES: tuple[Rule, ...] = (
    refuse(
        "sp",
        "no-tp",
        why="sequence_parallel needs tp > 1, because it cuts the sequence over the tensor ranks: "
        "set layout.tp, or leave layout.sequence_parallel out",
    ),
    refuse(
        "mmdit",
        "sp",
        native=True,
        why="sequence_parallel is not for an mmdit, because its short streams leave little "
        "between the layers to save: use layout.tp without it",
    ),
)


def whole_heads(x: ParallelRun) -> str | None:
    """tp divides the query heads, and divides the key/value heads or is a multiple of them."""
    # Megatron-Core 0.16 (transformer_config.py, attention.py) accepts both for its query groups.
    tp, heads, kv_heads = x.layout.tp, x.shape.num_heads, x.shape.kv_heads
    if heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0):
        return None
    return (
        f"{heads} query and {kv_heads} key/value heads cannot be split over tp {tp}, because a "
        "tensor rank computes whole heads: use a tp that divides both"
    )


def whole_kv_heads(x: ParallelRun) -> str | None:
    """tp divides the key/value heads."""
    if x.shape.kv_heads % x.layout.tp == 0:
        return None
    return (
        f"{x.shape.kv_heads} key/value heads cannot be split over tp {x.layout.tp}, because tensor "
        "ranks do not copy them: use a tp that divides them"
    )


def whole_ffn(x: ParallelRun) -> str | None:
    """tp divides `ffn_size`, `dense_ffn_size` and `shared_ffn_size`."""
    shape, widths = x.shape, {"ffn_size": x.shape.ffn_size}
    if shape.kind == "decoder":
        widths["dense_ffn_size"] = shape.dense_ffn_size or 0
        widths["shared_ffn_size"] = shape.shared_ffn_size
    odd = [f"{name} {width}" for name, width in widths.items() if width % x.layout.tp]
    if not odd:
        return None
    return (
        f"{odd[0]} cannot be split over tp {x.layout.tp}, because tensor ranks "
        "hold equal parts of it: use a tp that divides it"
    )


def whole_sequence_parts(x: ParallelRun) -> str | None:
    """With `sequence_parallel`, tp x cp divides `seq_len`."""
    parts = x.layout.tp * x.layout.cp
    if not x.layout.sequence_parallel or x.seq_len is None or x.seq_len % parts == 0:
        return None
    return (
        f"seq_len {x.seq_len} cannot be split over tp {x.layout.tp} x cp {x.layout.cp} = {parts}, "
        f"because sequence_parallel gives ranks equal parts of it: use a multiple of {parts}"
    )


def whole_vocabulary(x: ParallelRun) -> str | None:
    """tp divides the padded vocabulary."""
    rows = x.shape.padded_vocab(x.layout.tp)
    if rows % x.layout.tp == 0:
        return None
    return (
        f"a vocabulary of {rows} rows cannot be split over tp {x.layout.tp}, because tensor ranks "
        "hold equal parts of the embedding: pad it with model.vocab_multiple=2 or more"
    )


def traffic(x: ParallelRun) -> Iterator[AxisTraffic]:
    """Yield the traffic of both parallel regions of a block: 4 b T h per block.

    Each region is entered and left once in the forward and once in the backward pass. The
    collectives are all-reduces, or all-gathers and reduce-scatters around a sequence-parallel part.
    A recomputed block enters its regions again. It also leaves them again if a later operation of
    the block needs the output.
    """
    layout, shape, e, w = x.layout, decoder(x), x.compute_bytes, x.wide_bytes
    if layout.tp == 1:
        return
    stream_bytes, embedding_bytes = x.tokens * shape.hidden_size * e, x.tokens * shape.embed_dim * e
    levels = stage_levels(shape, layout, x.stages)
    full, entered_again = levels.count("full"), levels.count("full") * 2 + levels.count("ffn")
    # Recomputation ends with the last tensor that is needed. Nothing is needed after the second
    # residual sum.
    second_residual_is_needed = shape.norm_position != "pre" or shape.dropout > 0
    left_again = (2 if second_residual_is_needed else 1) * full
    ends = x.has_first + x.has_last
    m = x.num_microbatches
    if layout.sequence_parallel:
        gathers = (4 * x.layers + entered_again) * stream_bytes + ends * embedding_bytes
        scatters = (4 * x.layers + left_again) * stream_bytes + ends * embedding_bytes
        yield AxisTraffic("tp", "all_gather", m * gathers, "activations")
        yield AxisTraffic("tp", "reduce_scatter", m * scatters, "activations")
        shares = [*block_weights(x)] * x.layers + end_weights(x)
        yield AxisTraffic("tp", "all_reduce", w * sum(p.size for p in shares if p.whole), "shares")
    else:
        sums = (4 * x.layers + left_again) * stream_bytes + ends * embedding_bytes
        yield AxisTraffic("tp", "all_reduce", m * sums, "activations")
        of_heads = 2 * shape.head_dim * vectors_of_norm(shape) if shape.qk_norm else 0
        shares = x.layers * (of_heads + router_weights(x))
        yield AxisTraffic("tp", "all_reduce", w * shares, "shares")
    if x.has_last:
        numbers = layout.tp * x.tokens * LOSS_NUMBERS * w
        yield AxisTraffic("tp", "all_gather", m * numbers, "loss")
    yield AxisTraffic("tp", "all_reduce", w, "norm")


TENSOR = Axis(
    name="tp",
    long_name="tensor parallelism",
    size_name="tensor-parallel ranks",
    shards="the matrices of every block, the embedding and the head",
    sweep_help="Tensor-parallel sizes: 1,2,4.",
    mesh_position=3,
    rules=RULES,
    size_rules=(whole_heads, whole_ffn, whole_sequence_parts),
    native_size_rules=(whole_kv_heads, whole_vocabulary),
    traffic=traffic,
)
