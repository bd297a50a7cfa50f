"""Parameters of a decoder as one tensor-parallel rank holds them, matrix by matrix."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.parallel_run import ParallelRun
from paceline.core.shape import FFN, DecoderShape, linear_sizes, vectors_of_norm

COLUMN_CUT, ROW_CUT = ("q", "k", "v", "up", "gate"), ("o", "down")
"""Linear layers whose output features, and whose input features, are split over tensor-parallel
ranks."""


@dataclass(frozen=True)
class Weight:
    """A parameter as one tensor-parallel rank holds it; `whole` if it is not split."""

    rows: int
    columns: int
    whole: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.rows * self.columns

    def padded(self, shards: int) -> int:
        """Return the number of elements of all shards together, with padding.

        FSDP splits rows and pads all shards to equal size.
        """
        return -(-self.rows // shards) * shards * self.columns


def decoder(x: ParallelRun) -> DecoderShape:
    """Return the shape of the run's decoder.

    Check with `unsupported_reason` first that the model is a decoder.
    """
    assert x.shape.kind == "decoder", "unsupported_reason() refuses other models"
    return x.shape


def block_weights(x: ParallelRun) -> list[Weight]:
    """Return the parameters of one block on a tensor rank that all data ranks hold.

    Experts are among them only if `ep` is 1.
    """
    return _dense_weights(x) + (stacked_experts(x) if x.layout.ep == 1 else [])


def stacked_experts(x: ParallelRun) -> list[Weight]:
    """Return the weights of a block's experts on one rank; a row is one expert."""
    shape, layout = decoder(x), x.layout
    if shape.num_experts == 1:
        return []
    expert = Weight(shape.num_experts // layout.ep, shape.hidden_size * shape.ffn_size // layout.tp)
    return [expert] * shape.num_ffn_matrices


def router_weights(x: ParallelRun) -> int:
    """Return the number of weights of a block's router; 0 without experts."""
    shape = decoder(x)
    return shape.num_experts * shape.hidden_size if shape.num_experts > 1 else 0


def _dense_weights(x: ParallelRun) -> list[Weight]:
    """Return the parameters of one block on a tensor rank without those of experts."""
    shape, tp = decoder(x), x.layout.tp
    norm = Weight(shape.hidden_size, 1, whole=True)
    num_norms = 4 if shape.norm_position == "both" else 2
    of_head = [Weight(shape.head_dim, 1, whole=True)] * (2 if shape.qk_norm else 0)
    weights = ([norm] * num_norms + of_head) * vectors_of_norm(shape)
    if shape.num_experts > 1:
        weights.append(Weight(shape.num_experts, shape.hidden_size, whole=True))
    for name, (inputs, outputs) in linear_sizes(shape).items():
        if shape.num_experts > 1 and name in FFN:
            continue
        if name in COLUMN_CUT:
            weights.append(Weight(outputs // tp, inputs))
        else:
            weights.append(Weight(outputs, inputs // tp))
        if shape.has_bias(name):
            row_shards = tp if name in COLUMN_CUT else 1
            weights.append(Weight(outputs // row_shards, 1, whole=name in ROW_CUT))
    return weights


def end_weights(x: ParallelRun) -> list[Weight]:
    """Return the parameters outside the blocks on a tensor rank: embedding, norms, head."""
    shape = decoder(x)
    h, width = shape.hidden_size, shape.embed_dim
    table = Weight(shape.padded_vocab(x.layout.tp) // x.layout.tp, width)
    norm = [Weight(h, 1, whole=True)] * (2 if shape.norm == "layernorm" else 1)
    places = shape.max_positions + shape.position_offset
    has_projections = width != h
    weights: list[Weight] = []
    if x.has_first or (x.has_last and shape.tied_embeddings):
        weights.append(table)
    if x.has_first:
        weights += norm if shape.embedding_norm else []
        weights += [Weight(places, h, whole=True)] if shape.positions == "learned" else []
        weights += [Weight(h, width, whole=True)] if has_projections else []
    if x.has_last:
        weights += norm if shape.final_norm else []
        weights += [Weight(width, h, whole=True)] if has_projections else []
        weights += [] if shape.tied_embeddings else [table]
    return weights
