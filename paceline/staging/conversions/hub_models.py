"""Small models with random weights in the hub's format, for tiny fine-tuning benchmarks.

They are OPT and Llama models of any size, with the tokenizer of `made`. Tensor names and keys of
config.json are those of transformers (models/opt, models/llama).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from paceline.core.value import NonNegativeInt, PositiveInt, Value
from paceline.staging.conversions.stdlib_corpus import VOCABULARY, make_tokenizer

HubFamily = Literal["opt", "llama"]
OPT_OFFSET = 2
"""Number of rows before the first position in OPT's position embedding."""
EPS = 1e-5
DEVIATION = 0.02
"""Standard deviation of random weights, N(0, 0.02), as in the initialization of both families."""

_Shapes = Iterator[tuple[str, tuple[int, ...]]]


class HubModelSize(Value):
    """Size of a made model, from its asset's `settings`."""

    layers: PositiveInt = 2
    hidden: PositiveInt = 64
    heads: PositiveInt = 4
    kv_heads: NonNegativeInt = 0
    """Number of key-value heads of Llama; 0 means as many as attention heads."""
    ffn: PositiveInt = 256
    positions: PositiveInt = 256
    embedding: NonNegativeInt = 0
    """Width of OPT's embedding; 0 means the width of the model."""
    post_norm: bool = False
    """Use OPT's layer norms after the residual and no final norm, as in OPT-350M."""
    vocab_size: PositiveInt = VOCABULARY


def make_hub_model(
    folder: Path, family: HubFamily, size: HubModelSize, hub_id: str | None = None
) -> None:
    """Write config.json, model.safetensors and the tokenizer of a model, the same in every call."""
    from safetensors.numpy import save_file

    make_tokenizer(folder)
    config = (_opt_config if family == "opt" else _llama_config)(size)
    if hub_id:  # DeepSpeed-Chat loads the tokenizer of a model folder by this name.
        config = {"_name_or_path": hub_id, **config}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shapes = (_opt_shapes if family == "opt" else _llama_shapes)(size)
    random = np.random.default_rng(1234)
    weights = {name: _tensor(name, shape, random) for name, shape in shapes}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _tensor(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    if name.endswith(".bias"):
        return np.zeros(shape, np.float32)
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return random.normal(0.0, DEVIATION, shape).astype(np.float32)


def _opt_config(size: HubModelSize) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden,
        "word_embed_proj_dim": size.embedding or size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "ffn_dim": size.ffn,
        "max_position_embeddings": size.positions,
        "do_layer_norm_before": not size.post_norm,
        "activation_function": "relu",
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "enable_bias": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def _opt_shapes(size: HubModelSize) -> _Shapes:
    width, narrow = size.hidden, size.embedding or size.hidden
    yield "model.decoder.embed_tokens.weight", (size.vocab_size, narrow)
    yield "model.decoder.embed_positions.weight", (size.positions + OPT_OFFSET, width)
    if narrow != width:
        yield "model.decoder.project_in.weight", (width, narrow)
        yield "model.decoder.project_out.weight", (narrow, width)
    matrices = {f"self_attn.{part}_proj": (width, width) for part in ("q", "k", "v", "out")}
    matrices |= {"fc1": (size.ffn, width), "fc2": (width, size.ffn)}
    norms = ("self_attn_layer_norm", "final_layer_norm")
    for number in range(size.layers):
        for name, shape in (matrices | dict.fromkeys(norms, (width,))).items():
            yield f"model.decoder.layers.{number}.{name}.weight", shape
            yield f"model.decoder.layers.{number}.{name}.bias", shape[:1]
    if not size.post_norm:
        yield "model.decoder.final_layer_norm.weight", (width,)
        yield "model.decoder.final_layer_norm.bias", (width,)


def _llama_config(size: HubModelSize) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads or size.heads,
        "max_position_embeddings": size.positions,
        "rms_norm_eps": EPS,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def _llama_shapes(size: HubModelSize) -> _Shapes:
    width = size.hidden
    keys = width // size.heads * (size.kv_heads or size.heads)
    inner = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, width),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (size.ffn, width),
        "mlp.up_proj": (size.ffn, width),
        "mlp.down_proj": (width, size.ffn),
    }
    yield "model.embed_tokens.weight", (size.vocab_size, width)
    for number in range(size.layers):
        for name, shape in inner.items():
            yield f"model.layers.{number}.{name}.weight", shape
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (size.vocab_size, width)
