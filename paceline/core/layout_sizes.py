"""Sizes that a layout's axes must divide, each refusal with its reason; all that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paceline.core.layout import RULES, Layout, broken_rules, features
from paceline.core.pipeline import stages_of
from paceline.core.shape import Shape
from paceline.core.units import counted


@dataclass(frozen=True)
class Sizes:
    """What CONDITIONS look at; a world that holds whole replicas."""

    layout: Layout
    shape: Shape
    world_size: int
    global_batch: int
    seq_len: int | None = None
    device: str | None = None
    """cpu or cuda; None leaves it open."""
    dtype: str | None = None
    """None leaves it open."""
    fp8_recipe: str = "tensorwise"

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one replica in a step."""
        return self.layout.num_microbatches(self.world_size, self.global_batch)


Condition = Callable[[Sizes], str | None]
"""Why sizes do not fit together, None when they do; the first docstring line is the condition."""


def whole_batches(x: Sizes) -> str | None:
    """`global_batch` is a multiple of dp x `micro_batch`."""
    dp, micro_batch = x.layout.dp(x.world_size), x.layout.micro_batch
    if x.global_batch % (dp * micro_batch) == 0:
        return None
    return (
        f"global_batch {x.global_batch} is not a multiple of dp {dp} x micro_batch {micro_batch} = "
        f"{dp * micro_batch}, but all replicas run the same number of whole micro-batches"
    )


def whole_heads(x: Sizes) -> str | None:
    """tp divides the query heads, and divides the key/value heads or is a multiple of them."""
    # Megatron-Core 0.16 (transformer_config.py, attention.py) takes either for its query groups.
    tp, heads, kv_heads = x.layout.tp, x.shape.num_heads, x.shape.kv_heads
    if heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0):
        return None
    return (
        f"{heads} query and {kv_heads} key/value heads cannot be split over tp {tp}, because a "
        "tensor rank computes whole heads: use a tp that divides both"
    )


def whole_kv_heads(x: Sizes) -> str | None:
    """tp divides the key/value heads."""
    if x.shape.kv_heads % x.layout.tp == 0:
        return None
    return (
        f"{x.shape.kv_heads} key/value heads cannot be split over tp {x.layout.tp}, because tensor "
        "ranks do not copy them: use a tp that divides them"
    )


def whole_heads_in_all_to_all(x: Sizes) -> str | None:
    """With cp > 1 and `cp_exchange` all-to-all, tp x cp divides the query heads."""
    ranks = x.layout.tp * x.layout.cp
    used = x.layout.cp > 1 and x.layout.cp_exchange == "all-to-all"
    if not used or x.shape.num_heads % ranks == 0:
        return None
    return (
        f"{counted(x.shape.num_heads, 'query head')} cannot be split over tp {x.layout.tp} x "
        f"cp {x.layout.cp} = {ranks}, because all-to-all gives each rank whole heads: use "
        "layout.cp_exchange=all-gather"
    )


def whole_ffn(x: Sizes) -> str | None:
    """tp divides `ffn_size`."""
    if x.shape.ffn_size % x.layout.tp == 0:
        return None
    return (
        f"ffn_size {x.shape.ffn_size} cannot be split over tp {x.layout.tp}, because tensor ranks "
        "hold equal parts of it: use a tp that divides it"
    )


def whole_experts(x: Sizes) -> str | None:
    """ep divides the experts and dp x cp."""
    ep, shape = x.layout.ep, x.shape
    experts = shape.num_experts if shape.kind == "decoder" else 1
    ranks = x.layout.dp(x.world_size) * x.layout.cp
    if experts % ep == 0 and ranks % ep == 0:
        return None
    if experts == 1:
        return f"ep {ep} spreads experts over ranks, and the model has none: use layout.ep=1"
    return (
        f"{experts} experts on dp x cp = {counted(ranks, 'rank')} cannot be split over ep {ep}, "
        "because expert ranks are data ranks that hold equally many experts: use an ep that "
        "divides both"
    )


def whole_sequence_chunks(x: Sizes) -> str | None:
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


def whole_streams(x: Sizes) -> str | None:
    """With cp > 1, cp divides both the text tokens and the image tokens of an mmdit."""
    cp, shape = x.layout.cp, x.shape
    if shape.kind != "mmdit" or (shape.text_len % cp == 0 and shape.image_tokens % cp == 0):
        return None
    return (
        f"{shape.text_len} text and {shape.image_tokens} image tokens cannot be split over "
        f"cp {cp}, because a context rank takes an equal part of each: use a cp that divides both"
    )


