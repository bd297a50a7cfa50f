"""Models of the tests: tiny variants of the workloads, even smaller with the same structure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from paceline.core.mmdit import MMDiTShape
from paceline.core.shape import DecoderShape, LoraSpec
from paceline.core.training import Data
from paceline.files.recipe import Recipe, load_recipe

SEQ_LEN = 32
SMALL = {"num_layers": 4, "hidden_size": 32, "vocab_size": 320, "max_positions": 64}


@dataclass(frozen=True)
class Model:
    """A recipe, and the sizes that it has here."""

    name: str
    sizes: dict[str, Any]

    @cached_property
    def recipe(self) -> Recipe:
        """The tiny variant."""
        return load_recipe(self.name)

    @property
    def shape(self) -> DecoderShape | MMDiTShape:
        """Its shape in these sizes."""
        whole = self.recipe.model
        return type(whole).model_validate({**whole.model_dump(), **self.sizes})

    @property
    def smooth(self) -> DecoderShape | MMDiTShape:
        """The same with GELU in ReLU's place."""
        shape = self.shape
        kinked = isinstance(shape, DecoderShape) and shape.activation == "relu"
        return shape.model_copy(update={"activation": "gelu"}) if kinked else shape

    @property
    def lora(self) -> LoraSpec | None:
        """Its adapters, without dropout: what is dropped depends on the layout."""
        lora = self.recipe.lora
        return lora and lora.model_copy(update={"dropout": 0.0})

    @property
    def seq_len(self) -> int:
        """Tokens of a sample."""
        return self.shape.seq_len if isinstance(self.shape, MMDiTShape) else SEQ_LEN

    @property
    def data(self) -> Data:
        """Where its samples come from."""
        return self.recipe.data


MODELS = {
    "llama": Model(
        "llama31-8b-tiny", {**SMALL, "num_heads": 8, "num_kv_heads": 2, "ffn_size": 112}
    ),
    "ends": Model(
        "llama31-405b-tiny",
        {
            **SMALL,
            "num_layers": 6,
            "num_heads": 32,
            "num_kv_heads": 2,
            "hidden_size": 64,
            "ffn_size": 208,
        },
    ),
    "gpt": Model("gpt-1b3-tiny", {**SMALL, "num_heads": 4, "ffn_size": 128, "vocab_size": 400}),
    "opt": Model(
        "opt-350m-sft-tiny", {**SMALL, "num_heads": 4, "ffn_size": 128, "embedding_size": 16}
    ),
    "lora": Model(
        "llama2-70b-lora-tiny",
        {**SMALL, "hidden_size": 64, "num_heads": 16, "num_kv_heads": 2, "ffn_size": 224},
    ),
    "sft": Model("opt-13b-sft-tiny", {**SMALL, "num_heads": 8, "ffn_size": 128}),
    "qwen3": Model("qwen3-8b-tiny", {**SMALL, "num_heads": 8, "num_kv_heads": 2, "ffn_size": 96}),
    "gemma3": Model(
        "gemma3-4b-tiny",
        {
            **SMALL,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_size": 12,
            "ffn_size": 128,
            "sliding_window": 9,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 10,
        },
    ),
    "phi4": Model(
        "phi4-mini-tiny",
        {**SMALL, "hidden_size": 48, "num_heads": 6, "num_kv_heads": 2, "ffn_size": 128},
    ),
    "mixtral": Model(
        "mixtral-8x7b-tiny",
        {**SMALL, "num_heads": 8, "num_kv_heads": 2, "ffn_size": 112, "num_experts": 4},
    ),
    "qwen3-moe": Model(
        "qwen3-30b-a3b-tiny",
        {**SMALL, "num_heads": 16, "num_kv_heads": 2, "head_size": 8, "ffn_size": 12},
    ),
    "deepseek-v3": Model(
        "deepseek-v3-tiny",
        {
            **SMALL,
            "hidden_size": 56,
            "num_heads": 8,
            "ffn_size": 16,
            "shared_ffn_size": 16,
            "dense_ffn_size": 40,
            "num_experts": 8,
            "experts_per_token": 2,
            "latent_attention": {
                "q_lora_rank": 24,
                "kv_lora_rank": 16,
                "qk_nope_head_dim": 6,
                "qk_rope_head_dim": 4,
                "v_head_dim": 8,
            },
        },
    ),
    "gpt-oss": Model(
        "gpt-oss-20b-tiny",
        {
            **SMALL,
            "num_heads": 16,
            "num_kv_heads": 2,
            "head_size": 8,
            "ffn_size": 32,
            "num_experts": 8,
            "activation_limit": 0.1,
            "sliding_window": 9,
            "rope_original_positions": 512,
        },
    ),
    "flux": Model(
        "flux1-schnell-tiny",
        {
            "hidden_size": 48,
            "num_heads": 4,
            "rope_axes": (4, 4, 4),
            "latent_size": 8,
            "text_len": 8,
            "text_width": 20,
            "pooled_width": 12,
        },
    ),
}
"""llama: grouped key/value heads. ends: as many layers less two as stages divide. gpt: a tied,
padded embedding behind a norm. opt: the same behind projections, and norms after sums. lora:
adapters on the attention, all else frozen. sft: adapters on all linear layers, all else trained.
qwen3: normed heads. gemma3: windows, two rotary bases, norms before and behind, zero-centered.
phi4: heads that rotate in part under a tied head. mixtral: experts. qwen3-moe: many narrow experts
and normed heads. deepseek-v3: latent attention, a dense layer, groups of experts and a shared one.
gpt-oss: sinks, windows, and experts with biases, whose clamp is narrow so that these small numbers
meet it. flux: two streams."""
