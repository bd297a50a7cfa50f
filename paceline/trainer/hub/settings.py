"""Settings in config.json that tensor sizes do not show: comparing and writing them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from math import isclose, log
from typing import Any

from paceline.trainer.checkpoint_reader import CorruptCheckpointError
from paceline.trainer.hub.names import EXPERTS
from paceline.trainer.model.attention import YARN_TURNS
from paceline.trainer.model.layers import QUICK_GELU_RATE
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
    "mixtral": {
        **OF_LLAMA,
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
    },
    "qwen3_moe": {
        **OF_LLAMA,
        "attention_bias": "bias",
        "num_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "norm_topk_prob": "router_normalize",
    },
    "deepseek_v3": {
        **OF_LLAMA,
        "attention_bias": "bias",
        "n_routed_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "n_group": "expert_groups",
        "topk_group": "groups_per_token",
        "first_k_dense_replace": "first_dense_layers",
        "norm_topk_prob": "router_normalize",
        "routed_scaling_factor": "router_scale",
    },
    "gpt_oss": {
        **{theirs: ours for theirs, ours in OF_LLAMA.items() if theirs != "hidden_act"},
        "attention_bias": "bias",
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "swiglu_limit": "activation_limit",
        "sliding_window": "sliding_window",
    },
}
"""Keys of config.json that tensor sizes do not show, and the trainer's field of each."""
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
    "mixtral": {
        **DEFAULTS_OF_LLAMA,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        **DEFAULTS_OF_LLAMA,
        "attention_bias": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    "deepseek_v3": {
        **DEFAULTS_OF_LLAMA,
        "attention_bias": False,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "gpt_oss": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "swiglu_alpha": QUICK_GELU_RATE,
        "sliding_window": 128,
    },
}
"""Values in transformers of keys that are missing in config.json."""
NEWER_KEYS = {"qwen3_moe": {"num_local_experts": "num_experts"}}
"""Keys that transformers 5 writes, and those that the published folders have."""
YARN_OF_GPT_OSS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": YARN_TURNS[0],
    "beta_slow": YARN_TURNS[1],
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Scaling of positions of a gpt-oss without a key for it."""
UNSTATED_YARN = {"beta_fast": YARN_TURNS[0], "beta_slow": YARN_TURNS[1], "truncate": True}
"""Values in transformers of keys that are missing in such a scaling."""
MISTRAL_WINDOW = 4096
"""Window of a Mistral whose config.json lacks this key; null means no window."""
BLOCK_FAMILIES = ("llama", "qwen3", "mistral", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
"""Families that share Llama's blocks."""
CONSTANTS = {
    "gpt2": ("scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
    "gpt_oss": ("swiglu_alpha",),
}
"""Keys of which only the default is supported."""
OPT_EPS = 1e-5
"""Epsilon of OPT's norms; its config.json has no key for it."""
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}

