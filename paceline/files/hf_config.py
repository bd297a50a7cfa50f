"""Hugging Face model configurations (config.json) as model shapes.

One table lists the names of each field over all families, another the structure of each family. A
configuration of an unknown family is read like a Llama if it has the fields of one. What a shape
cannot express becomes a note, and the parameters that it does not count a number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any, cast

from paceline.core.errors import UserError
from paceline.core.shape import DecoderShape
from paceline.core.units import LARGEST_INT
from paceline.files.yaml_file import validate

Config = Mapping[str, Any]
Fields = dict[str, Any]

NAMES: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_size": ("head_dim", "kv_channels"),
    "ffn_size": ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "d_ff"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "max_positions": (
        "max_position_embeddings",
        "n_positions",
        "n_ctx",
        "seq_length",
        "max_seq_len",
        "max_sequence_length",
    ),
    "norm_eps": (
        "rms_norm_eps",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "layernorm_epsilon",
        "norm_eps",
        "norm_epsilon",
    ),
    "activation": ("hidden_act", "hidden_activation", "activation_function", "activation"),
    "rope_theta": ("rope_theta", "rotary_emb_base"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
    "tied_embeddings": ("tie_word_embeddings",),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "experts_per_token", "moe_top_k", "moe_k"),
    "expert_groups": ("n_group",),
    "groups_per_token": ("topk_group",),
    "expert_ffn_size": ("moe_intermediate_size",),
    "shared_ffn_size": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "num_shared_experts": ("n_shared_experts", "num_shared_experts"),
    "first_dense_layers": ("first_k_dense_replace",),
    "mtp_layers": ("num_nextn_predict_layers",),
    "sliding_window": ("sliding_window",),
    "sliding_window_pattern": ("sliding_window_pattern", "_sliding_window_pattern"),
    "activation_limit": ("swiglu_limit",),
    "embedding_size": ("word_embed_proj_dim",),
    "query_pre_attn_scalar": ("query_pre_attn_scalar",),
    "rope_local_theta": ("rope_local_base_freq",),
    "qkv_bias": ("qkv_bias", "use_qkv_bias", "add_qkv_bias"),
    "qk_norm": ("use_qk_norm",),
}
"""Field of a shape (or of this module) and its names in config.json, in order of preference."""

_LLAMA: Fields = {
    "gated_ffn": True,
    "activation": "silu",
    "norm": "rmsnorm",
    "norm_eps": 1e-6,
    "positions": "rope",
    "bias": False,
    "tied_embeddings": False,
}
_GPT: Fields = {
    "gated_ffn": False,
    "activation": "gelu_tanh",
    "norm": "layernorm",
    "positions": "learned",
    "bias": True,
    "tied_embeddings": True,
}
_NEOX: Fields = {**_GPT, "activation": "gelu", "positions": "rope", "tied_embeddings": False}
_GEMMA: Fields = {
    **_LLAMA,
    "activation": "gelu_tanh",
    "norm_zero_centered": True,
    "scale_embedding": True,
    "tied_embeddings": True,
}
_GEMMA_2: Fields = {**_GEMMA, "norm_position": "both", "sliding_window_pattern": 2}
_GEMMA_3: Fields = {**_GEMMA_2, "qk_norm": True, "sliding_window_pattern": 6}

STRUCTURES: dict[str, Fields] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": {**_LLAMA, "qkv_bias": True},
    "qwen2_moe": {**_LLAMA, "qkv_bias": True},
    "qwen3": {**_LLAMA, "qk_norm": True},
    "qwen3_moe": {**_LLAMA, "qk_norm": True},
    "gemma": _GEMMA,
    "gemma2": _GEMMA_2,
    "gemma3": _GEMMA_3,
    "gemma3_text": _GEMMA_3,
    "phi3": _LLAMA,
    "phi": {**_NEOX, "activation": "gelu_tanh"},
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neox": _NEOX,
    "gptj": {**_NEOX, "activation": "gelu_tanh", "bias": False},
    "opt": {**_GPT, "activation": "relu", "position_offset": 2},
    "falcon": {**_NEOX, "bias": False, "tied_embeddings": True},
    "bloom": {**_GPT, "positions": "rope", "embedding_norm": True},
    "deepseek_v2": _LLAMA,
    "deepseek_v3": _LLAMA,
    "kimi_k2": _LLAMA,
    "gpt_oss": {
        **_LLAMA,
        "norm_eps": 1e-5,
        "bias": True,
        "attention_sinks": True,
        "activation_limit": 7.0,
        "up_offset": 1.0,
    },
    "olmo2": _LLAMA,
    "olmoe": _LLAMA,
    "starcoder2": {**_GPT, "positions": "rope"},
    "stablelm": {**_LLAMA, "norm": "layernorm"},
    "granite": _LLAMA,
    "smollm3": _LLAMA,
    "internlm2": _LLAMA,
    "ernie4_5": _LLAMA,
    "seed_oss": _LLAMA,
    "exaone": _LLAMA,
    "minicpm": {**_LLAMA, "tied_embeddings": True},
}
"""Fields of each `model_type` that config.json leaves to the code, with the code's defaults."""

