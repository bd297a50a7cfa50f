"""Loss and all gradients of the first step are those of transformers and peft."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("peft")

from paceline.trainer.config import TrainerConfig, parse_config
from paceline.trainer.data.batches import tokens_ahead
from paceline.trainer.model.decoder import Decoder, LayerSetting
from paceline.trainer.model.network import freeze, init_weights
from paceline.trainer.parallel.mesh import Mesh
from tests.trainer import peers
from tests.trainer.example import settings

SEQ_LEN, BATCH = 24, 3

LLAMA: dict[str, Any] = {
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_size": 64,
    "ffn_size": 96,
    "rope_theta": 500_000.0,
    "norm_eps": 1e-6,
}
OPT_13B: dict[str, Any] = {
    **LLAMA,
    "num_kv_heads": None,
    "gated_ffn": False,
    "activation": "relu",
    "norm": "layernorm",
    "norm_eps": 1e-5,
    "positions": "learned",
    "position_offset": 2,
    "bias": True,
    "tied_embeddings": True,
}
OPT_350M: dict[str, Any] = {
    **OPT_13B,
    "norm_position": "post",
    "final_norm": False,
    "embedding_size": 24,
}
GPT: dict[str, Any] = {**OPT_13B, "activation": "gelu", "position_offset": 0}
GEMMA3: dict[str, Any] = {
    **LLAMA,
    "num_layers": 3,
    "head_size": 32,
    "activation": "gelu_tanh",
    "norm_position": "both",
    "norm_zero_centered": True,
    "qk_norm": True,
    "rope_theta": 1e6,
    "rope_scaling_factor": 8.0,
    "rope_local_theta": 1e4,
    "sliding_window": 9,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 24,
    "scale_embedding": True,
    "tied_embeddings": True,
}
PHI4_MINI: dict[str, Any] = {
    **LLAMA,
    "partial_rotary_factor": 0.75,
    "rope_attention_factor": 1.19,
    "tied_embeddings": True,
}
MIXTRAL: dict[str, Any] = {**LLAMA, "num_experts": 8, "experts_per_token": 2}
QWEN3_MOE: dict[str, Any] = {
    **LLAMA,
    "head_size": 32,
    "qk_norm": True,
    "ffn_size": 40,
    "num_experts": 16,
    "experts_per_token": 4,
    "router_normalize": False,
}
DEEPSEEK_V3: dict[str, Any] = {
    **LLAMA,
    "num_layers": 3,
    "num_kv_heads": None,
    "rope_theta": 1e4,
    "ffn_size": 24,
    "num_experts": 16,
    "experts_per_token": 4,
    "expert_groups": 4,
    "groups_per_token": 2,
    "shared_ffn_size": 48,
    "first_dense_layers": 1,
    "dense_ffn_size": 96,
    "router_score": "sigmoid",
    "router_scale": 2.5,
    "router_choice_bias": True,
    "latent_attention": {
        "q_lora_rank": 40,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    },
}
GROWTH = 1 + 0.13 * log(40)
"""YaRN's factor with an mscale_all_dim of 1.3; the peer's mscale is 0.7."""
DEEPSEEK_V3_LONG: dict[str, Any] = {
    **DEEPSEEK_V3,
    "latent_attention": {**DEEPSEEK_V3["latent_attention"], "qk_rope_head_dim": 16},
    "rope_scaling_factor": 40.0,
    "rope_original_positions": 256,
    "rope_attention_factor": (1 + 0.07 * log(40)) / GROWTH,
    # The width of a head's query over the square of the scores' factor.
    "query_pre_attn_scalar": 32 / GROWTH**4,
}
GPT_OSS: dict[str, Any] = {
    **MIXTRAL,
    "head_size": 32,
    "experts_per_token": 3,
    "activation": "quick_gelu",
    "activation_limit": 0.1,
    "up_offset": 1.0,
    "bias": True,
    "attention_sinks": True,
    "sliding_window": 9,
    "sliding_window_pattern": 2,
    "rope_theta": 1.5e5,
    "rope_scaling_factor": 32.0,
    "rope_original_positions": 512,
    "rope_attention_factor": 0.1 * log(32) + 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "opt-350m": OPT_350M,
    "opt-13b": OPT_13B,
    "llama": LLAMA,
    "llama, tied, one key head, wide heads": {
        **LLAMA,
        "tied_embeddings": True,
        "num_kv_heads": 1,
        "head_size": 32,
        "rope_theta": 1e4,
    },
    "qwen2": {**LLAMA, "qkv_bias": True},
    "qwen3": {**LLAMA, "head_size": 32, "qk_norm": True},
    "mistral, window": {**LLAMA, "sliding_window": 7},
    "gemma3": GEMMA3,
    "phi4-mini": PHI4_MINI,
    "mixtral": MIXTRAL,
    "qwen3-moe": QWEN3_MOE,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3, queries from the hidden state": {
        **DEEPSEEK_V3,
        "latent_attention": {**DEEPSEEK_V3["latent_attention"], "q_lora_rank": None},
    },
    "deepseek-v3, YaRN": DEEPSEEK_V3_LONG,
    "gpt-oss": GPT_OSS,
    "gpt": GPT,
    "gpt, embedding norm": {**GPT, "embedding_norm": True},
}
ATTENTION, FFN = ("q", "k", "v", "o"), ("gate", "up", "down")
ADAPTERS = {"attention": (ATTENTION, False), "all, rest trains": ((*ATTENTION, *FFN), True)}
EXPERTS = (
    "mixtral",
    "qwen3-moe",
    "gpt-oss",
    "deepseek-v3",
    "deepseek-v3, queries from the hidden state",
    "deepseek-v3, YaRN",
)
PLAIN = ("qwen2", "qwen3", "mistral, window", "gemma3", "phi4-mini", *EXPERTS)
"""Models that are compared without adapters."""
GPT_ADAPTERS = {"o, ffn": (("o", *FFN), False), "o, ffn, rest trains": (("o", *FFN), True)}
"""GPT-2 has q, k and v in one matrix, which would have one adapter."""
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Of a parameter's relative L2 error; fp32 sums differ by what the order of addition rounds."""


