"""Recomputation by a memory budget: which part of which block is computed anew.

A block is at one of four levels, each of which keeps more than the one before it and, for every
byte of that, saves less work:

    full         its input alone; everything is computed anew
    ffn          attention with all around it; norm, products and activation of the ffn are anew
    activation   also the outputs of the ffn's first products; only the activation is anew
    none         everything

The budget is the share, 0 to 1, that may be kept of what lies between full recomputation and none.
It is filled level by level: first all blocks keep their attention, then the ffn's products, then
the rest, until the next block would exceed it. Attention comes first because nothing else costs as
many FLOPs a byte, so none is computed twice where all of it fits. The last blocks of a pipeline
stage go first, because their backward pass begins while all else is still kept (as Megatron's
`--recompute-method block` recomputes the first layers). The levels follow from shape and layout
alone: memory, FLOPs and estimates count what the trainer, which gets them with its settings, does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from paceline.core.layout import Layout
from paceline.core.pipeline import layers_per_stage
from paceline.core.shape import (
    FFN,
    DecoderShape,
    LoraSpec,
    LoraTarget,
    Shape,
    latent_weights,
    linear_sizes,
    matrices_per_token,
    router_and_shared_weights,
)

RecomputeLevel = Literal["full", "ffn", "activation", "none"]
RECOMPUTE_LEVELS: tuple[RecomputeLevel, ...] = ("full", "ffn", "activation", "none")
"""In the order in which a budget is spent."""
SHARE_TOLERANCE = 1e-9
"""By which a sum of shares may miss a budget that it meets."""


def saved_activations_per_token(
    shape: Shape, layout: Layout, level: RecomputeLevel = "none"
) -> float:
    """Numbers that one block saves for the backward pass on one rank, per token.

    none        4 h + (2 a d + 2 g d + n f) / tp
    activation  without n - m of the n f
    ffn         without n f, and the h of a norm ahead of it
    full        h

    h is the hidden size, a query heads and g key/value heads have width d, f is the ffn's size:
    inputs and outputs of both norms, q, k, v and attention's output, and n tensors of the ffn: 3
    with a gate, 2 without, 1 with ReLU, whose gradient needs only its output; m of them are outputs
    of products (an MMDiT's single blocks have one norm). Norms behind attention and ffn keep 2 h
    more, norms of queries and keys a d + g d; latent attention keeps its narrow vectors too, and
    the ffn's width is the mean over layers. Sequence parallelism divides the stream's tensors as
    well. For GPT this is h (4 + 12/tp): Korthikanti et al., arXiv:2205.05198, equation 2 in 16 bit,
    without dropout masks and with attention that recomputes its scores.
    """
    stream = shape.hidden_size / (layout.tp if layout.sequence_parallel else 1)
    if level == "full":
        return stream
    tensors, inner = shape.saved_stream_tensors, float(shape.saved_ffn_tensors)
    if level == "ffn":
        tensors, inner = tensors - (shape.kind == "mmdit" or shape.norm_position != "post"), 0.0
    elif level == "activation":
        inner = min(inner, 2.0 if shape.kind == "decoder" and shape.gated_ffn else 1.0)
    ffn = shape.ffn_size
    if shape.kind == "decoder":
        dense = shape.first_dense_layers / shape.num_layers
        ffn = ffn * shape.experts_per_token + shape.shared_ffn_size
        ffn = (1 - dense) * ffn + dense * (shape.dense_ffn_size or 0)
        if shape.latent_attention is not None:
            tensors += shape.latent_attention.saved_latents / shape.hidden_size
    return tensors * stream + (shape.saved_head_size + inner * ffn) / layout.tp


def block_levels(shape: Shape, layout: Layout) -> tuple[RecomputeLevel, ...]:
    """The level of every block, the first layer's first; of other recomputation full or none.

    Each pipeline stage fills the budget with its own layers; a layout that its stages do not split
    counts as one stage.
    """
    if layout.recompute != "budget":
        return ("full" if layout.recompute == "full" else "none",) * shape.num_layers
    try:
        sizes = layers_per_stage(shape, layout)
    except ValueError:
        sizes = [shape.num_layers]
    numbers = [saved_activations_per_token(shape, layout, level) for level in RECOMPUTE_LEVELS]
    shares = [(number - numbers[0]) / (numbers[-1] - numbers[0]) for number in numbers]
    budget = layout.recompute_budget or 0.0
    of_size = {size: _stage_levels(size, budget, shares) for size in set(sizes)}
    return tuple(level for size in sizes for level in of_size[size])


def stage_levels(shape: Shape, layout: Layout, stages: Iterable[int]) -> tuple[RecomputeLevel, ...]:
    """The levels of the blocks of some pipeline stages; raises what `layers_per_stage` raises."""
    sizes, levels = layers_per_stage(shape, layout), block_levels(shape, layout)
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    return tuple(level for stage in stages for level in levels[starts[stage] :][: sizes[stage]])


def _stage_levels(size: int, budget: float, shares: list[float]) -> list[RecomputeLevel]:
    """Of `size` blocks, of which the k-th level keeps `shares[k]` of what lies between."""
    allowed = budget * size * (1 + SHARE_TOLERANCE) + SHARE_TOLERANCE
    level = 0
    while level < len(RECOMPUTE_LEVELS) - 1 and size * shares[level + 1] <= allowed:
        level += 1
    if level == len(RECOMPUTE_LEVELS) - 1:
        return ["none"] * size
    step = shares[level + 1] - shares[level]
    num_higher = int((allowed - size * shares[level]) / step)
    low, high = RECOMPUTE_LEVELS[level], RECOMPUTE_LEVELS[level + 1]
    return [low if i < size - num_higher else high for i in range(size)]


def level_shares(levels: tuple[RecomputeLevel, ...]) -> dict[RecomputeLevel, float]:
    """Share of the blocks that are at each level, 0-1."""
    return {level: levels.count(level) / len(levels) for level in RECOMPUTE_LEVELS}


def recomputed_layers(level: RecomputeLevel) -> frozenset[LoraTarget]:
    """Layers in the part of a block that is computed anew."""
    parts: dict[RecomputeLevel, Iterable[LoraTarget]] = {
        "full": ("q", "k", "v", "o", *FFN),
        "ffn": FFN,
        "activation": ("down",),
        "none": (),
    }
    return frozenset(parts[level])


def recomputed_linear_flops(
    shape: DecoderShape, level: RecomputeLevel, lora: LoraSpec | None = None
) -> float:
    """FLOPs per token that one block's linear layers do again: 2 a weight that is used again.

    The part ends with the last tensor that its gradient needs: the input of its last product, an
    adapter's second one if it has one, unless a norm or dropout behind it needs the output.
    """
    sizes, rank = linear_sizes(shape), lora.rank if lora else 0
    adapted_layers = frozenset(lora.targets) if lora else frozenset[LoraTarget]()
    layers = recomputed_layers(level) & sizes.keys()
    weights = 0.0
    for name in layers:
        rows, columns = sizes[name]
        of_adapter = rank * (rows + columns) if name in adapted_layers else 0
        weights += matrices_per_token(shape, name) * (rows * columns + of_adapter)
    if level in ("full", "ffn"):
        weights += router_and_shared_weights(shape)
    if level == "full":
        weights += latent_weights(shape)
    behind = level == "full" and (shape.norm_position != "pre" or shape.dropout > 0)
    if layers and not behind:
        rows, columns = sizes["down"]
        weights -= (
            matrices_per_token(shape, "down")
            * columns
            * (rank if "down" in adapted_layers else rows)
        )
    return 2.0 * weights


def share_not_recomputed(shape: Shape, level: RecomputeLevel) -> float:
    """Share of a block's weights whose layers are not computed anew, 0-1."""
    weights = {
        name: rows * columns * matrices_per_token(shape, name)
        for name, (rows, columns) in linear_sizes(shape).items()
    }
    if level == "full" or not weights:
        return float(level != "full")
    return 1 - sum(weights[name] for name in recomputed_layers(level) & weights.keys()) / sum(
        weights.values()
    )
