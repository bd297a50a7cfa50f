"""Configurations of transformers for the shape of a decoder: Llama, OPT or GPT-2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from paceline.core.shape import DecoderShape, LoraSpec, LoraTarget
from paceline.engines.support import OPT_SHAPE, Support, no, only

Family = Literal["llama", "opt", "gpt2"]

TITLES: dict[Family, str] = {"llama": "Llama", "opt": "OPT", "gpt2": "GPT-2"}
OPT_OFFSET = 2
"""Unused position rows that OPT always adds, regardless of its configuration."""
OPT_EPS = 1e-5
"""Epsilon of OPT's norms, which its configuration does not contain."""
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
"""Layers for adapters; GPT-2 has one layer for queries, keys and values together."""


_LLAMA, _GPT2 = "fixed in transformers' Llama", "fixed in transformers' GPT-2"
_COMMON: Support = {
    "model.num_experts": no("transformers' dense families have no experts"),
    "model.embedding_norm": no("transformers' Llama, OPT and GPT-2 have none"),
}
FAMILIES: Mapping[Family, Support] = {
    "llama": {
        **_COMMON,
        "model.positions": only("rope", reason=_LLAMA),
        "model.gated_ffn": only(True, reason=_LLAMA),
        "model.norm_position": only("pre", reason=_LLAMA),
        "model.final_norm": only(True, reason=_LLAMA),
        "model.embedding_size": no(_LLAMA),
        "model.dropout": no(_LLAMA),
    },
    "opt": {**_COMMON, **OPT_SHAPE},
    "gpt2": {
        **_COMMON,
        "model.positions": only("learned", reason=_GPT2),
        "model.gated_ffn": only(False, reason=_GPT2),
        "model.norm": only("layernorm", reason=_GPT2),
        "model.num_kv_heads": no(_GPT2),
        "model.head_size": no(_GPT2),
        "model.norm_position": only("pre", reason=_GPT2),
        "model.final_norm": only(True, reason=_GPT2),
        "model.bias": only(True, reason=_GPT2),
    },
}
"""Properties of a model family that its configuration cannot change."""


def family(shape: DecoderShape) -> Family:
    """Return the nearest family: by the norm, then by features that only OPT has."""
    if shape.norm == "rmsnorm":
        return "llama"
    return "opt" if shape.position_offset or shape.embedding_size else "gpt2"


def family_problems(shape: DecoderShape, lora: LoraSpec | None) -> Iterator[str]:
    """Yield problems that the support table cannot express: OPT's final norm, adapter layers."""
    if family(shape) == "opt" and shape.final_norm != (shape.norm_position == "pre"):
        yield f"model.final_norm {shape.final_norm}: OPT has it only with model.norm_position=pre"
    for target in lora.targets if lora else ():
        if target not in LAYERS[family(shape)]:
            yield f"lora.targets {target}: transformers' {TITLES[family(shape)]} has no such layer"


def configuration(shape: DecoderShape) -> dict[str, Any]:
    """Return the fields of the shape's transformers configuration, `model_type` first."""
    common = {
        "model_type": family(shape),
        "vocab_size": shape.padded_vocab(),
        "tie_word_embeddings": shape.tied_embeddings,
        # A padding token would get no gradient for its input positions.
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "use_cache": False,
    }
    return common | {"llama": _llama, "opt": _opt, "gpt2": _gpt2}[family(shape)](shape)


def adapters(shape: DecoderShape, lora: LoraSpec) -> dict[str, Any]:
    """Return the settings of peft's LoraConfig."""
    layers = LAYERS[family(shape)]
    return {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": [layers[target] for target in lora.targets],
    }


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
