"""Shapes that the tests share, written out here so that no recipe can bend a count."""

from __future__ import annotations

from paceline.core.layout import Layout
from paceline.core.mmdit import MMDiTShape
from paceline.core.parallel_run import ParallelRun
from paceline.core.shape import DecoderShape, LoraSpec, Shape


def llama(layers: int, hidden: int, heads: int, ffn: int) -> DecoderShape:
    """A Llama 3.1: 8 key/value heads, gated ffn, untied head, no biases."""
    return DecoderShape(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=8,
        ffn_size=ffn,
        vocab_size=128256,
        gated_ffn=True,
        activation="silu",
        norm="rmsnorm",
        positions="rope",
        max_positions=8192,
        rope_theta=500_000,
        bias=False,
        tied_embeddings=False,
    )


LLAMA_8B = llama(32, 4096, 32, 14336)
LLAMA_70B = llama(80, 8192, 64, 28672)
LLAMA_405B = llama(126, 16384, 128, 53248)

OPT_350M = DecoderShape(
    num_layers=24,
    hidden_size=1024,
    num_heads=16,
    ffn_size=4096,
    vocab_size=50272,
    activation="relu",
    norm_position="post",
    final_norm=False,
    position_offset=2,
    embedding_size=512,
)
OPT_13B = DecoderShape(
    num_layers=40,
    hidden_size=5120,
    num_heads=40,
    ffn_size=20480,
    vocab_size=50272,
    activation="relu",
    position_offset=2,
)
OPT_13B_LORA = LoraSpec(
    rank=128, alpha=1, targets=("q", "k", "v", "o", "up", "down"), train_rest=True
)

GPT_1B3 = DecoderShape(
    num_layers=24, hidden_size=2048, num_heads=16, ffn_size=8192, vocab_size=50257
)
GPT_1B3_PADDED = GPT_1B3.model_copy(update={"vocab_multiple": 128, "embedding_norm": True})

FLUX = MMDiTShape(
    kind="mmdit",
    hidden_size=3072,
    num_heads=24,
    num_double_blocks=19,
    num_single_blocks=38,
    latent_size=32,
    text_len=256,
    text_width=4096,
    pooled_width=768,
)
FLUX_TINY = FLUX.model_copy(
    update={
        "hidden_size": 256,
        "num_heads": 4,
        "num_double_blocks": 2,
        "num_single_blocks": 2,
        "latent_size": 16,
        "text_len": 32,
        "text_width": 128,
        "pooled_width": 64,
        "rope_axes": (8, 28, 28),
    }
)

TINY = DecoderShape(num_layers=2, hidden_size=64, num_heads=4, ffn_size=256, vocab_size=300)

SHAPES = {
    "llama31-70b": LLAMA_70B,
    "opt-350m-sft": OPT_350M,
    "opt-13b-sft": OPT_13B,
    "gpt-1b3": GPT_1B3_PADDED,
}
"""By the recipe that the published rows name."""


def run_of(
    shape: Shape,
    layout: Layout,
    dp: int,
    seq_len: int,
    dtype: str,
    lora: LoraSpec | None = None,
    num_microbatches: int | None = None,
) -> ParallelRun:
    """Return `dp` replicas of a model; without `num_microbatches` as many as fill a pipeline."""
    batch = num_microbatches and num_microbatches * dp * layout.micro_batch
    world = dp * layout.model_devices
    return ParallelRun(layout, shape, world, batch, seq_len, dtype, lora=lora)
