"""Recomputation by a memory budget: the recomputed part of each block.

A block is at one of four levels. Each level keeps more than the previous one. Per additional byte,
it saves less work than the previous one:

    full         keeps only the input; everything is recomputed
    ffn          keeps attention and everything around it; norm, GEMMs and activation of the MLP
                 are recomputed
    activation   also keeps the outputs of the MLP's first GEMMs; only the activation is recomputed
    none         keeps everything

The budget is a share, 0 to 1, of the memory between full recomputation and none. It is spent level
by level until the next block would exceed it: first all blocks keep their attention, then the MLP's
GEMMs, then the rest. Attention comes first because it costs the most FLOPs per byte, so attention
is never recomputed if all of it fits. The last blocks of a pipeline stage come first, because their
backward pass starts while everything else is still kept. (For the same reason Megatron's
`--recompute-method block` recomputes the first layers.) The levels depend only on shape and layout.
Memory, FLOPs and estimates therefore match the trainer, which receives the levels with its
settings.
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
    has_experts,
    latent_weights,
    linear_sizes,
    matrices_per_token,
    router_and_shared_weights,
)

RecomputeLevel = Literal["full", "ffn", "activation", "none"]
RECOMPUTE_LEVELS: tuple[RecomputeLevel, ...] = ("full", "ffn", "activation", "none")
"""Levels in the order in which a budget is spent."""
SHARE_TOLERANCE = 1e-9
"""Tolerance for a sum of shares that equals the budget."""


def saved_activations_per_token(
    shape: Shape, layout: Layout, level: RecomputeLevel = "none"
) -> float:
    """Return the count of numbers that one block saves per token for the backward pass on one rank.

        none        4 h + (2 a d + 2 g d + n f) / tp
        activation  without n - m of the n f
        ffn         without n f, and without the h of a norm before the MLP
        full        h

    Symbols: hidden size h, a query heads and g key/value heads of width d, MLP size f. The block
    saves the inputs and outputs of both norms, q, k, v, the output of attention, and n tensors of
    the MLP. n is 3 with a gate, 2 without, and 1 with ReLU, whose gradient needs only its output. m
    of them are outputs of GEMMs. (The single blocks of an MMDiT have one norm.) Norms after
    attention and MLP add 2 h, norms of queries and keys add a d + g d. Latent attention also saves
    its compressed vectors. The MLP's width is averaged over layers. Sequence parallelism also
    divides the tensors of the stream. For GPT the result is h (4 + 12/tp): Korthikanti et al.,
    arXiv:2205.05198, equation 2 in 16 bit, without dropout masks and with attention that recomputes
    its scores.
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
    """Return the level of every block, in order.

    Without `recompute: budget`, all levels are full or none. Each pipeline stage fills the budget
    with its own layers. A layout whose stages do not divide the layers counts as one stage.
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
    """Return the levels of the blocks of some pipeline stages.

    Raises the errors of `layers_per_stage`.
    """
    sizes, levels = layers_per_stage(shape, layout), block_levels(shape, layout)
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    return tuple(level for stage in stages for level in levels[starts[stage] :][: sizes[stage]])


def _stage_levels(size: int, budget: float, shares: list[float]) -> list[RecomputeLevel]:
    """Return the levels of `size` blocks.

    `shares[k]` is the share of the memory between full recomputation and none that level k keeps.
    """
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
    """Return the share of blocks at each level, 0-1."""
    return {level: levels.count(level) / len(levels) for level in RECOMPUTE_LEVELS}


def recomputed_layers(level: RecomputeLevel) -> frozenset[LoraTarget]:
    """Return the layers in the recomputed part of a block."""
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
    """Return the FLOPs per token that one block's linear layers repeat: 2 per weight.

    Recomputation stops at the last tensor that the gradients need. This is the input of the last
    GEMM, or of an adapter's second one, unless a later norm or dropout needs the output. Of experts
    the outputs are needed, because the weights of their sum have gradients. A shared expert follows
    them.
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
    if level in ("full", "ffn") and has_experts(shape):
        shared = shape.shared_ffn_size * shape.hidden_size
        weights -= 0 if behind else shared
    elif layers and not behind:
        rows, columns = sizes["down"]
        weights -= (
            matrices_per_token(shape, "down")
            * columns
            * (rank if "down" in adapted_layers else rows)
        )
    return 2.0 * weights


def share_not_recomputed(shape: Shape, level: RecomputeLevel) -> float:
    """Return the share of a block's weights whose layers are not recomputed, 0-1."""
    weights = {
        name: rows * columns * matrices_per_token(shape, name)
        for name, (rows, columns) in linear_sizes(shape).items()
    }
    if level == "full" or not weights:
        return float(level != "full")
    return 1 - sum(weights[name] for name in recomputed_layers(level) & weights.keys()) / sum(
        weights.values()
    )
