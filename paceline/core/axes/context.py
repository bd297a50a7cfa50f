"""Context parallelism: a rank holds a part of every sequence; attention exchanges keys and values.

Exchange methods: all-gather (Grattafiori et al., arXiv:2407.21783), all-to-all (Jacobs et al.,
arXiv:2309.14509) and ring (Liu et al., arXiv:2310.01889).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from paceline.core.axes.axis import Axis, AxisTraffic, Rule, refuse
from paceline.core.axes.weights import decoder
from paceline.core.parallel_run import ParallelRun
from paceline.core.recompute import stage_levels
from paceline.core.units import pluralize

RULES: tuple[Rule, ...] = (
    refuse(
        "all-to-all",
        "no-cp",
        why="cp_exchange all-to-all needs cp > 1, because without context-parallel ranks nothing "
        "is exchanged: set layout.cp, or leave it at all-gather",
    ),
    refuse(
        "ring",
        "no-cp",
        why="cp_exchange ring needs cp > 1, because without context-parallel ranks there is no "
        "ring: set layout.cp, or leave it at all-gather",
    ),
    refuse(
        "document-mask",
        "cp",
        native=True,
        why="data.document_mask is not for cp > 1, because ranks with parts of a sequence "
        "attend to all of it: use layout.cp=1, or leave data.document_mask out",
    ),
    refuse(
        "ring",
        "cuda",
        "fp32",
        native=True,
        why="cp_exchange ring needs bf16 or fp16 on a GPU, because flash attention has no fp32 "
        "kernel there: set training.dtype, or use layout.cp_exchange=all-gather",
    ),
    refuse(
        "mmdit",
        "all-to-all",
        native=True,
        why="cp_exchange all-to-all is not for an mmdit, because without a mask all ranks do "
        "equal work on gathered keys and values: use layout.cp_exchange=all-gather",
    ),
    refuse(
        "mmdit",
        "ring",
        native=True,
        why="cp_exchange ring is not for an mmdit, because its sequences are too short to hide "
        "the passing on: use layout.cp_exchange=all-gather",
    ),
)


def whole_heads_in_all_to_all(x: ParallelRun) -> str | None:
    """With cp > 1 and `cp_exchange` all-to-all, tp x cp divides the query heads."""
    ranks = x.layout.tp * x.layout.cp
    if not _exchanges(x, "all-to-all") or x.shape.num_heads % ranks == 0:
        return None
    return (
        f"{pluralize(x.shape.num_heads, 'query head')} cannot be split over tp {x.layout.tp} x "
        f"cp {x.layout.cp} = {ranks}, because all-to-all gives each rank whole heads: use "
        "layout.cp_exchange=all-gather"
    )


def whole_sequence_chunks(x: ParallelRun) -> str | None:
    """With cp > 1, 2 x cp divides `seq_len` of a decoder."""
    chunks = 2 * x.layout.cp
    causal = x.shape.causal
    if x.layout.cp == 1 or not causal or x.seq_len is None or x.seq_len % chunks == 0:
        return None
    return (
        f"seq_len {x.seq_len} cannot be split into 2 x cp = {chunks} chunks, because a context "
        "rank takes an early and a late one, so that causal attention is equal work for all: use "
        f"a multiple of {chunks}"
    )


def whole_streams(x: ParallelRun) -> str | None:
    """With cp > 1, cp divides both the text tokens and the image tokens of an mmdit."""
    cp, shape = x.layout.cp, x.shape
    if shape.kind != "mmdit" or (shape.text_len % cp == 0 and shape.image_tokens % cp == 0):
        return None
    return (
        f"{shape.text_len} text and {shape.image_tokens} image tokens cannot be split over "
        f"cp {cp}, because a context rank takes an equal part of each: use a cp that divides both"
    )


def ring_heads(x: ParallelRun) -> str | None:
    """With cp > 1 and `cp_exchange` ring on a GPU, the head width is a multiple of 8 up to 256."""
    latent = x.shape.latent_attention if x.shape.kind == "decoder" else None
    width = x.shape.head_dim if latent is None else latent.qk_head_dim
    on_gpu = x.device == "cuda"
    if not _exchanges(x, "ring") or not on_gpu or (width % 8 == 0 and width <= 256):
        return None
    return (
        f"heads {width} wide cannot go around a ring on a GPU, because flash attention there takes "
        "multiples of 8 up to 256: use layout.cp_exchange=all-gather"
    )


def ring_without_dropout(x: ParallelRun) -> str | None:
    """With cp > 1 and `cp_exchange` ring, attention dropout is 0."""
    shape = x.shape
    if not _exchanges(x, "ring") or shape.kind != "decoder" or not shape.dropped_probabilities:
        return None
    return (
        f"attention in a ring cannot drop {shape.dropped_probabilities:g} of its probabilities, "
        "because its parts are joined by sums that dropping would change: use "
        "layout.cp_exchange=all-gather or model.attention_dropout=0"
    )


def ring_without_window(x: ParallelRun) -> str | None:
    """With cp > 1 and `cp_exchange` ring, no layer has a sliding window."""
    shape = x.shape
    if not _exchanges(x, "ring") or shape.kind != "decoder" or shape.sliding_window is None:
        return None
    return (
        f"attention in a ring cannot keep to a window of {shape.sliding_window} tokens, because "
        "its parts are whole chunks of the sequence: use layout.cp_exchange=all-gather or "
        "all-to-all"
    )


def ring_without_sinks(x: ParallelRun) -> str | None:
    """With cp > 1 and `cp_exchange` ring, attention has no sinks."""
    shape = x.shape
    if not _exchanges(x, "ring") or shape.kind != "decoder" or not shape.attention_sinks:
        return None
    return (
        "attention in a ring cannot have sinks, because each part of it would count them again: "
        "use layout.cp_exchange=all-gather or all-to-all"
    )


def _exchanges(x: ParallelRun, kind: str) -> bool:
    return x.layout.cp > 1 and x.layout.cp_exchange == kind


def traffic(x: ParallelRun) -> Iterator[AxisTraffic]:
    """Yield the traffic of attention: an all-gather of keys and values, an all-to-all or a ring."""
    layout, shape, n = x.layout, decoder(x), x.layout.cp
    if n == 1:
        return
    full = stage_levels(shape, layout, x.stages).count("full")
    recomputed = x.layers if layout.recompute == "selective" else full
    m, head = x.num_microbatches, x.tokens * shape.head_dim // layout.tp
    keys = 2 * head * shape.kv_heads
    if layout.cp_exchange == "all-gather":
        gathered_bytes = m * n * keys * x.compute_bytes
        num_gathers = x.layers + recomputed
        yield AxisTraffic("cp", "all_gather", gathered_bytes * num_gathers, "keys and values")
        yield AxisTraffic("cp", "reduce_scatter", gathered_bytes * x.layers, "keys and values")
    elif layout.cp_exchange == "all-to-all":
        kv_heads = shape.kv_heads // layout.tp
        copies = lcm(kv_heads, n) // kv_heads
        to_tokens, to_heads = head * shape.num_heads + keys * copies, head * shape.num_heads
        # Selective recomputation ends with the attention output, so only `full` repeats its
        # exchange.
        recomputed_elements = to_tokens * recomputed + to_heads * full
        exchanged_elements = 2 * (to_tokens + to_heads) * x.layers + recomputed_elements
        yield AxisTraffic("cp", "all_to_all", m * exchanged_elements * x.compute_bytes, "heads")
    else:
        passed_bytes = keys * x.compute_bytes * (n - 1) * (2 * x.layers + recomputed)
        returned_bytes = keys * max(4, x.compute_bytes) * n * x.layers
        yield AxisTraffic("cp", "send", m * (passed_bytes + returned_bytes), "keys and values")
        yield AxisTraffic("cp", "recv", m * (passed_bytes + returned_bytes), "keys and values")


CONTEXT = Axis(
    name="cp",
    long_name="context parallelism",
    size_name="context-parallel ranks",
    shards="the tokens of every sample",
    sweep_help="Context-parallel sizes.",
    mesh_position=2,
    rules=RULES,
    size_rules=(whole_heads_in_all_to_all, whole_sequence_chunks, whole_streams),
    native_size_rules=(ring_heads, ring_without_dropout, ring_without_window, ring_without_sinks),
    traffic=traffic,
)