def adapters_of(model: str) -> dict[str, tuple[tuple[str, ...], bool]]:
    """Targets, and whether the rest trains, of the adapters that a model and its peer can have."""
    gated = MODELS[model].get("gated_ffn", True)
    known = GPT_ADAPTERS if model.startswith("gpt") and model not in EXPERTS else ADAPTERS
    return {
        name: (tuple(t for t in targets if gated or t != "gate"), rest)
        for name, (targets, rest) in known.items()
    }


def content(model: str, adapters: str | None = None, **changes: Any) -> dict[str, Any]:
    """trainer.json of one of the models."""
    sizes = {"seq_len": SEQ_LEN, "global_batch": BATCH, "micro_batch": BATCH}
    raw = settings(**{**MODELS[model], **sizes, **changes})
    raw["lora"] = None
    if adapters is not None:
        targets, rest = adapters_of(model)[adapters]
        raw["lora"] = {
            "rank": 4,
            "alpha": 10,
            "dropout": 0.0,
            "targets": targets,
            "train_rest": rest,
        }
    return raw


def native_model(config: TrainerConfig, dtype: torch.dtype) -> Decoder:
    """The trainer's own model with its own initial weights, and adapters that do something."""
    model = Decoder(config.model, LayerSetting(SEQ_LEN, dtype, lora=config.lora)).to(dtype)  # type: ignore[arg-type]
    freeze(model)
    init_weights(model, {n: p.shape for n, p in model.named_parameters()}, 3, Mesh())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Zeros and ones would hide an exchange of two of them, and stop adapters' gradients.
            if parameter.ndim == 1 or name.endswith(("bias", "lora_b")):
                parameter += 0.1 * torch.randn_like(parameter)
        for bias in model.buffers():
            bias += 0.1 * torch.randn_like(bias)
    return model


def pair(raw: dict[str, Any], dtype: torch.dtype) -> tuple[Decoder, nn.Module]:
    """The trainer's model and its peer, with the same weights."""
    ours = native_model(parse_config(raw), dtype)
    with in_dtype(dtype):
        theirs = peers.build(raw).to(dtype).train()
    copy_weights(raw, ours, theirs)
    return ours, theirs


