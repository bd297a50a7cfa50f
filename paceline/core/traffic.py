"""Bytes that a decoder's layout moves in one step, by axis and collective.

Symbols: b samples of a micro-batch, T tokens of a sample on a rank (s / cp), h hidden size, e bytes
of a number in compute, w of one in full precision (4), m micro-batches, L layers of a rank, n ranks
of an axis, P parameters of a rank. Bytes are those of the whole tensor, as a program hands it over;
through each rank's links pass the shares of `LINK_SHARE`. Exact for the native trainer; of other
frameworks the large terms are the same (parameters, 4 b T h L of a tensor axis).

Tensor and sequence parallelism: Shoeybi et al., arXiv:1909.08053; Korthikanti et al.,
arXiv:2205.05198, section 4.2. ZeRO: Rajbhandari et al., arXiv:1910.02054. Keys and values:
Grattafiori et al., arXiv:2407.21783; Jacobs et al., arXiv:2309.14509; Liu et al., arXiv:2310.01889.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import lcm
from typing import Literal

from paceline.core.hardware import Dtype
from paceline.core.layout import Layout
from paceline.core.pipeline import stages_of
from paceline.core.recompute import stage_levels
from paceline.core.shape import DecoderShape, LoraSpec, Shape, linear_sizes, vectors_of_norm

Collective = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "send",
    "recv",
]
LINK_SHARE: dict[Collective, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "send": lambda n: 1.0,
    "recv": lambda n: 1.0,
}
"""Of a collective's bytes, what passes each rank's links among n ranks, as nccl-tests counts it."""
COMPUTE_BYTES: dict[str, int] = {"fp32": 4, "fp64": 8}
COLUMN_CUT, ROW_CUT = ("q", "k", "v", "up", "gate"), ("o", "down")
LOSS_NUMBERS = 3
"""That tensor ranks tell each other of a token: largest logit, sum, logit of the target."""


@dataclass(frozen=True)
class AxisTraffic:
    """What one rank exchanges in one step over one axis for one purpose."""

    axis: str
    collective: Collective
    num_bytes: int
    purpose: str


@dataclass(frozen=True)
class RankPlace:
    """A training as one of its ranks sees it."""

    shape: DecoderShape
    layout: Layout
    dp: int
    seq_len: int
    num_microbatches: int
    dtype: Dtype
    stage: int = 0
    """The rank's index on the pipeline axis."""
    on_gpu: bool = False

    @property
    def compute_bytes(self) -> int:
        """e."""
        return COMPUTE_BYTES.get(self.dtype, 2)

    @property
    def wide_bytes(self) -> int:
        """w: of gradients, losses and norms."""
        return max(4, self.compute_bytes)

    @property
    def tokens(self) -> int:
        """b T: of a micro-batch on a rank, before a sequence-parallel cut."""
        return self.layout.micro_batch * self.seq_len // self.layout.cp

    @property
    def stages(self) -> range:
        """The pipeline stages on this rank."""
        return range(self.stage, self.layout.pp * self.layout.vp, self.layout.pp)

    @property
    def layers(self) -> int:
        """L."""
        sizes = stages_of(self.shape, self.layout)
        return sum(sizes[stage] for stage in self.stages)

    @property
    def has_first(self) -> bool:
        """Whether the rank embeds."""
        return 0 in self.stages

    @property
    def has_last(self) -> bool:
        """Whether the rank has the head."""
        return self.layout.pp * self.layout.vp - 1 in self.stages


