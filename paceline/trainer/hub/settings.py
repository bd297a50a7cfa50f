"""What of a model config.json says and no tensor's size tells: compared, and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.trainer.checkpoint_reader import CorruptCheckpointError
from paceline.trainer.model_config import ModelConfig

OF_LLAMA = {
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "kv_heads",
    "hidden_act": "activation",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
    "tie_word_embeddings": "tied_embeddings",
}
SETTINGS = {
    "opt": {
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "activation_function": "activation",
        "enable_bias": "bias",
        "tie_word_embeddings": "tied_embeddings",
    },
    "gpt2": {
        "n_layer": "num_layers",
        "n_head": "num_heads",
        "activation_function": "activation",
        "layer_norm_epsilon": "norm_eps",
        "tie_word_embeddings": "tied_embeddings",
    },
    "llama": {**OF_LLAMA, "attention_bias": "bias", "mlp_bias": "bias"},
    "qwen3": {**OF_LLAMA, "attention_bias": "bias"},
    "mistral": OF_LLAMA,
}
"""What of config.json no tensor's size tells: key there, field here."""
DEFAULTS_OF_LLAMA: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "opt": {
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "enable_bias": True,
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
    },
    "llama": {**DEFAULTS_OF_LLAMA, "attention_bias": False, "mlp_bias": False},
    "qwen3": {**DEFAULTS_OF_LLAMA, "attention_bias": False},
    "mistral": DEFAULTS_OF_LLAMA,
}
"""What a key that config.json lacks means in transformers."""
MISTRAL_WINDOW = 4096
"""Of a Mistral whose config.json has no such key; null there is no window."""
OPT_EPS = 1e-5
"""Of OPT's norms; its config.json has no key for it."""
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}

