"""Hugging Face Trainer (transformers with accelerate): job creation and log format.

The shape of a decoder becomes a configuration of transformers' Llama, OPT or GPT-2. With experts,
it becomes one of Mixtral or Qwen3-MoE.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from paceline.core.job import Job
from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape, LoraSpec, LoraTarget
from paceline.engines.hf_trainer.log_format import LOG_FORMAT as LOG_FORMAT
from paceline.engines.launch.environments import interpreter, not_installed
from paceline.engines.launch.extra_settings import with_extra_values, without_extra_arguments
from paceline.engines.launch.programs import (
    data_settings,
    launch,
    program_file,
    unknown_settings,
    windows_program,
)
from paceline.engines.support import (
    DEEPSEEK,
    LEARNED_ROUTING,
    NO_CHECKPOINTS,
    OPT_SHAPE,
    SHAPE_OPTIONS,
    TOKEN_WINDOWS,
    WITHOUT_RAMP_UP,
    Support,
    TestedProgram,
    no,
    only,
    refusals,
    small_vocabulary,
)

Family = Literal["llama", "opt", "gpt2", "mixtral", "qwen3_moe"]

TITLES: dict[Family, str] = {
    "llama": "Llama",
    "opt": "OPT",
    "gpt2": "GPT-2",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
}
OPT_OFFSET = 2
"""Unused position rows that OPT always adds, regardless of its configuration."""
OPT_EPS = 1e-5
"""Epsilon of OPT's norms, which its configuration does not contain."""
_ATTENTION: dict[LoraTarget, str] = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
LAYERS: dict[Family, dict[LoraTarget, str]] = {
    "llama": {
        **_ATTENTION,
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
    "mixtral": _ATTENTION,
    "qwen3_moe": _ATTENTION,
}
"""Layers for adapters.

GPT-2 has one layer for queries, keys and values together, and experts are stacked weights.
"""


_LLAMA, _GPT2 = "fixed in transformers' Llama", "fixed in transformers' GPT-2"
_COMMON: Support = {
    "model.embedding_norm": no("transformers' models have none"),
}
_EXPERTS = "fixed in transformers' Mixtral and Qwen3-MoE"
_WITH_EXPERTS: Support = {
    "model.embedding_norm": _COMMON["model.embedding_norm"],
    "model.positions": only("rope", reason=_EXPERTS),
    "model.gated_ffn": only(True, reason=_EXPERTS),
    "model.norm": only("rmsnorm", reason=_EXPERTS),
    "model.norm_position": only("pre", reason=_EXPERTS),
    "model.final_norm": only(True, reason=_EXPERTS),
    "model.bias": only(False, reason=_EXPERTS),
    "model.embedding_size": no(_EXPERTS),
    "model.dropout": no(_EXPERTS),
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
    "mixtral": _WITH_EXPERTS,
    "qwen3_moe": _WITH_EXPERTS,
}
"""Properties of a model family that its configuration cannot change."""


def family(shape: DecoderShape) -> Family:
    """Return the nearest family: by experts, by the norm, then by features that only OPT has."""
    if shape.num_experts > 1:
        return "qwen3_moe" if shape.qk_norm else "mixtral"
    if shape.norm == "rmsnorm":
        return "llama"
    return "opt" if shape.position_offset or shape.embedding_size else "gpt2"


def family_problems(shape: DecoderShape, lora: LoraSpec | None) -> Iterator[str]:
    """Yield problems that the support table cannot express: OPT's final norm, adapter layers."""
    if shape.num_experts > 1 and (shape.shared_ffn_size or shape.expert_groups > 1):
        yield (
            "model.shared_ffn_size and expert_groups: transformers' Mixtral and Qwen3-MoE have no "
            "shared expert and no groups of experts"
        )
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
    of_family = {
        "llama": _llama,
        "opt": _opt,
        "gpt2": _gpt2,
        "mixtral": _mixtral,
        "qwen3_moe": _qwen3_moe,
    }
    return common | of_family[family(shape)](shape)


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
        **_attention(shape),
        "intermediate_size": shape.ffn_size,
        "attention_bias": shape.bias,
        "mlp_bias": shape.bias,
    }


def _mixtral(shape: DecoderShape) -> dict[str, Any]:
    return {
        **_attention(shape),
        "intermediate_size": shape.ffn_size,
        "num_local_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
    }


