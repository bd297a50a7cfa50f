"""Every feature of a run is supported by an engine or refused, with its name, reason and remedy."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.core.layout import Layout
from paceline.core.run import RunSpec
from paceline.core.shape import LatentAttentionShape, LoraSpec
from paceline.core.training import Evaluation, MlperfLog, RampUp
from paceline.engines import engine, engine_names
from paceline.engines.support import FEATURES, Support, refusals
from paceline.files.recipe import load_recipe
from tests.command import paceline
from tests.engines.batch_site import LLMB, MLPERF, NEMO, site, spec_of
from tests.example import make_spec

LORA = LoraSpec(rank=4, alpha=1, targets=("q", "k", "v", "o", "up", "down"))
EXAMPLES: dict[str, Any] = {
    "model.kind": "mmdit",
    "model.num_experts": 8,
    "model.activation": "gelu_tanh",
    "model.gated_ffn": (True, False),
    "model.norm": ("rmsnorm", "layernorm"),
    "model.norm_position": "both",
    "model.norm_eps": 1e-6,
    "model.final_norm": False,
    "model.positions": ("rope", "learned"),
    "model.position_offset": 3,
    "model.rope_theta": 5e5,
    "model.bias": (True, False),
    "model.tied_embeddings": (True, False),
    "model.embedding_norm": True,
    "model.dropout": 0.1,
    "model.attention_dropout": 0.1,
    "model.norm_zero_centered": True,
    "model.qkv_bias": True,
    "model.qk_norm": True,
    "model.rope_local_theta": 1e4,
    "model.rope_scaling_factor": 8.0,
    "model.rope_original_positions": 64,
    "model.rope_attention_factor": 1.2,
    "model.partial_rotary_factor": 0.5,
    "model.sliding_window": 16,
    "model.sliding_window_pattern": 2,
    "model.attention_sinks": True,
    "model.activation_limit": 7.0,
    "model.up_offset": 1.0,
    "model.query_pre_attn_scalar": 256.0,
    "model.scale_embedding": True,
    "model.latent_attention": LatentAttentionShape(
        kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
    ),
    "model.first_dense_layers": 1,
    "model.dense_ffn_size": 64,
    "model.mtp_layers": 1,
    "model.router_score": "sigmoid",
    "model.router_normalize": False,
    "model.router_scale": 2.5,
    "model.router_choice_bias": True,
    "model.num_kv_heads": 2,
    "model.head_size": 16,
    "model.embedding_size": 16,
    "lora": LORA,
    "lora.alpha": 16.0,
    "lora.dropout": 0.1,
    "lora.lr": 1e-3,
    "lora.train_rest": True,
    "training.dtype": ("fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4", "mxfp4"),
    "training.fp8_recipe": "rowwise",
    "training.compile": "blocks",
    "training.routing": ("learned", "forced", "pattern:3,1"),
    "training.betas": (0.9, 0.99),
    "training.eps": 1e-6,
    "training.grad_clip": 0.5,
    "training.router_aux_loss": 0.01,
    "training.router_z_loss": 0.001,
    "training.mtp_loss_weight": 0.1,
    "training.router_bias_update_rate": 0.01,
    "training.lr_schedule.kind": ("linear", "cosine"),
    "training.lr_schedule.min_lr": 1e-5,
    "training.lr_schedule.unit": "samples",
    "training.ramp_up": RampUp(start=2, increment=2, samples=8),
    "training.evaluation": Evaluation(every_samples=8, samples=4),
    "training.initial_weights": "there",
    "checkpoint.every": 5,
    "checkpoint.resume": "there",
    "mlperf": MlperfLog(benchmark="llama31_8b", org="us", platform="here"),
    "memory_limit_bytes": 1e9,
    "layout.tp": 2,
    "layout.pp": 2,
    "layout.cp": 2,
    "layout.vp": 2,
    "layout.ep": 2,
    "layout.zero_stage": (0, 1, 2, 3),
    "layout.micro_batch": 2,
    "layout.recompute": ("selective", "full", "budget"),
    "layout.sequence_parallel": True,
    "layout.dp_shard": 2,
    "layout.cp_exchange": ("all-to-all", "ring"),
    "layout.gradient_sync": "last",
    "layout.schedule": ("gpipe", "zero-bubble"),
    "data.source": ("synthetic", "stdlib", "text", "jsonl", "tokens", "indexed", "latents"),
    "data.packing": ("packed", "padded"),
    "data.document_mask": True,
    "data.loss_on": "text",
    "data.loss_mask": "mask.u8",
    "data.split": (9.0, 1.0),
    "data.split_part": 1,
    "data.blend": (("a", 1.0), ("b", 2.0)),
}
"""A value of each feature that some engine refuses; of those with few values all of them."""
BY_WAY = {
    ("deepspeed_chat", "a checkout's"): {"program": "/code/main.py"},
    ("megatron", "checkout"): {"checkout": "/code/megatron"},
    ("megatron_bridge", "performance recipes"): {"checkout": "/opt/Megatron-Bridge"},
    ("megatron_bridge", "library recipes"): {"checkout": "/opt/Megatron-Bridge", "library": True},
    ("megatron_deepspeed", ""): {"checkout": "/code/megatron"},
    ("mlperf", ""): MLPERF,
    ("nemo", "launch"): NEMO,
    ("nemo", "launch, recipe's script"): {**NEMO, "script": "/recipe/launch.sh"},
    ("nemo", "llmb"): LLMB,
}
"""Settings with which an engine is started in one of its ways."""
FAMILIES = {"Llama": "tiny-llama", "OPT": "tiny-opt", "GPT-2": "tiny-gpt"}
WITH_EXPERTS = {"num_experts": 4, "experts_per_token": 2}
WAYS_WITH_EXPERTS = {"Mixtral": {}, "Qwen3-MoE": {"qk_norm": True}, "qwen3": {}}
"""What makes a Llama one of these models, in addition to the experts."""
WAYS = [(name, way) for name in engine_names() for way in engine(name).SUPPORT]


def changed(spec: RunSpec, field: str, value: Any) -> RunSpec:
    """The run with one field changed, whatever else would have to change with it."""
    if field == "model.kind":
        return spec.model_copy(update={"model": load_recipe("flux1-schnell").model})
    if field == "training.routing" and spec.model.kind == "decoder":
        spec = spec.model_copy(update={"model": spec.model.model_copy(update=WITH_EXPERTS)})
    if field == "layout.schedule":
        return spec.model_copy(update={"layout": Layout(pp=2, schedule=value)})
    if field.startswith("lora.") and spec.lora is None:
        spec = spec.model_copy(update={"lora": LORA})
    first, *rest = field.split(".", 1)
    if rest:
        value = changed(getattr(spec, first), rest[0], value)
    return spec.model_copy(update={first: value})


def values(field: str) -> tuple[Any, ...]:
    example = EXAMPLES[field]
    several = isinstance(example, tuple) and isinstance(example[0], bool | int | str)
    return example if several else (example,)


def refused_values(field: str, support: Support) -> list[Any]:
    return [v for v in values(field) if support[field].sentence(FEATURES[field], v)]


def test_every_feature_has_an_example_and_every_limit_is_of_a_feature():
    assert EXAMPLES.keys() == FEATURES.keys()
    limits = {field for name, way in WAYS for field in engine(name).SUPPORT[way]}
    assert limits == FEATURES.keys()


@pytest.mark.parametrize("field", FEATURES)
def test_a_feature_is_seen_in_a_run_that_uses_it(field: str):
    plain = make_spec(model=load_recipe("tiny-gpt").model)
    feature = FEATURES[field]
    used = [feature.value(changed(plain, field, value)) for value in values(field)]
    assert any(value != feature.unused for value in used)


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_what_an_engine_lacks_is_refused_with_name_reason_and_remedy(name: str, way: str):
    support = engine(name).SUPPORT[way]
    settings = BY_WAY.get((name, way), {})
    plain = make_spec(engine=name, engine_settings=settings)
    if way in FAMILIES:
        plain = plain.model_copy(update={"model": load_recipe(FAMILIES[way]).model})
    if way in WAYS_WITH_EXPERTS:
        shape = {**WITH_EXPERTS, **WAYS_WITH_EXPERTS[way]}
        plain = plain.model_copy(update={"model": plain.model.model_copy(update=shape)})
    for field in support:
        assert refused_values(field, support), f"{field}: no example is beyond the limit"
        for value in refused_values(field, support):
            spec = changed(plain, field, value)
            sentences = [s for s in refusals(spec, support) if s.startswith(f"{field} ")]
            assert len(sentences) == 1, field
            what, _, remedy = sentences[0].partition("; ")
            assert "is not supported" in what and len(remedy.split()) > 1
            assert ":" in what or "=" in remedy, "a reason, or the values that it takes"
            if way not in ("OPT", "GPT-2"):
                assert sentences[0] in engine(name).unsupported(spec)


def test_nothing_else_is_said_of_a_kind_of_model_that_it_does_not_train():
    spec = make_spec(engine="torchtitan", layout=Layout(ep=2), lora=LORA)
    spec = changed(spec, "model.kind", "mmdit")
    assert refusals(spec, engine("torchtitan").SUPPORT["llama3"]) == [
        "model.kind mmdit is not supported: it trains torchtitan's llama3 and qwen3; use "
        "model.kind=decoder"
    ]


def test_a_published_run_is_refused_for_nothing():
    cluster = site(8, 8, "H100-SXM")
    spec = spec_of("nemo", "llama31-70b", cluster, NEMO)
    assert engine("nemo").unsupported(spec) == []


def test_the_list_of_features_says_what_an_engine_takes():
    done = paceline("recipes", "engines", "--features", "--where", "engine=torchtitan", "--json")
    rows = {row["feature"]: row for row in json.loads(done.stdout)}
    assert rows.keys() == engine("torchtitan").SUPPORT["llama3"].keys()
    assert (rows["training.dtype"]["takes"], rows["lora"]["takes"]) == ("fp32, bf16", "no")


def test_the_list_of_features_stands_alone() -> None:
    done = paceline("recipes", "engines", "install", "megatron", "--features")
    assert done.returncode == 1 and "--features: cannot be combined with" in done.stderr