SPELLINGS = {"gelu_tanh": "gelu_new"}
ARCHITECTURES = {
    "opt": "OPTForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
OPTIONS: dict[str, Any] = {
    "norm_zero_centered": False,
    "qk_norm": False,
    "rope_local_theta": None,
    "rope_scaling_factor": 1.0,
    "rope_attention_factor": 1.0,
    "partial_rotary_factor": 1.0,
    "sliding_window": None,
    "sliding_window_pattern": None,
    "query_pre_attn_scalar": None,
    "scale_embedding": False,
}
"""What a family has none of, if its structure does not say otherwise."""
PLAIN = {
    **OPTIONS,
    "norm": "layernorm",
    "positions": "learned",
    "gated_ffn": False,
    "embedding_norm": False,
}
STRUCTURE_OF_LLAMA: dict[str, Any] = {
    **OPTIONS,
    "norm": "rmsnorm",
    "norm_position": "pre",
    "final_norm": True,
    "positions": "rope",
    "gated_ffn": True,
    "embedding_norm": False,
}
STRUCTURES: dict[str, dict[str, Any]] = {
    "llama": STRUCTURE_OF_LLAMA,
    "qwen3": {**STRUCTURE_OF_LLAMA, "qk_norm": True, "bias": False},
    "mistral": {
        **{name: value for name, value in STRUCTURE_OF_LLAMA.items() if name != "sliding_window"},
        "bias": False,
    },
    "opt": {**PLAIN, "position_offset": 2},
    "gpt2": {
        **PLAIN,
        "position_offset": 0,
        "norm_position": "pre",
        "final_norm": True,
        "bias": True,
    },
}
"""What a model of a family always is."""
SIZES_OF_LLAMA = {
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_size",
    "max_position_embeddings": "max_positions",
    "head_dim": "head_dim",
    "attention_dropout": "attention_dropout_p",
}
SIZES = {
    "opt": {
        "hidden_size": "hidden_size",
        "word_embed_proj_dim": "embed_dim",
        "ffn_dim": "ffn_size",
        "max_position_embeddings": "max_positions",
        "dropout": "dropout",
        "attention_dropout": "attention_dropout_p",
    },
    "gpt2": {
        "n_embd": "hidden_size",
        "n_inner": "ffn_size",
        "n_positions": "max_positions",
        "resid_pdrop": "dropout",
        "embd_pdrop": "dropout",
        "attn_pdrop": "attention_dropout_p",
    },
    **dict.fromkeys(("llama", "qwen3", "mistral"), SIZES_OF_LLAMA),
}
"""Further keys of config.json, and what this program has for them: key there, field here."""


def differences(config: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """Where a folder's model computes otherwise than this one, one sentence each."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in SETTINGS:
        return [f"its model_type is {family}; use one of {', '.join(SETTINGS)}"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        return [f"its rope_scaling is {rope}, which is no object"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    problems = [f"its positions are scaled ({kind}), which is not here"] * (kind != "default")
    stated = {key: value for key, value in {**rope, **config}.items() if value is not None}
    values = {**DEFAULTS[family], **stated}
    for theirs, ours in SETTINGS[family].items():
        value, here = values.get(theirs), getattr(model, ours)
        value = ACTIVATIONS.get(value, value) if isinstance(value, str) else value
        if value is not None and value != here:
            problems.append(f"its {theirs} is {values[theirs]}, and model.{ours} is {here}")
    problems += _differences_of_opt(family, values, model) + _scales_of_gpt2(family, values)
    return problems + _options_beyond(family, model) + _other_windows(family, config, model)


def _options_beyond(family: str, model: ModelConfig) -> list[str]:
    """Options of the model that no tensor of a folder of this family would show."""
    return [
        f"model.{name} is {getattr(model, name)}, which a {family} does not have"
        for name, value in STRUCTURES[family].items()
        if name in OPTIONS and getattr(model, name) != value
    ]


def _other_windows(family: str, config: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """Where a folder's layers attend to another part of the past."""
    if family == "qwen3" and config.get("use_sliding_window"):
        return ["its use_sliding_window is True, which is not here"]
    window = config.get("sliding_window", MISTRAL_WINDOW) if family == "mistral" else None
    if family != "mistral" or window == model.sliding_window:
        return []
    return [f"its sliding_window is {window}, and model.sliding_window is {model.sliding_window}"]


def _differences_of_opt(family: str, values: Mapping[str, Any], model: ModelConfig) -> list[str]:
    if family != "opt":
        return []
    problems: list[str] = []
    if model.norm_eps != OPT_EPS:
        problems.append(f"its norms' eps is {OPT_EPS}, and model.norm_eps is {model.norm_eps}")
    if values["do_layer_norm_before"] != (model.norm_position == "pre"):
        problems.append(f"model.norm_position is {model.norm_position}, and there the other")
    return problems


def _scales_of_gpt2(family: str, values: Mapping[str, Any]) -> list[str]:
    """Attention that is divided by other than the root of a head's width."""
    keys = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx") if family == "gpt2" else ()
    return [
        f"its {key} is {values[key]}, which is not here"
        for key in keys
        if values[key] != DEFAULTS["gpt2"][key]
    ]


def family_of(model: ModelConfig) -> str:
    """The family that a model is of; raises CorruptCheckpointError with why it is of none."""
    reasons: list[str] = []
    for family, structure in STRUCTURES.items():
        problems = [
            f"{name} {getattr(model, name)}"
            for name, value in structure.items()
            if getattr(model, name) != value
        ]
        problems = problems or differences(hub_settings(family, model), model)
        problems = problems or _other_sizes(family, model)
        if not problems:
            return family
        reasons.append(f"no {family} for its {', '.join(problems)}")
    raise CorruptCheckpointError(f"the hub's form has no such model: {'; '.join(reasons)}")


def _other_sizes(family: str, model: ModelConfig) -> list[str]:
    """What no key of a family's config.json can say."""
    if family in ("llama", "qwen3", "mistral"):
        return [] if model.embed_dim == model.hidden_size else ["embedding_size"]
    problems = ["num_kv_heads"] if model.kv_heads != model.num_heads else []
    if model.head_dim * model.num_heads != model.hidden_size:
        problems.append("head_size")
    if family == "gpt2" and model.embed_dim != model.hidden_size:
        problems.append("embedding_size")
    if family == "opt" and model.final_norm != (model.norm_position == "pre"):
        problems.append("final_norm")
    return problems


def hub_settings(family: str, model: ModelConfig) -> dict[str, Any]:
    """config.json of a model of a family, without its dtype; ids of tokens are not known."""
    settings: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **hub_sizes(family, model),
    }
    for theirs, ours in SETTINGS[family].items():
        value = getattr(model, ours)
        settings[theirs] = SPELLINGS.get(value, value) if ours == "activation" else value
    if family == "opt":
        settings["do_layer_norm_before"] = model.norm_position == "pre"
    if family == "mistral":
        settings["sliding_window"] = model.sliding_window
    return settings


def hub_sizes(family: str, model: ModelConfig) -> dict[str, Any]:
    """What of it the tensors' sizes follow from."""
    sizes = {theirs: getattr(model, ours) for theirs, ours in SIZES[family].items()}
    return {"vocab_size": model.vocab_size, **sizes}