def _qwen3_moe(shape: DecoderShape) -> dict[str, Any]:
    return {
        **_attention(shape),
        "intermediate_size": shape.dense_ffn_size or shape.ffn_size,
        "moe_intermediate_size": shape.ffn_size,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "norm_topk_prob": shape.router_normalize,
        "mlp_only_layers": list(range(shape.first_dense_layers)),
    }


def _attention(shape: DecoderShape) -> dict[str, Any]:
    """Return the fields that Llama, Mixtral and Qwen3-MoE share."""
    return {
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": shape.activation,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
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


REQUIREMENTS = ("transformers==5.23.0", "accelerate==1.15.0", "peft==0.21.2")
IMPORTS = ("torch", "transformers", "accelerate", "peft")
ATTENTIONS = ("sdpa", "eager", "flash_attention_2")
ENGINE_SETTINGS = {"attention": "sdpa", "optimizer": "adamw_torch_fused", "workers": 0}
"""Settings that only this engine has, with their defaults.

They are the attention implementation, the Trainer's optimizer name, and the number of processes
that prefetch samples.
"""
REPLACEABLE = ("logging_nan_inf_filter", "report_to", "ddp_timeout")
"""Arguments of the Trainer that change no figure of a run."""
OUTPUT = "output"
PROGRAM_FILE = "trainer_program.py"
SETTINGS_FILE = "hf_trainer.json"


_DATA_PARALLEL = no("the Trainer is data-parallel only")
ANY_SHAPE: Support = {
    **NO_CHECKPOINTS,
    **WITHOUT_RAMP_UP,
    **SHAPE_OPTIONS,
    **DEEPSEEK,
    **LEARNED_ROUTING,
    **TOKEN_WINDOWS,
    "model.kind": only("decoder", reason="it trains decoder models"),
    "lora.train_rest": no("peft trains only its adapters"),
    "lora.lr": no("the adapters use training.lr"),
    "training.dtype": only("fp32", "bf16", "fp16"),
    "layout.tp": _DATA_PARALLEL,
    "layout.pp": _DATA_PARALLEL,
    "layout.cp": _DATA_PARALLEL,
    "layout.vp": _DATA_PARALLEL,
    "layout.ep": _DATA_PARALLEL,
    "layout.zero_stage": only(0, 2, 3, reason="the Trainer has DDP (0) and FSDP (2, 3)"),
    "layout.dp_shard": no("the Trainer's FSDP shards over all processes"),
    "layout.recompute": only("none", "full", reason="the Trainer recomputes full blocks or none"),
}
_TRAINED: Mapping[str, tuple[str, ...]] = {
    "mixtral": ("model.qk_norm",),  # normed queries make it a Qwen3-MoE
    "qwen3_moe": (
        "model.qk_norm",
        "model.router_normalize",
        "model.first_dense_layers",
        "model.dense_ffn_size",
    ),
}
"""Fields of `ANY_SHAPE` that do not limit a family."""
SUPPORT = {
    TITLES[name]: {
        field: limit
        for field, limit in {**ANY_SHAPE, **limits}.items()
        if field not in _TRAINED.get(name, ())
    }
    for name, limits in FAMILIES.items()
}
TESTED_PROGRAMS = (TestedProgram("transformers 5.23", "two ranks, LoRA, experts"),)


def unsupported(spec: RunSpec) -> list[str]:
    """Return what this engine cannot do of `spec`, one sentence each."""
    model = spec.model
    if model.kind != "decoder":
        return refusals(spec, ANY_SHAPE)
    problems = unknown_settings(spec, tuple(ENGINE_SETTINGS))
    attention = _engine_settings(spec)["attention"]
    if attention not in ATTENTIONS:
        allowed = ", ".join(ATTENTIONS)
        problems.append(f"engine_settings.attention {attention} must be one of {allowed}")
    problems += [*refusals(spec, SUPPORT[TITLES[family(model)]]), *small_vocabulary(spec)]
    return [*problems, *family_problems(model, spec.lora), *_device_problems(spec)]


def _device_problems(spec: RunSpec) -> Iterator[str]:
    """Yield problems that depend on the number and kind of devices."""
    on_cpu, sharded = spec.cluster.device == "cpu", spec.layout.zero_stage >= 2
    if sharded and (spec.world_size == 1 or on_cpu):
        why = (
            "one process cannot shard"
            if spec.world_size == 1
            else "on CPUs, accelerate silently trains full replicas instead of using FSDP"
        )
        yield f"layout.zero_stage {spec.layout.zero_stage}: {why}; use layout.zero_stage=0"
    if spec.training.dtype == "fp16" and on_cpu:
        yield "training.dtype fp16: the Trainer supports loss scaling on GPUs only; use bf16"


def missing(spec: RunSpec) -> str | None:
    """Return what is missing for a start, as `what; remedy`, or None."""
    return not_installed(spec, IMPORTS if spec.lora else IMPORTS[:-1])


def job(spec: RunSpec, name: str) -> Job:
    """Return the Job that starts `trainer_program.py` once per device."""
    files = {
        **program_file(__package__ or "", PROGRAM_FILE),
        **windows_program(),
        SETTINGS_FILE: json.dumps(settings(spec), indent=2) + "\n",
    }
    argv = ("{python}", PROGRAM_FILE, SETTINGS_FILE)
    # `settings` has the extra arguments: they are the Trainer's, and its program takes none.
    return launch(without_extra_arguments(spec), name, argv, python=interpreter(spec), files=files)


def settings(spec: RunSpec) -> dict[str, Any]:
    """Return the settings for `trainer_program.py`; `arguments` are the Trainer's own."""
    assert spec.model.kind == "decoder", "unsupported refuses any other"
    training = spec.training
    return {
        "model": configuration(spec.model),
        "attention": _engine_settings(spec)["attention"],
        "lora": adapters(spec.model, spec.lora) if spec.lora else None,
        "expected_parameters": spec.num_parameters,
        "arguments": with_extra_values(spec, arguments(spec), REPLACEABLE),
        "learning_rate": _learning_rate(spec),
        "matmul_precision": training.matmul_precision,
        "compile_blocks": training.compile == "blocks",
        "data": data_settings(spec),
        "seq_len": training.seq_len,
        "samples": training.steps * training.global_batch,
        "seed": training.seed,
    }


def arguments(spec: RunSpec) -> dict[str, Any]:
    """Return the TrainingArguments by name."""
    training, layout = spec.training, spec.layout
    return {
        "output_dir": OUTPUT,
        "max_steps": training.steps,
        "per_device_train_batch_size": layout.micro_batch,
        "gradient_accumulation_steps": layout.num_microbatches(
            spec.world_size, training.global_batch
        ),
        "learning_rate": training.lr,
        "adam_beta1": training.betas[0],
        "adam_beta2": training.betas[1],
        "adam_epsilon": training.eps,
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.grad_clip,
        "optim": _engine_settings(spec)["optimizer"],
        "dataloader_num_workers": _engine_settings(spec)["workers"],
        "bf16": training.dtype == "bf16",
        "fp16": training.dtype == "fp16",
        "seed": training.seed,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": spec.cluster.device == "cpu",
        **_sharding(spec),
        **(_processes(spec) if spec.world_size > 1 else {}),
    }


def _engine_settings(spec: RunSpec) -> dict[str, Any]:
    """Return the engine's own settings with defaults."""
    return {**ENGINE_SETTINGS, **spec.engine_settings}


def _processes(spec: RunSpec) -> dict[str, Any]:
    """Return the settings for communication between processes."""
    return {
        "ddp_backend": "gloo" if spec.cluster.device == "cpu" else "nccl",
        "ddp_timeout": int(spec.hang_limit_s),
        "ddp_find_unused_parameters": False,
    }


def _sharding(spec: RunSpec) -> dict[str, Any]:
    """Return settings of activation checkpointing and FSDP, in the form the Trainer expects."""
    recompute = spec.layout.recompute == "full"
    if spec.layout.zero_stage < 2:
        return {
            "activation_checkpointing": recompute,
            "activation_checkpointing_kwargs": {"use_reentrant": False},
        }
    return {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "reshard_after_forward": spec.layout.zero_stage == 3,
            "activation_checkpointing": recompute,
        },
    }


def _learning_rate(spec: RunSpec) -> dict[str, Any]:
    """Return the schedule in steps, with the minimum learning rate as a fraction of the peak."""
    training, plan = spec.training, spec.training.lr_schedule
    batch = training.global_batch if plan.unit == "samples" else 1
    return {
        "kind": plan.kind,
        "warmup": plan.warmup / batch,
        "decay": plan.decay / batch if plan.decay else training.steps,
        "lowest": plan.min_lr / training.lr,
    }
