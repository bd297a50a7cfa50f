"""Published OPT model shapes, and a shape as an OPT configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from paceline.core.shape import DecoderShape, Shape

PUBLISHED = {
    (12, 768, 12): "facebook/opt-125m",
    (24, 1024, 16): "facebook/opt-350m",
    (24, 2048, 32): "facebook/opt-1.3b",
    (32, 2560, 32): "facebook/opt-2.7b",
    (32, 4096, 32): "facebook/opt-6.7b",
    (40, 5120, 40): "facebook/opt-13b",
    (48, 7168, 56): "facebook/opt-30b",
    (64, 9216, 72): "facebook/opt-66b",
}
"""Checkpoint by layers, hidden size and heads (Zhang et al., arXiv:2205.01068, table 1)."""
PUBLISHED_VOCABULARY = 50272


def published_name(shape: Shape) -> str | None:
    """Return the Hugging Face name of the OPT model with this shape, or None."""
    if shape.kind != "decoder" or shape.vocab_size != PUBLISHED_VOCABULARY:
        return None
    return PUBLISHED.get((shape.num_layers, shape.hidden_size, shape.num_heads))


def opt_configuration(shape: Shape) -> dict[str, Any]:
    """Return the shape as config.json of transformers' OPT; padding and end share a token."""
    model = cast(DecoderShape, shape)
    end = min(2, model.vocab_size - 1)
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": model.padded_vocab(),
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "ffn_dim": model.ffn_size,
        "max_position_embeddings": model.max_positions,
        "word_embed_proj_dim": model.embed_dim,
        "do_layer_norm_before": model.norm_position == "pre",
        "activation_function": "relu",
        "dropout": model.dropout,
        "attention_dropout": model.dropped_probabilities,
        "init_std": 0.02,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": 1 if model.vocab_size > 1 else 0,
    }


def folder_differences(shape: DecoderShape, folder: Path) -> list[str]:
    """Return how a model folder differs from the planned shape; empty if unreadable."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    expected = opt_configuration(shape)
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim", "vocab_size")
    return [
        f"engine_settings.model: {folder} has {name} {config[name]}, the recipe {expected[name]}"
        for name in sizes
        if name in config and config[name] != expected[name]
    ]