NESTED = ("text_config", "llm_config", "language_config")
"""Keys under which a multimodal configuration has its language model."""
ACTIVATIONS = {
    "swish": "silu",
    "swiglu": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu",
}
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
REQUIRED = ("num_layers", "hidden_size", "num_heads", "ffn_size", "vocab_size")
SIZES = (
    *REQUIRED,
    "num_kv_heads",
    "head_size",
    "max_positions",
    "num_experts",
    "experts_per_token",
    "expert_groups",
    "groups_per_token",
    "expert_ffn_size",
    "shared_ffn_size",
    "num_shared_experts",
    "first_dense_layers",
    "sliding_window",
)
OF_EXPERTS = (
    "num_experts",
    "experts_per_token",
    "expert_groups",
    "groups_per_token",
    "shared_ffn_size",
    "first_dense_layers",
)
SHARED_NORM = ("phi", "gptj")
"""Families whose attention and MLP read the output of one norm."""
HEAD_BIAS = ("phi", "gptj")
FOUR_TIMES = ("gpt2", "gpt_bigcode", "gptj", "falcon", "bloom")
"""Families with an MLP of 4 x hidden_size if config.json states no width."""
HARMLESS = re.compile(
    r"""
    architectures|model_type|transformers_version|auto_map|_?name_or_path|_\w+ |
    (torch_)?dtype|fp32|bf16|fp16|quantization_config|use_cache|\w+_cache\w* |
    use_flash_attn\w*|return_dict\w*|id2label|label2id|task_specific_params |
    \w+_token_ids?|\w+_token_index|\w+_id|initializer_\w+|init_\w+|\w*dropout\w* |
    \w+_pdrop|layerdrop|summary_\w+|pretraining_tp|gradient_checkpointing\w* |
    \w*aux_loss\w*|z_loss\w*|router_\w+|output_router_logits|seq_aux|norm_topk_prob |
    scoring_func|topk_method|routed_scaling_factor|ep_size |
    original_max_position_embeddings|initial_context_length|rope_\w+|rotary_\w+ |
    no_rope_\w+|scale_\w+|\w+_multiplier|logits_scaling|logit_scale|dim_model_base |
    clip_qkv|swiglu_\w+|\w+_softcapping|max_window_layers|layer_norm_elementwise_affine
    | qk_head_dim|reorder_and_upcast_attn|attention_softmax_in_fp32 |
    (max|min|exponential_decay)_length|(length|repetition)_penalty|num_beam\w* |
    num_return_sequences|temperature|top_[kp]|typical_p
    """,
    re.VERBOSE,
)
"""Names of fields that change neither the size of a model nor its work: tokens, initialization,
dropout, losses, scalar factors and settings of generation."""
MAX_MSCALE = 100
"""Largest factor of YaRN's logarithm that is read."""
MAX_UNREAD = 8
"""Maximum number of unread fields to list."""