@dataclass(frozen=True)
class Weight:
    """A parameter as a tensor rank holds it; `whole` when every one holds all of it."""

    rows: int
    columns: int
    whole: bool = False

    @property
    def size(self) -> int:
        """Numbers."""
        return self.rows * self.columns

    def padded(self, shards: int) -> int:
        """Numbers of all shards together: FSDP cuts rows, and its shards are of equal size."""
        return -(-self.rows // shards) * shards * self.columns


def unpredicted(shape: Shape, layout: Layout, dp: int, lora: LoraSpec | None) -> str | None:
    """Why there is no formula, one sentence; None when there is one."""
    sharded = layout.zero_stage >= 2 and dp * layout.cp > 1
    if shape.kind != "decoder" or shape.num_experts > 1:
        return "what moves is known for decoders without experts alone"
    if shape.latent_attention is not None or shape.mtp_layers:
        return "what moves is not known for latent attention and layers that predict more tokens"
    if lora is not None:
        return "what moves is not known for adapters"
    if sharded and layout.pp > 1:
        return f"what moves is not known for ZeRO-{layout.zero_stage} in a pipeline"
    if sharded and layout.tp > 1:
        return f"what moves is not known for ZeRO-{layout.zero_stage} beside tensor parallelism"
    return None


def step_traffic(x: RankPlace) -> list[AxisTraffic]:
    """All that a rank exchanges in a step, in bytes; nothing over axes of one rank.

    Assumes that every target counts: masked ones add a sum of 8 bytes. Ask `unpredicted` first.
    """
    terms = [*_tensor(x), *_context(x), *_pipeline(x), *_data(x)]
    return [term for term in terms if term.num_bytes]


def block_weights(x: RankPlace) -> list[Weight]:
    """Parameters of one block on a tensor rank."""
    tp, norm = x.layout.tp, Weight(x.shape.hidden_size, 1, whole=True)
    shape = x.shape
    num_norms = 4 if shape.norm_position == "both" else 2
    of_head = [Weight(shape.head_dim, 1, whole=True)] * (2 if shape.qk_norm else 0)
    weights = ([norm] * num_norms + of_head) * vectors_of_norm(shape)
    for name, (inputs, outputs) in linear_sizes(x.shape).items():
        if name in COLUMN_CUT:
            weights.append(Weight(outputs // tp, inputs))
        else:
            weights.append(Weight(outputs, inputs // tp))
        if x.shape.bias:
            cut = tp if name in COLUMN_CUT else 1
            weights.append(Weight(outputs // cut, 1, whole=name in ROW_CUT))
    return weights


def end_weights(x: RankPlace) -> list[Weight]:
    """Parameters outside the blocks on a tensor rank: embedding, positions, norms, head."""
    shape, h, width = x.shape, x.shape.hidden_size, x.shape.embed_dim
    table = Weight(shape.padded_vocab(x.layout.tp) // x.layout.tp, width)
    norm = [Weight(h, 1, whole=True)] * (2 if shape.norm == "layernorm" else 1)
    places = shape.max_positions + shape.position_offset
    projected = width != h
    weights: list[Weight] = []
    if x.has_first or (x.has_last and shape.tied_embeddings):
        weights.append(table)
    if x.has_first:
        weights += norm if shape.embedding_norm else []
        weights += [Weight(places, h, whole=True)] if shape.positions == "learned" else []
        weights += [Weight(h, width, whole=True)] if projected else []
    if x.has_last:
        weights += norm if shape.final_norm else []
        weights += [Weight(width, h, whole=True)] if projected else []
        weights += [] if shape.tied_embeddings else [table]
    return weights


def _tensor(x: RankPlace) -> Iterator[AxisTraffic]:
    """Two regions a block: each is entered and left, forward and backward: 4 b T h a block.

    All-reduces, or gathers and scatters around a cut sequence. Where a block is computed again, it
    enters again, and leaves again as far as something behind it is needed.
    """
    layout, shape, e, w = x.layout, x.shape, x.compute_bytes, x.wide_bytes
    if layout.tp == 1:
        return
    stream, embedded = x.tokens * shape.hidden_size * e, x.tokens * shape.embed_dim * e
    levels = stage_levels(shape, layout, x.stages)
    full, entered_again = levels.count("full"), levels.count("full") * 2 + levels.count("ffn")
    # Recomputation ends with the last tensor that is needed: behind the second sum nothing is.
    needed = shape.norm_position != "pre" or shape.dropout > 0
    left_again = (2 if needed else 1) * full
    ends = x.has_first + x.has_last
    m = x.num_microbatches
    if layout.sequence_parallel:
        gathers = (4 * x.layers + entered_again) * stream + ends * embedded
        scatters = (4 * x.layers + left_again) * stream + ends * embedded
        yield AxisTraffic("tp", "all_gather", m * gathers, "activations")
        yield AxisTraffic("tp", "reduce_scatter", m * scatters, "activations")
        shares = [*block_weights(x)] * x.layers + end_weights(x)
        yield AxisTraffic("tp", "all_reduce", w * sum(p.size for p in shares if p.whole), "shares")
    else:
        sums = (4 * x.layers + left_again) * stream + ends * embedded
        yield AxisTraffic("tp", "all_reduce", m * sums, "activations")
        if shape.qk_norm:
            of_heads = 2 * shape.head_dim * vectors_of_norm(shape)
            yield AxisTraffic("tp", "all_reduce", w * x.layers * of_heads, "shares")
    if x.has_last:
        numbers = layout.tp * x.tokens * LOSS_NUMBERS * w
        yield AxisTraffic("tp", "all_gather", m * numbers, "loss")
    yield AxisTraffic("tp", "all_reduce", w, "norm")


def _context(x: RankPlace) -> Iterator[AxisTraffic]:
    """Keys and values of T tokens: gathered by all, changed for heads, or sent around a ring."""
    layout, shape, n = x.layout, x.shape, x.layout.cp
    if n == 1:
        return
    full = stage_levels(shape, layout, x.stages).count("full")
    recomputed = x.layers if layout.recompute == "selective" else full
    m, head = x.num_microbatches, x.tokens * shape.head_dim // layout.tp
    keys = 2 * head * shape.kv_heads
    if layout.cp_exchange == "all-gather":
        gathered = m * n * keys * x.compute_bytes
        again = gathered * (x.layers + recomputed)
        yield AxisTraffic("cp", "all_gather", again, "keys and values")
        yield AxisTraffic("cp", "reduce_scatter", gathered * x.layers, "keys and values")
    elif layout.cp_exchange == "all-to-all":
        kv_heads = shape.kv_heads // layout.tp
        copies = lcm(kv_heads, n) // kv_heads
        to_tokens, to_heads = head * shape.num_heads + keys * copies, head * shape.num_heads
        # Selective recomputation ends with attention itself.
        again = to_tokens * recomputed + to_heads * full
        moved = 2 * (to_tokens + to_heads) * x.layers + again
        yield AxisTraffic("cp", "all_to_all", m * moved * x.compute_bytes, "heads")
    else:
        passed = keys * x.compute_bytes * (n - 1) * (2 * x.layers + recomputed)
        returned = keys * max(4, x.compute_bytes) * n * x.layers
        yield AxisTraffic("cp", "send", m * (passed + returned), "keys and values")
        yield AxisTraffic("cp", "recv", m * (passed + returned), "keys and values")


def _pipeline(x: RankPlace) -> Iterator[AxisTraffic]:
    """b T h between neighbours, forward and back; a tied embedding's gradient; norm and loss."""
    layout, stages = x.layout, x.layout.pp * x.layout.vp
    if layout.pp == 1:
        return
    cut = layout.tp if layout.sequence_parallel else 1
    stream = x.tokens * x.shape.hidden_size // cut * x.compute_bytes
    inner = sum(stage > 0 for stage in x.stages) + sum(stage < stages - 1 for stage in x.stages)
    # The neighbour that a stage gets its input from gets a gradient back, and so on.
    moved = x.num_microbatches * stream * inner
    if x.shape.tied_embeddings and (x.has_first or x.has_last):
        table = x.shape.padded_vocab(layout.tp) // layout.tp * x.shape.embed_dim * x.wide_bytes
        yield AxisTraffic("pp", "send", table, "tied embedding")
        yield AxisTraffic("pp", "recv", table, "tied embedding")
    yield AxisTraffic("pp", "send", moved, "activations")
    yield AxisTraffic("pp", "recv", moved, "activations")
    yield AxisTraffic("pp", "all_reduce", 2 * x.wide_bytes, "norm and loss")


def _data(x: RankPlace) -> Iterator[AxisTraffic]:
    """Gradients and weights of the ranks that hold the same, which context ranks do as well."""
    layout, w, ranks = x.layout, x.wide_bytes, x.dp * x.layout.cp
    if ranks == 1:
        return
    block, ends = block_weights(x), end_weights(x)
    if layout.zero_stage < 2:
        weights = w * (x.layers * sum(p.size for p in block) + sum(p.size for p in ends))
        yield AxisTraffic("dp", "all_reduce", weights, "gradients")
        if layout.zero_stage == 1:
            yield AxisTraffic("dp", "all_gather" if x.on_gpu else "broadcast", weights, "weights")
        return
    shards, m = layout.shards(x.dp), x.num_microbatches
    axis = "dp" if shards == ranks else "dp_shard"
    blocks, root = (sum(p.padded(shards) for p in weights) for weights in (block, ends))
    blocks *= x.layers
    # Embedding and head stay from the forward to the backward pass; stage 2 gathers once a step.
    gathered = m * (2 * blocks + root) if layout.zero_stage == 3 else blocks + root
    yield AxisTraffic(axis, "all_gather", gathered * x.compute_bytes, "weights")
    times = 1 if layout.gradient_sync == "last" else m
    yield AxisTraffic(axis, "reduce_scatter", times * (blocks + root) * w, "gradients")
    if shards < ranks:
        owned = (blocks + root) // shards * w
        yield AxisTraffic("dp_replicate", "all_reduce", times * owned, "gradients")
    yield AxisTraffic(axis, "all_reduce", w, "norm")
