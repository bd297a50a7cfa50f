"""The same models as other libraries build them, and the place of each weight in them.

transformers has OPT, GPT-2, Llama and its kin, peft the adapters. Also the plain side of
benchmarks/workloads_vs_peers.py.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

COMMON: dict[str, Any] = {
    # A padding token would get no gradient from its place in the input.
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "use_cache": False,
}

OPT = {
    "embedding": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "project_in": "model.decoder.project_in",
    "project_out": "model.decoder.project_out",
    "final_norm": "model.decoder.final_layer_norm",
    "blocks": "model.decoder.layers",
    "attention_norm": "self_attn_layer_norm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.out_proj",
    "ffn_norm": "final_layer_norm",
    "ffn.up": "fc1",
    "ffn.down": "fc2",
}
LLAMA = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
HEAD_NORMS = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
QWEN3 = {**LLAMA, **HEAD_NORMS}
GEMMA3 = {
    **QWEN3,
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
EXPERTS = {
    "ffn.router": "mlp.gate",
    "ffn.experts.gate": "mlp.experts.gate_up_proj",
    "ffn.experts.up": "mlp.experts.gate_up_proj",
    "ffn.experts.down": "mlp.experts.down_proj",
}
MIXTRAL = {name: place for name, place in LLAMA.items() if "ffn." not in name} | EXPERTS
QWEN3_MOE = {**MIXTRAL, **HEAD_NORMS}
DEEPSEEK_V3 = {
    **LLAMA,
    **EXPERTS,
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_latent_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_latent_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
    "ffn.shared.gate": "mlp.shared_experts.gate_proj",
    "ffn.shared.up": "mlp.shared_experts.up_proj",
    "ffn.shared.down": "mlp.shared_experts.down_proj",
}
"""The first layers have an MLP, the others experts."""
GPT_OSS = {
    **MIXTRAL,
    "attention.sinks": "self_attn.sinks",
    "ffn.router": "mlp.router",
    "ffn.experts.gate_bias": "mlp.experts.gate_up_proj_bias",
    "ffn.experts.up_bias": "mlp.experts.gate_up_proj_bias",
    "ffn.experts.down_bias": "mlp.experts.down_proj_bias",
}
"""Its experts' matrices are (in, out), with gate and up by turns."""
PHI3 = {
    **LLAMA,
    "attention.q": "self_attn.qkv_proj",
    "attention.k": "self_attn.qkv_proj",
    "attention.v": "self_attn.qkv_proj",
    "ffn.gate": "mlp.gate_up_proj",
    "ffn.up": "mlp.gate_up_proj",
}
"""One matrix for queries, keys and values, one for the ffn's gate and its other half."""
GPT2 = {
    "embedding": "transformer.wte",
    "embedding_norm": "transformer.wte.norm",
    "positions": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "blocks": "transformer.h",
    "attention_norm": "ln_1",
    "attention.q": "attn.c_attn",
    "attention.k": "attn.c_attn",
    "attention.v": "attn.c_attn",
    "attention.o": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn.up": "mlp.c_fc",
    "ffn.down": "mlp.c_proj",
}
"""Its layers of blocks keep their matrices the other way round, and q, k, v in one of them."""


class NormedEmbedding(nn.Embedding):
    """Token vectors behind a norm, as Megatron-DeepSpeed's `--embed-layernorm` puts it."""

    def __init__(self, vocab: int, width: int, eps: float) -> None:
        super().__init__(vocab, width)
        self.norm = nn.LayerNorm(width, eps)

    def forward(self, input: Tensor) -> Tensor:
        """(B, T) -> (B, T, H)."""
        return self.norm(super().forward(input))


def build(content: Mapping[str, Any]) -> nn.Module:
    """The peer of a trainer.json: model and adapters, without dropout outside of the adapters."""
    model, lora = content["model"], content["lora"]
    peer = PEERS[family(model)](model)
    return peer if lora is None else adapted(peer, lora, model)


def names(model: Mapping[str, Any]) -> dict[str, str]:
    """Names of the peer's layers by those of the native model."""
    return PLACES[family(model)]


def family(model: Mapping[str, Any]) -> str:
    """Which of the peers has the same structure."""
    if model["norm"] == "rmsnorm":
        return _kin_of_llama(model)
    return "opt" if model["activation"] == "relu" else "gpt2"


def _kin_of_llama(model: Mapping[str, Any]) -> str:
    """By what only one of them has."""
    if model["latent_attention"]:
        return "deepseek_v3"
    if model["attention_sinks"]:
        return "gpt_oss"
    if model["num_experts"] > 1:
        return "qwen3_moe" if model["qk_norm"] else "mixtral"
    if model["qk_norm"]:
        return "gemma3" if model["norm_zero_centered"] else "qwen3"
    if model["partial_rotary_factor"] < 1:
        return "phi3"
    if model["qkv_bias"]:
        return "qwen2"
    return "llama" if model["sliding_window"] is None else "mistral"