class _RecordingConfig(dict[str, Any]):
    """A configuration that records which of its fields are read."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.names_read = {name for names in NAMES.values() for name in names}

    def __getitem__(self, name: str) -> Any:
        self.names_read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.names_read.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names_read.add(name)
        return super().get(name, default)


@dataclass(frozen=True)
class ConfigShape:
    """Shape of a configuration, with what the shape leaves out."""

    model: Fields
    """Fields of the shape, as in a recipe."""
    notes: tuple[str, ...]
    num_uncounted: int
    """Parameters of the model minus those of the shape."""


def is_hf_config(document: Config) -> bool:
    """Return whether a document is a config.json of transformers and not a recipe."""
    marks = {"model_type", "architectures", "transformers_version", *NAMES["num_layers"]}
    return "model" not in document and not marks.isdisjoint(document)


def shape_of_config(config: Config, where: str) -> ConfigShape:
    """Return the shape of a configuration.

    Raises UserError if it is not of a decoder, or if it lacks a size.
    """
    inner, notes = _language_model(config)
    config = _RecordingConfig(inner)
    family = str(config.get("model_type") or "(none)")
    _refuse_other_kinds(config, family, where)
    structure = STRUCTURES.get(family)
    if structure is None:
        notes.append(f"model_type {family} is unknown and read like a Llama: check its parameters")
    fields = {**(structure or _LLAMA), **_named_fields(config)}
    if fields.get("ffn_size") is None and family in FOUR_TIMES and "hidden_size" in fields:
        fields["ffn_size"] = 4 * fields["hidden_size"]
    missing = [name for name in REQUIRED if fields.get(name) is None]
    if missing:
        names = "; ".join(f"{name} ({', '.join(NAMES[name])})" for name in missing)
        raise UserError(
            where,
            f"model_type {family} cannot be read as a decoder: it lacks {names}",
            allowed="decoder-only transformers, with the fields of a Llama, GPT-2, GPT-NeoX, OPT, "
            "Falcon, BLOOM or DeepSeek",
            remedy="or write a recipe with its shape (`paceline recipes tiny-llama`)",
        )
    _refuse_odd_numbers(fields, config, where)
    for part in (_activation, _attention, _windows, _rotation, _experts, _family_parts):
        part(fields, config, family, notes)
    num_uncounted, reasons = _parameter_difference(fields, config, family)
    notes += _unread_fields(config)
    shape = validate(DecoderShape, fields, where)
    if num_uncounted:
        difference = "does not count" if num_uncounted > 0 else "counts too many"
        notes.append(
            f"the shape {difference} {abs(num_uncounted):,} parameters: {', '.join(reasons)}"
        )
    return ConfigShape(
        shape.model_dump(mode="json", exclude_defaults=True), tuple(notes), num_uncounted
    )


def _language_model(config: Config) -> tuple[Config, list[str]]:
    """Return the part of a configuration that describes the language model, and a note."""
    for key in NESTED:
        if isinstance(config.get(key), dict):
            inner = {"model_type": config.get("model_type"), **config[key]}
            return inner, [f"only the language model ({key}) is counted, no encoder or adapter"]
    return config, []


def _refuse_other_kinds(config: Config, family: str, where: str) -> None:
    """Raise UserError for a model that is not a causal decoder."""
    architectures = " ".join(map(str, cast(list[Any], config.get("architectures") or [])))
    encoder = "MaskedLM" in architectures or family in ("bert", "roberta", "deberta-v2")
    if config.get("is_encoder_decoder") or encoder:
        raise UserError(
            where,
            f"model_type {family} is not a decoder",
            allowed="decoder-only language models",
        )


def _named_fields(config: Config) -> Fields:
    """Return the fields that the configuration states, by their names in a shape."""
    fields: Fields = {}
    rope = config.get("rope_parameters")
    config = {**(cast(Config, rope) if isinstance(rope, dict) else {}), **config}
    for field, names in NAMES.items():
        values = [config[name] for name in names if config.get(name) is not None]
        if values:
            fields[field] = values[0]
    return fields


def _refuse_odd_numbers(fields: Fields, config: Config, where: str) -> None:
    """Raise UserError for a size that is not a positive whole number."""
    sizes = {**{name: fields.get(name) for name in SIZES}, "rotary_dim": config.get("rotary_dim")}
    for name, value in sizes.items():
        lowest = 1 if name in REQUIRED else 0
        if value is None or (type(value) is int and lowest <= value <= LARGEST_INT):
            continue
        raise UserError(
            where,
            f"{' or '.join(NAMES.get(name, (name,)))} is {str(value)[:40]}",
            allowed=f"whole numbers up to {LARGEST_INT:,}",
        )


def _activation(fields: Fields, config: Config, family: str, notes: list[str]) -> None:
    name = str(fields["activation"])
    fields["activation"] = ACTIVATIONS.get(name, name)
    if fields["activation"] not in ("silu", "gelu", "gelu_tanh", "relu"):
        notes.append(f"activation {name} is read as gelu, which costs about the same")
        fields["activation"] = "gelu"
    if name == "relu2":
        notes.append("activation relu2 is read as relu")


def _attention(fields: Fields, config: Config, family: str, notes: list[str]) -> None:
    """Set heads, biases and latent attention."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        fields["num_kv_heads"] = 1
    elif family == "falcon" and not config.get("new_decoder_architecture"):
        fields.pop("num_kv_heads", None)
    if config.get("kv_lora_rank"):
        fields["latent_attention"] = {name: config.get(name) for name in LATENT}
        for name in ("num_kv_heads", "head_size", "qk_norm"):
            fields.pop(name, None)
    if fields.get("num_kv_heads") == fields["num_heads"]:
        fields.pop("num_kv_heads")
    biases = {name: config[name] for name in ("bias", "use_bias", "enable_bias") if name in config}
    if biases and family in ("falcon", "starcoder2", "opt"):
        fields["bias"] = all(biases.values())
    if config.get("attention_bias") and family not in ("gpt_oss", "gpt_neox"):
        fields["qkv_bias"] = True
        fields["bias"] = bool(config.get("mlp_bias")) or fields["bias"]
    if fields["bias"]:
        fields.pop("qkv_bias", None)
    if config.get("alibi") or family == "bloom":
        notes.append("ALiBi positions are read as rotary ones, which cost about the same")
    if config.get("attn_logit_softcapping") or config.get("final_logit_softcapping"):
        notes.append("soft-capping of logits is left out: its time is not estimated")