SPELLINGS = {"gelu_tanh": "gelu_new"}
ARCHITECTURES = {
    "opt": "OPTForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
OPTIONS: dict[str, Any] = {
    "norm_zero_centered": False,
    "qkv_bias": False,
    "qk_norm": False,
    "rope_local_theta": None,
    "rope_scaling_factor": 1.0,
    "rope_original_positions": None,
    "rope_attention_factor": 1.0,
    "partial_rotary_factor": 1.0,
    "sliding_window": None,
    "sliding_window_pattern": None,
    "attention_sinks": False,
    "activation_limit": None,
    "up_offset": 0.0,
    "query_pre_attn_scalar": None,
    "scale_embedding": False,
    "latent_attention": None,
    "num_experts": 1,
    "expert_groups": 1,
    "shared_ffn_size": 0,
    "first_dense_layers": 0,
    "router_score": "softmax",
    "router_normalize": True,
    "router_scale": 1.0,
    "router_choice_bias": False,
    "mtp_layers": 0,
}
"""Options that a family does not have, unless its structure sets them."""
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
STRUCTURE_OF_EXPERTS = {
    name: value for name, value in STRUCTURE_OF_LLAMA.items() if name != "num_experts"
}
SCALED_POSITIONS = ("rope_scaling_factor", "rope_original_positions", "rope_attention_factor")
FIELDS_OF_DEEPSEEK_V3 = (
    "latent_attention",
    "expert_groups",
    "shared_ffn_size",
    "first_dense_layers",
    "router_normalize",
    "router_scale",
    *SCALED_POSITIONS,
    "query_pre_attn_scalar",
    "mtp_layers",
)
OPTIONS_OF_GPT_OSS = ("activation_limit", "sliding_window", *SCALED_POSITIONS)
"""Options that its config.json states."""
STRUCTURES: dict[str, dict[str, Any]] = {
    "llama": STRUCTURE_OF_LLAMA,
    "qwen3": {**STRUCTURE_OF_LLAMA, "qk_norm": True, "bias": False},
    "mistral": {
        **{name: value for name, value in STRUCTURE_OF_LLAMA.items() if name != "sliding_window"},
        "bias": False,
    },
    "mixtral": {**STRUCTURE_OF_EXPERTS, "bias": False},
    "qwen3_moe": {
        **{k: v for k, v in STRUCTURE_OF_EXPERTS.items() if k != "router_normalize"},
        "qk_norm": True,
        "bias": False,
    },
    "deepseek_v3": {
        **{k: v for k, v in STRUCTURE_OF_EXPERTS.items() if k not in FIELDS_OF_DEEPSEEK_V3},
        "router_score": "sigmoid",
        "router_choice_bias": True,
        "bias": False,
    },
    "gpt_oss": {
        **{k: v for k, v in STRUCTURE_OF_EXPERTS.items() if k not in OPTIONS_OF_GPT_OSS},
        "activation": "quick_gelu",
        "up_offset": 1.0,
        "attention_sinks": True,
        "sliding_window_pattern": 2,
        "bias": True,
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
"""Fixed fields of each model family."""
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
    **dict.fromkeys(("llama", "qwen3", "mistral", "mixtral", "gpt_oss"), SIZES_OF_LLAMA),
    "qwen3_moe": {**SIZES_OF_LLAMA, "moe_intermediate_size": "ffn_size"},
    "deepseek_v3": {
        **{theirs: ours for theirs, ours in SIZES_OF_LLAMA.items() if theirs != "head_dim"},
        "moe_intermediate_size": "ffn_size",
    },
}
"""Keys of config.json for sizes and dropout, and the trainer's field of each."""


def differences(config: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """Return the settings in which a folder's model differs from `model`, one sentence each."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in SETTINGS:
        return [f"its model_type is {family}; use one of {', '.join(SETTINGS)}"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        return [f"its rope_scaling is {rope}, which is not an object"]
    problems = _other_positions(family, rope, model)
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else ""
        problems.append(f"its weights are quantized ({method}); save them in bf16")
    non_null = {key: value for key, value in {**rope, **config}.items() if value is not None}
    for newer, name in NEWER_KEYS.get(family, {}).items():
        if newer in non_null:
            non_null.setdefault(name, non_null[newer])
    values = {**DEFAULTS[family], **non_null}
    for theirs, ours in SETTINGS[family].items():
        value, expected = values.get(theirs), getattr(model, ours)
        value = ACTIVATIONS.get(value, value) if isinstance(value, str) else value
        if value is not None and value != expected:
            problems.append(f"its {theirs} is {values[theirs]}, but model.{ours} is {expected}")
    problems += _differences_of_opt(family, values, model) + _other_constants(family, values)
    return problems + _options_beyond(family, model) + _other_windows(family, config, model)


def _other_positions(family: str, rope: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """Return a sentence for each setting in which a folder scales positions otherwise."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not STRUCTURES[family].keys().isdisjoint(SCALED_POSITIONS):
        scaled = f"its positions are scaled ({kind}), which is not supported"
        return [scaled] * (kind != "default")
    # transformers scales a gpt-oss by default.
    defaults = YARN_OF_GPT_OSS if family == "gpt_oss" and not rope else {}
    values = {**UNSTATED_YARN, **rope, "rope_type": kind, **defaults}
    problems = [
        f"its rope_scaling has {name} {values.get(name)}, but the model needs {value}"
        for name, value in _rope_scaling(model).items()
        if values.get(name) != value
    ]
    return problems or _other_yarn_factors(family, values, model)


def _rope_scaling(model: ModelConfig) -> dict[str, Any]:
    """Return how a model scales positions, as in config.json, without YaRN's other factors."""
    factor, original = model.rope_scaling_factor, model.rope_original_positions
    if original is None:
        linear = {"rope_type": "linear", "factor": factor}
        return {"rope_type": "default"} if factor == 1 else linear
    return {
        "rope_type": "yarn",
        "factor": factor,
        **dict(zip(("beta_fast", "beta_slow"), YARN_TURNS, strict=True)),
        "truncate": model.rounds_yarn,
        "original_max_position_embeddings": original,
    }


def _other_yarn_factors(family: str, values: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """Return a sentence for each factor of rotary tables and scores that is another one.

    The tables' factor is attention_factor if stated, else a quotient of `_yarn_growth`. DeepSeek
    V3 multiplies scores by the square of the growth of mscale_all_dim.
    """
    mscale, mscale_all_dim, explicit = (
        values.get(name) or 0 for name in ("mscale", "mscale_all_dim", "attention_factor")
    )
    if not all(isinstance(x, int | float) for x in (mscale, mscale_all_dim, explicit)):
        return ["its rope_scaling has a factor that is not a number"]
    scaled = values["rope_type"] == "yarn"
    above, below = (mscale, mscale_all_dim) if mscale and mscale_all_dim else (1, 0)
    tables, base = _yarn_growth(model, above), _yarn_growth(model, below)
    if explicit or not scaled:
        tables, base = explicit if scaled else 1, 1
    of_scores = _yarn_growth(model, mscale_all_dim) ** 2 if family == "deepseek_v3" else 1
    problems: list[str] = []
    if not isclose(model.rope_attention_factor * base, tables):
        problems.append("model.rope_attention_factor is not that of its rope_scaling")
    if not isclose(model.query_scale, of_scores):
        problems.append("model.query_pre_attn_scalar is not that of its rope_scaling")
    return problems


def _yarn_growth(model: ModelConfig, mscale: float) -> float:
    """Return YaRN's factor (arXiv:2309.00071, section 3.3), with DeepSeek's factor `mscale`."""
    return 0.1 * mscale * log(max(model.rope_scaling_factor, 1)) + 1


def _yarn_factors(model: ModelConfig) -> dict[str, float]:
    """Return the keys of config.json for the factors of a DeepSeek V3 with YaRN."""
    growth, unit = model.query_scale**0.5, _yarn_growth(model, 1) - 1
    above = model.rope_attention_factor * growth
    return {
        "attention_factor": model.rope_attention_factor,
        "mscale": round((above - 1) / unit, 12),
        "mscale_all_dim": round((growth - 1) / unit, 12),
    }


def _options_beyond(family: str, model: ModelConfig) -> list[str]:
    """Return the model's options that no tensor of a folder of this family would show."""
    return [
        f"model.{name} is {getattr(model, name)}, which a {family} does not have"
        for name, value in STRUCTURES[family].items()
        if name in OPTIONS and getattr(model, name) != value
    ]


def _other_windows(family: str, config: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """Return a sentence if the folder's layers use another attention window."""
    if family == "mixtral" and config.get("sliding_window"):
        return [f"its sliding_window is {config['sliding_window']}, which is not supported"]
    if family == "qwen3_moe" and (
        config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1
    ):
        return ["some of its layers have no experts (mlp_only_layers), which is not supported"]
    if family in ("qwen3", "qwen3_moe") and config.get("use_sliding_window"):
        return ["its use_sliding_window is True, which is not supported"]
    if family == "deepseek_v3" and config.get("rope_interleave") is False:
        return ["its rope_interleave is False, which is not supported"]
    kinds = config.get("layer_types") if family == "gpt_oss" else None
    full = [
        "full_attention" if model.window(i) is None else "sliding_attention"
        for i in range(model.num_layers)
    ]
    if kinds is not None and kinds != full:
        return ["its layer_types are not those of every second layer with a window"]
    window = config.get("sliding_window", MISTRAL_WINDOW) if family == "mistral" else None
    if family != "mistral" or window == model.sliding_window:
        return []
    return [f"its sliding_window is {window}, but model.sliding_window is {model.sliding_window}"]


def _differences_of_opt(family: str, values: Mapping[str, Any], model: ModelConfig) -> list[str]:
    if family != "opt":
        return []
    problems: list[str] = []
    if model.norm_eps != OPT_EPS:
        problems.append(f"its norms' eps is {OPT_EPS}, but model.norm_eps is {model.norm_eps}")
    if values["do_layer_norm_before"] != (model.norm_position == "pre"):
        problems.append(
            f"its do_layer_norm_before is {values['do_layer_norm_before']}, but "
            f"model.norm_position is {model.norm_position}"
        )
    return problems


def _other_constants(family: str, values: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each key whose default value is the only supported one."""
    return [
        f"its {key} is {values[key]}, which is not supported"
        for key in CONSTANTS.get(family, ())
        if values[key] != DEFAULTS[family][key]
    ]


def family_of(model: ModelConfig) -> str:
    """Return a model's family; raises CorruptCheckpointError with the reasons if it has none."""
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
        reasons.append(f"not {family}: {', '.join(problems)}")
    raise CorruptCheckpointError(f"no Hugging Face format fits this model: {'; '.join(reasons)}")


def _other_sizes(family: str, model: ModelConfig) -> list[str]:
    """Return the model's sizes that no key of a family's config.json can express."""
    if family in EXPERTS and model.num_experts == 1:
        return ["num_experts"]
    if family == "deepseek_v3":
        if model.latent_attention is None:
            return ["latent_attention None"]
        if not model.shared_ffn_size or model.shared_ffn_size % model.ffn_size:
            return [f"shared_ffn_size {model.shared_ffn_size}"]
    if family in BLOCK_FAMILIES:
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
    """Return config.json of a family's model, without its dtype; token ids are unknown."""
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
    scaled = model.rope_scaling_factor != 1
    if family == "gpt_oss" or (family == "deepseek_v3" and scaled):
        settings["rope_scaling"] = _rope_scaling(model)
    if family == "deepseek_v3" and model.rope_original_positions is not None:
        settings["rope_scaling"] |= _yarn_factors(model)
    return settings


def hub_sizes(family: str, model: ModelConfig) -> dict[str, Any]:
    """Return the part of config.json that determines the tensors' sizes."""
    sizes = {theirs: getattr(model, ours) for theirs, ours in SIZES[family].items()}
    if family == "deepseek_v3":
        sizes |= asdict(model.latent_attention) if model.latent_attention else {}
        sizes["n_shared_experts"] = model.shared_ffn_size // model.ffn_size
        sizes["intermediate_size"] = model.dense_ffn_size or model.ffn_size
        # Without this key transformers expects one such layer.
        sizes["num_nextn_predict_layers"] = model.mtp_layers
    return {"vocab_size": model.vocab_size, **sizes}