def opt(model: Mapping[str, Any]) -> PreTrainedModel:
    """An OPT; its norms' eps is 1e-5 and cannot be set."""
    assert model["norm_eps"] == 1e-5 and model["position_offset"] == 2
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=model["padded_vocab"],
            hidden_size=model["hidden_size"],
            ffn_dim=model["ffn_size"],
            num_hidden_layers=model["num_layers"],
            num_attention_heads=model["num_heads"],
            max_position_embeddings=model["max_positions"],
            word_embed_proj_dim=model["embedding_size"],
            do_layer_norm_before=model["norm_position"] == "pre",
            _remove_final_layer_norm=not model["final_norm"],
            dropout=0.0,
            **COMMON,
        )
    )


def llama(model: Mapping[str, Any]) -> PreTrainedModel:
    """A Llama with plain rotary positions."""
    return LlamaForCausalLM(LlamaConfig(head_dim=model["head_size"], **_like_llama(model)))


def qwen2(model: Mapping[str, Any]) -> PreTrainedModel:
    """A Qwen2, with biases at queries, keys and values alone."""
    return Qwen2ForCausalLM(Qwen2Config(**_like_llama(model)))


def qwen3(model: Mapping[str, Any]) -> PreTrainedModel:
    """A Qwen3."""
    return Qwen3ForCausalLM(Qwen3Config(head_dim=model["head_size"], **_like_llama(model)))


def mistral(model: Mapping[str, Any]) -> PreTrainedModel:
    """A Mistral with a window in every layer."""
    window = model["sliding_window"]
    return MistralForCausalLM(MistralConfig(sliding_window=window, **_like_llama(model)))


def mixtral(model: Mapping[str, Any]) -> PreTrainedModel:
    """A Mixtral, whose experts run one after the other, in any dtype."""
    sizes = {
        "num_local_experts": model["num_experts"],
        "num_experts_per_tok": model["experts_per_token"],
        "experts_implementation": "eager",
    }
    return MixtralForCausalLM(MixtralConfig(**sizes, **_like_llama(model)))


def qwen3_moe(model: Mapping[str, Any]) -> PreTrainedModel:
    """A Qwen3 with experts."""
    sizes = {
        "head_dim": model["head_size"],
        "moe_intermediate_size": model["ffn_size"],
        "num_experts": model["num_experts"],
        "num_experts_per_tok": model["experts_per_token"],
        "norm_topk_prob": model["router_normalize"],
        "experts_implementation": "eager",
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **_like_llama(model)))


def deepseek_v3(model: Mapping[str, Any]) -> PreTrainedModel:
    """A DeepSeek V3, or one whose queries are not compressed."""
    sizes = {
        **model["latent_attention"],
        "intermediate_size": model["dense_ffn_size"],
        "moe_intermediate_size": model["ffn_size"],
        "n_routed_experts": model["num_experts"],
        "num_experts_per_tok": model["experts_per_token"],
        "n_group": model["expert_groups"],
        "topk_group": model["groups_per_token"],
        "n_shared_experts": model["shared_ffn_size"] // model["ffn_size"],
        "first_k_dense_replace": model["first_dense_layers"],
        "norm_topk_prob": model["router_normalize"],
        "routed_scaling_factor": model["router_scale"],
        "experts_implementation": "eager",
        # Its other kernels multiply in fp32.
        "attn_implementation": "eager",
    }
    if model["rope_original_positions"]:
        sizes["rope_parameters"] = {
            "rope_type": "yarn",
            "rope_theta": model["rope_theta"],
            "factor": model["rope_scaling_factor"],
            "original_max_position_embeddings": model["rope_original_positions"],
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
        }
    return DeepseekV3ForCausalLM(DeepseekV3Config(**{**_like_llama(model), **sizes}))