def _windows(fields: Fields, config: Config, family: str, notes: list[str]) -> None:
    """Set the attention window and the layers that have it."""
    layers, kinds = fields["num_layers"], cast(list[str], config.get("layer_types") or [])
    window, longest = fields.get("sliding_window"), fields.get("max_positions", 0)
    unused = config.get("use_sliding_window") is False or (
        kinds and "sliding_attention" not in kinds
    )
    if not isinstance(window, int) or unused or 0 < longest <= window:
        for name in ("sliding_window", "sliding_window_pattern", "rope_local_theta"):
            fields.pop(name, None)
    elif kinds:
        full = [i + 1 for i, kind in enumerate(kinds) if kind == "full_attention"]
        fields["sliding_window_pattern"] = round(layers / len(full)) if full else None
        pattern = fields["sliding_window_pattern"]
        if full != [i for i in range(1, layers + 1) if pattern and i % pattern == 0]:
            notes.append(
                f"{len(full)} of {layers} layers have full attention, in an order that the shape "
                f"reads as every {pattern}th layer"
            )
    elif config.get("use_sliding_window") and config.get("max_window_layers"):
        notes.append("max_window_layers is left out: every layer has the sliding window")
    others = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if others:
        notes.append(f"layers of type {', '.join(others)} are read as full attention")


