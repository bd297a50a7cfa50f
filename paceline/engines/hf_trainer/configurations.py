"""Which configuration of transformers has the shape of a decoder: Llama's, OPT's or GPT-2's."""

from __future__ import annotations

from typing import Any, Literal

from paceline.core.shape import DecoderShape, LoraSpec, LoraTarget
from paceline.engines.launch.model_options import option_problems

Family = Literal["llama", "opt", "gpt2"]

TITLES: dict[Family, str] = {"llama": "Llama", "opt": "OPT", "gpt2": "GPT-2"}
OPT_OFFSET = 2
"""Unused rows that OPT puts before its positions, whatever its configuration says."""
OPT_EPS = 1e-5
"""Of OPT's norms, which its configuration does not know."""
FIELDS = {"kv_heads": "num_kv_heads", "head_dim": "head_size"}
"""What a recipe calls these."""
LAYERS: dict[Family, dict[LoraTarget, str]] = {
    "llama": {
        "q": "q_proj",
        "k": "k_proj",
        "v": "v_proj",
        "o": "o_proj",
        "gate": "gate_proj",
        "up": "up_proj",
        "down": "down_proj",
    },
    "opt": {
        "q": "q_proj",
        "k": "k_proj",
        "v": "v_proj",
        "o": "out_proj",
        "up": "fc1",
        "down": "fc2",
    },
    "gpt2": {},
}
"""Layers that adapters go to; GPT-2 has one for queries, keys and values together."""


def family(shape: DecoderShape) -> Family:
    """The family that is nearest: by the norm, then by what only OPT has."""
    if shape.norm == "rmsnorm":
        return "llama"
    return "opt" if shape.position_offset or shape.embedding_size else "gpt2"


def shape_problems(shape: DecoderShape) -> list[str]:
    """What of the shape its family does not have, one sentence each."""
    title = TITLES[family(shape)]
    return [
        f"model.{FIELDS.get(name, name)} {getattr(shape, name)}: transformers' {title} has {value}"
        for name, value in _fixed(shape).items()
        if getattr(shape, name) != value
    ] + option_problems(shape)


def lora_problems(shape: DecoderShape, lora: LoraSpec) -> list[str]:
    """What of the adapters cannot be asked of peft, one sentence each."""
    layers = LAYERS[family(shape)]
    problems = [
        f"lora.targets {target}: transformers' {TITLES[family(shape)]} has no such layer"
        for target in lora.targets
        if target not in layers
    ]
    if lora.train_rest:
        problems.append("lora.train_rest is not in this engine: peft trains its adapters alone")
    if lora.lr is not None:
        problems.append("lora.lr is not in this engine: the adapters train at training.lr")
    return problems


def configuration(shape: DecoderShape) -> dict[str, Any]:
    """The fields of the shape's configuration in transformers, `model_type` first."""
    common = {
        "model_type": family(shape),
        "vocab_size": shape.padded_vocab(),
        "tie_word_embeddings": shape.tied_embeddings,
        # A padding token would get no gradient from its place in the input.
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "use_cache": False,
    }
    return common | {"llama": _llama, "opt": _opt, "gpt2": _gpt2}[family(shape)](shape)


def adapters(shape: DecoderShape, lora: LoraSpec) -> dict[str, Any]:
    """The settings of peft's LoraConfig."""
    layers = LAYERS[family(shape)]
    return {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": [layers[target] for target in lora.targets],
    }


def _fixed(shape: DecoderShape) -> dict[str, Any]:
    """The values that a family has and its configuration cannot change, by property."""
    fixed: dict[str, Any] = {"num_experts": 1, "embedding_norm": False}
    if family(shape) == "llama":
        llama = {"positions": "rope", "gated_ffn": True, "norm_position": "pre"}
        return fixed | llama | {"final_norm": True, "embedding_size": None, "dropout": 0.0}
    fixed |= {
        "positions": "learned",
        "gated_ffn": False,
        "norm": "layernorm",
        "kv_heads": shape.num_heads,
        "head_dim": shape.hidden_size // shape.num_heads,
    }
    if family(shape) == "opt":
        has_final_norm = shape.norm_position == "pre"
        opt = {"final_norm": has_final_norm, "position_offset": OPT_OFFSET, "norm_eps": OPT_EPS}
        return fixed | opt
    return fixed | {"norm_position": "pre", "final_norm": True, "bias": True}


def _llama(shape: DecoderShape) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": shape.activation,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": shape.bias,
        "mlp_bias": shape.bias,
        "attention_dropout": shape.dropped_probabilities,
    }


def _opt(shape: DecoderShape) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden_size,
        "ffn_dim": shape.ffn_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "activation_function": shape.activation,
        "max_position_embeddings": shape.max_positions,
        "word_embed_proj_dim": shape.embed_dim,
        "do_layer_norm_before": shape.norm_position == "pre",
        "enable_bias": shape.bias,
        "dropout": shape.dropout,
        "attention_dropout": shape.dropped_probabilities,
    }


def _gpt2(shape: DecoderShape) -> dict[str, Any]:
    return {
        "n_embd": shape.hidden_size,
        "n_inner": shape.ffn_size,
        "n_layer": shape.num_layers,
        "n_head": shape.num_heads,
        "activation_function": shape.activation,
        "n_positions": shape.max_positions,
        "layer_norm_epsilon": shape.norm_eps,
        "embd_pdrop": shape.dropout,
        "resid_pdrop": shape.dropout,
        "attn_pdrop": shape.dropped_probabilities,
    }