def whole_sequence_parts(x: Sizes) -> str | None:
    """With `sequence_parallel`, tp x cp divides `seq_len`."""
    parts = x.layout.tp * x.layout.cp
    if not x.layout.sequence_parallel or x.seq_len is None or x.seq_len % parts == 0:
        return None
    return (
        f"seq_len {x.seq_len} cannot be split over tp {x.layout.tp} x cp {x.layout.cp} = {parts}, "
        f"because sequence_parallel gives ranks equal parts of it: use a multiple of {parts}"
    )


def whole_stages(x: Sizes) -> str | None:
    """pp x vp divides a decoder's layers, or these + 2, or these + 2 + those for further tokens."""
    if x.shape.kind != "decoder":
        return None
    try:
        stages_of(x.shape, x.layout)
    except ValueError:
        pass
    else:
        return None
    layers, further, stages = x.shape.num_layers, x.shape.mtp_layers, x.layout.pp * x.layout.vp
    whole = layers + further + 2
    added = f", or {whole} with those for further tokens too" if further else ""
    reason = (
        "its last one would not hold even those for further tokens: use fewer"
        if further and whole % stages == 0
        else "a pipeline is as slow as its longest one: use a pp x vp that divides one of these"
    )
    return (
        f"{counted(layers, 'layer')} (or {layers + 2} with embedding and head{added}) cannot be "
        f"split over pp {x.layout.pp} x vp {x.layout.vp} = {stages} stages, because {reason}"
    )


def whole_shards(x: Sizes) -> str | None:
    """`dp_shard` divides dp x cp."""
    ranks = x.layout.dp(x.world_size) * x.layout.cp
    if not x.layout.dp_shard or ranks % x.layout.dp_shard == 0:
        return None
    return (
        f"dp x cp = {counted(ranks, 'rank')} cannot be split into groups of dp_shard "
        f"{x.layout.dp_shard}, "
        "because each group holds one copy of the states: use a dp_shard that divides them"
    )


def whole_vocabulary(x: Sizes) -> str | None:
    """tp divides the padded vocabulary."""
    rows = x.shape.padded_vocab(x.layout.tp)
    if rows % x.layout.tp == 0:
        return None
    return (
        f"a vocabulary of {rows} rows cannot be split over tp {x.layout.tp}, because tensor ranks "
        "hold equal parts of the embedding: pad it with model.vocab_multiple=2 or more"
    )