def _rotation(fields: Fields, config: Config, family: str, notes: list[str]) -> None:
    """Set rotary settings, also those with other units than in a shape."""
    if fields["positions"] != "rope":
        for name in ("rope_theta", "partial_rotary_factor", "rope_local_theta"):
            fields.pop(name, None)
        return
    head = fields.get("head_size") or fields["hidden_size"] // fields["num_heads"]
    if config.get("rotary_dim"):
        fields["partial_rotary_factor"] = config["rotary_dim"] / head
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    scaling = cast(Config, scaling) if isinstance(scaling, dict) else {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "linear":
        fields["rope_scaling_factor"] = scaling.get("factor", 1.0)
    elif kind == "yarn" and _is_yarn_of_shape(scaling, "latent_attention" in fields):
        fields["rope_scaling_factor"] = scaling["factor"]
        fields["rope_original_positions"] = scaling["original_max_position_embeddings"]
        of_tables, of_scores = _yarn_factors(scaling)
        fields["rope_attention_factor"] = of_tables
        latent = fields.get("latent_attention", {})
        widths = [latent.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
        if of_scores != 1 and all(type(width) is int for width in widths):
            fields["query_pre_attn_scalar"] = sum(widths) / of_scores**2
    elif kind != "default":
        notes.append(f"scaling of rotary positions ({kind}) is left out; it takes no time")


def _is_yarn_of_shape(scaling: Config, latent: bool) -> bool:
    """Return whether a shape can express this YaRN scaling; with latent attention it rounds."""
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    plain = (scaling.get("beta_fast", 32), scaling.get("beta_slow", 1)) == (32, 1)
    plain &= scaling.get("truncate", True) is latent and not scaling.get("attention_factor")
    factors = [scaling.get(name, 0) for name in ("mscale", "mscale_all_dim")]
    plain &= all(isinstance(x, int | float) and 0 <= x <= MAX_MSCALE * latent for x in factors)
    is_factor = isinstance(factor, int | float) and factor > 1
    return is_factor and type(original) is int and original > 0 and plain


def _yarn_factors(scaling: Config) -> tuple[float, float]:
    """Return YaRN's factors of rotary tables and, with latent attention, of scores.

    Source: arXiv:2309.00071, section 3.3. DeepSeek's code puts mscale before the logarithm.
    """
    mscale, mscale_all_dim = scaling.get("mscale", 0), scaling.get("mscale_all_dim", 0)
    unit = 0.1 * log(scaling["factor"])
    above, below = (mscale, mscale_all_dim) if mscale and mscale_all_dim else (1, 0)
    return (above * unit + 1) / (below * unit + 1), (mscale_all_dim * unit + 1) ** 2


def _experts(fields: Fields, config: Config, family: str, notes: list[str]) -> None:
    """Set experts, shared experts and dense layers."""
    width, shared = fields.pop("expert_ffn_size", None), fields.pop("num_shared_experts", 0)
    if fields.get("num_experts", 1) <= 1:
        for name in OF_EXPERTS:
            fields.pop(name, None)
        return
    dense_width = fields["ffn_size"]
    fields["ffn_size"] = width or dense_width
    if shared:
        fields["shared_ffn_size"] = shared * fields["ffn_size"]
    if fields.get("first_dense_layers"):
        fields["dense_ffn_size"] = dense_width
    intervals = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq")
    if family in ("deepseek_v3", "kimi_k2"):
        fields["router_score"], fields["router_choice_bias"] = "sigmoid", True
        fields["router_scale"] = config.get("routed_scaling_factor") or 2.5
        fields["router_normalize"] = config.get("norm_topk_prob") is not False
    if any(config.get(name) not in (None, 1) for name in intervals) or config.get(
        "mlp_only_layers"
    ):
        notes.append("some layers have no experts, which the shape cannot express: all get them")


def _family_parts(fields: Fields, config: Config, family: str, notes: list[str]) -> None:
    """Set what only one family has."""
    parallel = {"falcon": "parallel_attn", "gpt_neox": "use_parallel_residual"}.get(family)
    if family == "opt":
        before = config.get("do_layer_norm_before", True)
        fields["norm_position"], fields["final_norm"] = ("pre" if before else "post"), bool(before)
        if fields.get("embedding_size") == fields["hidden_size"]:
            fields.pop("embedding_size")
    if family in SHARED_NORM or (parallel and config.get(parallel, True)):
        notes.append("attention and MLP run in parallel, which is timed as one after the other")
    if family == "gpt_oss":
        fields["activation"] = "quick_gelu"  # its hidden_act says silu, its code does not read it
    if family in ("olmo2", "olmoe"):
        notes.append("norms and their place differ from the shape's, at about the same time")


def _parameter_difference(fields: Fields, config: Config, family: str) -> tuple[int, list[str]]:
    """Return the parameters that the shape does not count, minus those it has too many."""
    layers, hidden, heads = fields["num_layers"], fields["hidden_size"], fields["num_heads"]
    parts: dict[str, int] = {}
    one_norm = family in SHARED_NORM or (
        family == "falcon"
        and config.get("parallel_attn", True)
        and not config.get("new_decoder_architecture")
    )
    if one_norm:
        parts["one norm per block instead of two"] = -layers * 2 * hidden
    if family in HEAD_BIAS:
        parts["bias of the head"] = fields["vocab_size"]
    if family == "gptj":
        parts["biases of the MLP"] = layers * (fields["ffn_size"] + hidden)
    if family == "qwen2_moe":
        parts["gates of shared experts"] = layers * hidden
    if family in ("deepseek_v3", "kimi_k2"):
        sparse_layers = layers - fields.get("first_dense_layers", 0)
        parts["router biases"] = sparse_layers * fields["num_experts"]
    if family in ("olmo2", "olmoe"):
        kv = fields.get("num_kv_heads") or heads
        parts["norms of queries and keys"] = layers * hidden * (heads + kv) // heads
    if config.get("attention_bias") and fields.get("qkv_bias"):
        parts["biases of attention outputs"] = layers * hidden
    return sum(parts.values()), list(parts)


def _unread_fields(config: _RecordingConfig) -> list[str]:
    """Return a note on the fields that nothing here reads and that may change size or work."""
    unread = sorted(
        name
        for name, value in config.items()
        if value and name not in config.names_read and not HARMLESS.fullmatch(name)
    )
    if not unread:
        return []
    more = f" and {len(unread) - MAX_UNREAD} more" if len(unread) > MAX_UNREAD else ""
    return [f"not read: {', '.join(unread[:MAX_UNREAD])}{more}"]