def in_dtype(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """What keeps a peer from rounding to fp32 in fp64."""
    return peers.InFp64() if dtype == torch.float64 else nullcontext()


@torch.no_grad()
def copy_weights(raw: dict[str, Any], ours: Decoder, theirs: nn.Module) -> None:
    """Every weight of ours into the peer."""
    places = peers.weights_of(raw["model"], dict(theirs.named_parameters()))
    own = dict(ours.named_parameters())
    assert set(places) == set(own)
    for name, place in places.items():
        place.copy_(own[name])
    biases = [b for name, b in theirs.named_buffers() if name.endswith("score_correction_bias")]
    for bias, buffer in zip(biases, ours.buffers(), strict=True):
        bias.copy_(buffer)


def tokens(raw: dict[str, Any], ours: Decoder) -> Tensor:
    """Ids for which no ReLU stands so near its kink that rounding decides about its gradient."""
    nearest: list[float] = []
    ups = [m for name, m in ours.named_modules() if name.endswith("ffn.up")]
    hooks = [
        m.register_forward_hook(lambda *x: nearest.append(x[2].abs().min().item())) for m in ups
    ]
    while True:
        nearest.clear()
        ids = torch.randint(raw["model"]["vocab_size"], (BATCH, SEQ_LEN + 1))
        native_loss(ours, ids)
        if raw["model"]["activation"] != "relu" or min(nearest) > 1e-6:
            break
    for hook in hooks:
        hook.remove()
    return ids


def native_loss(model: Decoder, ids: Tensor) -> Tensor:
    """The mean over the tokens that the peer's mean is over."""
    model.scale = 1 / ids[:, 1:].numel()
    inputs, targets = ids[:, :-1], ids[:, 1:].contiguous()
    depth = model.model.mtp_layers
    return model(inputs, targets, ahead=tokens_ahead(inputs, targets, depth) if depth else None)


def gradients(raw: dict[str, Any], theirs: nn.Module) -> dict[str, Tensor]:
    named = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    return peers.weights_of(raw["model"], named)


def apart(found: Tensor, wanted: Tensor, scale: float) -> float:
    """Relative distance; where nothing but rounding is left of a gradient, relative to `scale`."""
    return ((found - wanted).norm() / max(wanted.norm().item(), scale)).item()


def worst(ours: Decoder, wanted: dict[str, Tensor]) -> tuple[float, str]:
    """The parameter whose gradient is furthest from the peer's."""
    found = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    assert set(found) == set(wanted)
    # A key's bias moves all of a query's scores alike, so its gradient is 0.
    scale = 1e-3 * max(gradient.norm().item() for gradient in wanted.values())
    return max((apart(found[name], wanted[name], scale), name) for name in wanted)


CASES = [
    (model, adapters, dtype)
    for model in MODELS
    for adapters in (None, *adapters_of(model))
    for dtype in LIMITS
    # Adapters are Llama's in all of its kin.
    if not (adapters and model in PLAIN)
]


@pytest.mark.parametrize(("model", "adapters", "dtype"), CASES, ids=str)
def test_loss_and_every_gradient_are_the_peers(
    model: str, adapters: str | None, dtype: torch.dtype
) -> None:
    raw = content(model, adapters)
    ours, theirs = pair(raw, dtype)
    ids = tokens(raw, ours)

    with in_dtype(dtype):
        wanted = peers.mean_loss(theirs, ids)
    loss = native_loss(ours, ids)
    loss.backward()
    wanted.backward()

    assert loss.item() == pytest.approx(wanted.item(), rel=LIMITS[dtype])
    error, name = worst(ours, gradients(raw, theirs))
    assert error < LIMITS[dtype], name


FAULTS: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "another base of the rotary angles": ("llama", {"rope_theta": 1e4}, torch.float32),
    "another eps in the norms": ("llama", {"norm_eps": 1e-5}, torch.float32),
    "norms at the other place": ("opt-350m", {"norm_position": "pre"}, torch.float32),
    "another limit of the activation": ("gpt-oss", {"activation_limit": 7.0}, torch.float32),
    # The two forms are so near that fp32's rounding comes close to their distance.
    "the tanh form of GELU": ("gpt", {"activation": "gelu_new"}, torch.float64),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_peer_of_another_structure_has_other_gradients(fault: str) -> None:
    model, changes, dtype = FAULTS[fault]
    raw = content(model)
    ours, _ = pair(raw, dtype)
    other = {**raw, "model": {**raw["model"], **changes}}
    theirs = peers.build(other).to(dtype)
    copy_weights(raw, ours, theirs)
    ids = tokens(raw, ours)

    native_loss(ours, ids).backward()
    peers.mean_loss(theirs, ids).backward()

    assert worst(ours, gradients(raw, theirs))[0] > 3 * LIMITS[dtype]


def test_the_other_layout_of_rotary_pairs_is_told_apart() -> None:
    raw = content("llama")
    ours, theirs = pair(raw, torch.float32)
    width, ids = ours.model.head_dim, tokens(raw, ours)
    mixed = torch.arange(width).unflatten(0, (2, -1)).t().flatten()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "q_proj" in name:
                heads = parameter.unflatten(0, (-1, width))
                parameter.copy_(heads[:, mixed].flatten(0, 1))

    native_loss(ours, ids).backward()
    peers.mean_loss(theirs, ids).backward()

    assert worst(ours, gradients(raw, theirs))[0] > 1000 * LIMITS[torch.float32]


@pytest.mark.parametrize("model", ["opt-350m", "llama", "gpt"])
def test_the_peers_own_loss_is_the_mean_over_shifted_tokens(model: str) -> None:
    raw = content(model)
    ours, theirs = pair(raw, torch.float32)
    ids = tokens(raw, ours)

    own = theirs(input_ids=ids, labels=ids).loss

    assert own.item() == pytest.approx(peers.mean_loss(theirs, ids).item(), rel=1e-6)


def test_what_opt_calls_padding_has_no_gradient_from_its_place_in_the_input() -> None:
    raw = content("opt-13b")
    ours, theirs = pair(raw, torch.float64)
    table = theirs.get_input_embeddings()
    assert isinstance(table, nn.Embedding)
    table.padding_idx = 1
    ids = tokens(raw, ours)
    ids[0, :5] = 1

    native_loss(ours, ids).backward()
    peers.mean_loss(theirs, ids).backward()

    found, wanted = ours.get_parameter("embedding.weight").grad, table.weight.grad
    assert found is not None and wanted is not None
    assert ((found - wanted).norm(dim=1) > 1e-10).nonzero().flatten().tolist() == [1]