def whole_rounds(x: Sizes) -> str | None:
    """interleaved and zero-bubble: the rounds, micro-batches // pp, divide the micro-batches."""
    schedule, num = x.layout.effective_schedule, x.num_microbatches
    rounds = max(1, num // x.layout.pp)
    if x.layout.pp == 1 or schedule not in ("interleaved", "zero-bubble") or num % rounds == 0:
        return None
    return (
        f"{counted(num, 'micro-batch')} a step cannot be split into {rounds} equal rounds, because "
        f"{schedule} repeats one round of at least pp {x.layout.pp}: use a multiple of "
        f"{x.layout.pp}"
    )


def ring_heads(x: Sizes) -> str | None:
    """With cp > 1 and `cp_exchange` ring on a GPU, heads are a multiple of 8 up to 256 wide."""
    width = x.shape.head_dim
    used = x.layout.cp > 1 and x.layout.cp_exchange == "ring" and x.device == "cuda"
    if not used or (width % 8 == 0 and width <= 256):
        return None
    return (
        f"heads {width} wide cannot go around a ring on a GPU, because flash attention there takes "
        "multiples of 8 up to 256: use layout.cp_exchange=all-gather"
    )


def ring_without_dropout(x: Sizes) -> str | None:
    """With cp > 1 and `cp_exchange` ring, no attention probability is dropped."""
    used = x.layout.cp > 1 and x.layout.cp_exchange == "ring"
    shape = x.shape
    if not used or shape.kind != "decoder" or not shape.dropped_probabilities:
        return None
    return (
        f"attention in a ring cannot drop {shape.dropped_probabilities:g} of its probabilities, "
        "because its parts are joined by sums that dropping would change: use "
        "layout.cp_exchange=all-gather or model.attention_dropout=0"
    )


def ring_without_window(x: Sizes) -> str | None:
    """With cp > 1 and `cp_exchange` ring, no layer has a window."""
    used = x.layout.cp > 1 and x.layout.cp_exchange == "ring"
    shape = x.shape
    if not used or shape.kind != "decoder" or shape.sliding_window is None:
        return None
    return (
        f"attention in a ring cannot keep to a window of {shape.sliding_window} tokens, because "
        "its parts are whole chunks of the sequence: use layout.cp_exchange=all-gather or "
        "all-to-all"
    )


def low_precision_widths(x: Sizes) -> str | None:
    """A low precision's block or tile divides hidden size, and heads and `ffn_size` over tp."""
    block = low_precision_block(x)
    if x.shape.kind != "decoder" or block == 1:
        return None
    tp, shape, head = x.layout.tp, x.shape, x.shape.head_dim
    parts = (shape.num_heads * head // tp, shape.kv_heads * head // tp, shape.ffn_size // tp)
    odd = [width for width in (shape.hidden_size, *parts) if width % block]
    if not odd:
        return None
    smaller = f"a tp below {tp} or " if tp > 1 and shape.hidden_size % block == 0 else ""
    return (
        f"matrices {odd[0]} wide cannot be multiplied in {_low_precision(x)}, because it takes "
        f"multiples of {block}: use {smaller}training.dtype=bf16"
    )


def low_precision_rows(x: Sizes) -> str | None:
    """Blocks with one scale (mxfp8, nvfp4, blockwise) divide the tokens of a micro-batch / cp."""
    block, tokens = low_precision_block(x), x.seq_len
    if x.shape.kind != "decoder" or tokens is None or not _block_scaled(x):
        return None
    rows = x.layout.micro_batch * tokens // x.layout.cp
    if rows % block == 0:
        return None
    return (
        f"{rows} tokens of a micro-batch cannot be multiplied in {_low_precision(x)}, because the "
        f"weights' gradients sum over blocks of {block}: use another layout.micro_batch or seq_len"
    )


def low_precision_block(x: Sizes) -> int:
    """What must divide the sides of a matrix: a block with one scale, or a GPU's tile; else 1."""
    if x.dtype == "fp8" and x.fp8_recipe == "blockwise":
        return 128
    on_gpu = x.device == "cuda"
    blocks = {"fp8": 16 if on_gpu else 1, "mxfp8": 32, "nvfp4": 128 if on_gpu else 16}
    return blocks.get(x.dtype or "", 1)


def _block_scaled(x: Sizes) -> bool:
    return x.dtype in ("mxfp8", "nvfp4") or (x.dtype == "fp8" and x.fp8_recipe == "blockwise")


def _low_precision(x: Sizes) -> str:
    """How messages name it."""
    where = " on a GPU" if x.device == "cuda" else ""
    return f"{x.fp8_recipe} {x.dtype}{where}" if x.dtype == "fp8" else f"{x.dtype}{where}"


CONDITIONS: tuple[Condition, ...] = (
    whole_batches,
    whole_heads,
    whole_heads_in_all_to_all,
    whole_ffn,
    whole_sequence_chunks,
    whole_streams,
    whole_sequence_parts,
    whole_stages,
    whole_shards,
    whole_experts,
)
"""What sizes must satisfy in any engine."""
NATIVE_CONDITIONS: tuple[Condition, ...] = (
    whole_kv_heads,
    whole_vocabulary,
    whole_rounds,
    ring_heads,
    ring_without_dropout,
    ring_without_window,
    low_precision_widths,
    low_precision_rows,
)
"""What they must satisfy in the native trainer besides."""


def layout_problems(
    layout: Layout,
    shape: Shape,
    world_size: int,
    global_batch: int,
    seq_len: int | None = None,
) -> list[str]:
    """Why this layout cannot run in any engine, one sentence each; empty when it can.

    `seq_len` None leaves out what depends on it.
    """
    if world_size % layout.model_devices:
        return [
            f"tp {layout.tp} x pp {layout.pp} x cp {layout.cp} = {layout.model_devices} "
            f"does not divide {counted(world_size, 'device')}: use a multiple of "
            f"{layout.model_devices}"
        ]
    broken = broken_rules(features(layout, world_size), (r for r in RULES if not r.native))
    sizes = Sizes(layout, shape, world_size, global_batch, seq_len)
    return [rule.reason for rule in broken] + _unmet(CONDITIONS, sizes)


def native_problems(
    layout: Layout,
    shape: Shape,
    world_size: int,
    global_batch: int,
    *,
    dtype: str | None = None,
    device: str | None = None,
    compiled: bool = False,
    document_mask: bool = False,
    seq_len: int | None = None,
    fp8_recipe: str = "tensorwise",
) -> list[str]:
    """Why the native trainer cannot run a layout without `layout_problems`, one sentence each."""
    present = features(
        layout,
        world_size,
        dtype=dtype,
        device=device,
        compiled=compiled,
        tied=shape.tied_embeddings,
        document_mask=document_mask,
        kind=shape.kind,
    )
    broken = broken_rules(present, (rule for rule in RULES if rule.native))
    sizes = Sizes(
        layout, shape, world_size, global_batch, seq_len, device, dtype, fp8_recipe=fp8_recipe
    )
    return [rule.reason for rule in broken] + _unmet(NATIVE_CONDITIONS, sizes)


def _unmet(conditions: Iterable[Condition], sizes: Sizes) -> list[str]:
    return [problem for condition in conditions if (problem := condition(sizes))]