def gpt_oss(model: Mapping[str, Any]) -> PreTrainedModel:
    """A gpt-oss with YaRN positions, whose other factor follows from the first."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": model["rope_theta"],
        "factor": model["rope_scaling_factor"],
        "original_max_position_embeddings": model["rope_original_positions"],
        "truncate": False,
    }
    return GptOssForCausalLM(
        GptOssConfig(
            **{**_like_llama(model), "rope_parameters": rope},
            head_dim=model["head_size"],
            num_local_experts=model["num_experts"],
            num_experts_per_tok=model["experts_per_token"],
            sliding_window=model["sliding_window"],
            swiglu_limit=model["activation_limit"],
            experts_implementation="eager",
            attn_implementation="eager",
        )
    )


def gemma3(model: Mapping[str, Any]) -> PreTrainedModel:
    """The decoder of a Gemma 3, whose layers with a window have a rotary base of their own."""
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": model["rope_local_theta"]},
        "full_attention": {
            "rope_type": "linear",
            "rope_theta": model["rope_theta"],
            "factor": model["rope_scaling_factor"],
        },
    }
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **{**_like_llama(model), "rope_parameters": rope},
            head_dim=model["head_size"],
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=model["query_pre_attn_scalar"],
            sliding_window=model["sliding_window"],
            sliding_window_pattern=model["sliding_window_pattern"],
        )
    )


def phi3(model: Mapping[str, Any]) -> PreTrainedModel:
    """A Phi-4-mini within the length of its first training, where LongRoPE scales by one number."""
    original = model["max_positions"]
    turned = model["hidden_size"] // model["num_heads"] * model["partial_rotary_factor"]
    rope = {
        "rope_type": "longrope",
        "rope_theta": model["rope_theta"],
        "partial_rotary_factor": model["partial_rotary_factor"],
        "short_factor": [1.0] * int(turned // 2),
        "long_factor": [32.0] * int(turned // 2),
        "attention_factor": model["rope_attention_factor"],
        "original_max_position_embeddings": original,
    }
    sizes = {**_like_llama(model), "rope_parameters": rope}
    return Phi3ForCausalLM(Phi3Config(**sizes, original_max_position_embeddings=original))


def _like_llama(model: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that all relatives of Llama share."""
    return {
        "vocab_size": model["padded_vocab"],
        "hidden_size": model["hidden_size"],
        "intermediate_size": model["ffn_size"],
        "num_hidden_layers": model["num_layers"],
        "num_attention_heads": model["num_heads"],
        "num_key_value_heads": model["num_kv_heads"] or model["num_heads"],
        "max_position_embeddings": model["max_positions"],
        "rope_parameters": {"rope_type": "default", "rope_theta": model["rope_theta"]},
        "rms_norm_eps": model["norm_eps"],
        "tie_word_embeddings": model["tied_embeddings"],
        **COMMON,
    }


def gpt2(model: Mapping[str, Any]) -> PreTrainedModel:
    """A GPT-2 with the exact GELU, which its own tanh form only comes near to."""
    peer = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=model["padded_vocab"],
            n_embd=model["hidden_size"],
            n_inner=model["ffn_size"],
            n_layer=model["num_layers"],
            n_head=model["num_heads"],
            n_positions=model["max_positions"],
            layer_norm_epsilon=model["norm_eps"],
            activation_function=model["activation"],
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **COMMON,
        )
    )
    if model["embedding_norm"]:
        sizes = model["padded_vocab"], model["hidden_size"], model["norm_eps"]
        peer.transformer.wte = NormedEmbedding(*sizes)
        peer.lm_head.weight = peer.transformer.wte.weight
        nn.init.normal_(peer.lm_head.weight, std=0.02)
    return peer


PEERS = {
    "opt": opt,
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mistral": mistral,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "deepseek_v3": deepseek_v3,
    "gpt_oss": gpt_oss,
    "gemma3": gemma3,
    "phi3": phi3,
    "gpt2": gpt2,
}
PLACES = {
    "opt": OPT,
    "llama": LLAMA,
    "qwen2": LLAMA,
    "qwen3": QWEN3,
    "mistral": LLAMA,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "deepseek_v3": DEEPSEEK_V3,
    "gpt_oss": GPT_OSS,
    "gemma3": GEMMA3,
    "phi3": PHI3,
    "gpt2": GPT2,
}


def adapted(peer: PreTrainedModel, lora: Mapping[str, Any], model: Mapping[str, Any]) -> nn.Module:
    """The peer with peft's adapters; with `train_rest` all but the adapted weights train."""
    from peft import LoraConfig, get_peft_model

    places = names(model)
    targets = [
        places[f"{part}.{layer}"]
        for part in ("attention", "ffn")
        for layer in lora["targets"]
        if f"{part}.{layer}" in places
    ]
    config = LoraConfig(
        r=lora["rank"],
        lora_alpha=lora["alpha"],
        lora_dropout=lora["dropout"],
        # A name alone would also fit the norm behind the last block, say.
        target_modules=(
            rf"{re.escape(places['blocks'])}\.\d+\."
            rf"({'|'.join(map(re.escape, targets))})"
        ),
        fan_in_fan_out=family(model) == "gpt2",
    )
    with warnings.catch_warnings():
        # peft 0.21 asks transformers 5.23 by a name that is going away.
        warnings.simplefilter("ignore", FutureWarning)
        with_adapters = get_peft_model(peer, config)
    if lora["train_rest"]:
        for name, parameter in with_adapters.named_parameters():
            parameter.requires_grad_(not name.endswith("base_layer.weight"))
    return with_adapters


def weights_of(model: Mapping[str, Any], named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A peer's tensors (parameters or gradients) by the native names, in the native form; views."""
    plain = {name.removeprefix("base_model.model."): tensor for name, tensor in named.items()}
    found: dict[str, Tensor] = {}
    for ours, theirs in _layers(model):
        if theirs in plain:
            found[ours] = _of_experts(family(model), ours, plain[theirs])
        for kind, tensor in _of_layer(plain, theirs):
            found[f"{ours}.{kind}"] = _native_form(model, ours, kind, tensor)
    return found


def _layers(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(native, peer) names of all layers that hold parameters; some do not exist in a model."""
    places = names(model)
    inner = {
        ours: theirs for ours, theirs in places.items() if ours.endswith("_norm") or "." in ours
    }
    outer = [(ours, theirs) for ours, theirs in places.items() if "." not in ours]
    of_blocks = ("blocks", "attention_norm", "ffn_norm", "attention_post_norm", "ffn_post_norm")
    return [(ours, theirs) for ours, theirs in outer if ours not in of_blocks] + [
        (f"blocks.{layer}.{ours}", f"{places['blocks']}.{layer}.{theirs}")
        for layer in range(model["num_layers"])
        for ours, theirs in inner.items()
        if ours not in ("final_norm", "embedding_norm")
    ]


KINDS = {
    "weight": ("weight", "base_layer.weight"),
    "bias": ("bias", "base_layer.bias"),
    "lora_a": ("lora_A.default.weight",),
    "lora_b": ("lora_B.default.weight",),
}


def _of_layer(plain: Mapping[str, Tensor], layer: str) -> list[tuple[str, Tensor]]:
    return [
        (kind, plain[f"{layer}.{name}"])
        for kind, spellings in KINDS.items()
        for name in spellings
        if f"{layer}.{name}" in plain
    ]


def _native_form(model: Mapping[str, Any], layer: str, kind: str, tensor: Tensor) -> Tensor:
    """The tensor as a native layer has it: (out, in), and q, k, v each by itself."""
    if family(model) == "phi3":
        return _of_phi3(model, layer, tensor)
    if family(model) != "gpt2" or (".attention." not in layer and ".ffn." not in layer):
        return tensor
    turned = tensor.t() if kind == "weight" else tensor
    part = {"q": 0, "k": 1, "v": 2}.get(layer[-1])
    return turned if part is None else turned.chunk(3)[part]


def _of_experts(peer: str, name: str, tensor: Tensor) -> Tensor:
    """One of the stacked weights (E, out, in); gate and up are one tensor there."""
    part = {"gate": 0, "up": 1}.get(name.rpartition(".")[2].removesuffix("_bias"))
    if peer == "gpt_oss":
        tensor = tensor if part is None else tensor[..., part::2]
        return tensor.transpose(1, 2) if tensor.ndim == 3 else tensor
    return tensor if part is None else tensor.chunk(2, 1)[part]


def _of_phi3(model: Mapping[str, Any], layer: str, tensor: Tensor) -> Tensor:
    """This layer's rows of a matrix that several share."""
    width, ffn = model["hidden_size"] // model["num_heads"], model["ffn_size"]
    heads, kv_heads = width * model["num_heads"], width * model["num_kv_heads"]
    rows = {"q": (0, heads), "k": (heads, kv_heads), "v": (heads + kv_heads, kv_heads)}
    rows |= {"gate": (0, ffn), "up": (ffn, ffn)}
    start, length = rows.get(layer.rpartition(".")[2], (0, tensor.shape[0]))
    return tensor.narrow(0, start, length)


def mean_loss(peer: nn.Module, ids: Tensor) -> Tensor:
    """Mean cross-entropy of the next token of (B, T), computed from the peer's own logits.

    The peer's own loss is this in fp32, whatever its dtype.
    """
    logits = peer(input_ids=ids).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class InFp64(TorchFunctionMode):
    """fp64 wherever a peer asks for fp32, as its norms, rotary tables and routers do."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one of torch's functions."""
        wide = {torch.float32: torch.float64}
        args = tuple(wide.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
        kwargs = {
            name: wide.get(value, value) if isinstance(value, torch.dtype) else value
            for name, value in (kwargs or {}).items()
        }
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)
