"""torchtitan: job creation and log format."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.core.job import Job
from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape
from paceline.engines.launch.environments import interpreter, not_installed
from paceline.engines.launch.programs import (
    data_settings,
    launch,
    program_file,
    unknown_settings,
    windows_program,
)
from paceline.engines.support import (
    DEEPSEEK,
    NO_CHECKPOINTS,
    SHAPE_OPTIONS,
    TOKEN_WINDOWS,
    WITHOUT_RAMP_UP,
    Support,
    TestedProgram,
    no,
    only,
    refusals,
    small_vocabulary,
    unequal_stages,
)
from paceline.engines.torchtitan.log_format import LOG_FORMAT as LOG_FORMAT

REQUIREMENTS = ("torchtitan==0.2.2", "torchdata==0.11.0", "tyro==1.0.17", "datasets==4.7.0")
IMPORTS = ("torch", "torchdata", "tyro", "datasets", "tokenizers")
"""Modules to import; torchtitan itself needs triton, but `cpu_program.py` runs without it on CPUs.
"""
CONFIG_FILE = "torchtitan.toml"
SHAPE_FILE = "shape.json"
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}


ENGINE_SETTINGS = ("compile_loss",)
REPLACEABLE = ("job.description", "metrics.log_freq", "metrics.disable_color_printing")
"""Settings that change no figure of a run, so that an extra argument replaces them."""
_FIXED = "fixed in torchtitan's models"
ANY_MODEL: Support = {
    **NO_CHECKPOINTS,
    **WITHOUT_RAMP_UP,
    **SHAPE_OPTIONS,
    **DEEPSEEK,
    **TOKEN_WINDOWS,
    "model.kind": only("decoder", reason="it trains torchtitan's llama3 and qwen3"),
    "model.norm": only("rmsnorm", reason=_FIXED),
    "model.norm_position": only("pre", reason=_FIXED),
    "model.positions": only("rope", reason=_FIXED),
    "model.gated_ffn": only(True, reason=_FIXED),
    "model.activation": only("silu", reason=_FIXED),
    "model.bias": only(False, reason=_FIXED),
    "model.tied_embeddings": only(False, reason=_FIXED),
    "model.final_norm": only(True, reason=_FIXED),
    "model.embedding_norm": no(_FIXED),
    "model.embedding_size": no(_FIXED),
    "model.dropout": no(_FIXED),
    "model.attention_dropout": no(_FIXED),
    "lora": no("torchtitan trains all weights"),
    "training.dtype": only("fp32", "bf16"),
    "layout.zero_stage": only(0, 2, 3, reason="torchtitan has DDP (0) and FSDP2 (2, 3)"),
    "layout.schedule": only(*SCHEDULES),
    "layout.cp_exchange": only("all-gather", "all-to-all"),
}
_QWEN3 = ("qk_norm", "router_score", "router_normalize", "router_scale")
SUPPORT: Mapping[str, Support] = {
    "llama3": {
        **ANY_MODEL,
        "model.head_size": no("llama3's head size is hidden_size / num_heads"),
        "layout.ep": no("llama3 has no experts"),
    },
    "qwen3": {
        field: limit
        for field, limit in ANY_MODEL.items()
        if field.removeprefix("model.") not in _QWEN3
    },
}
"""Limits of torchtitan's models: llama3, and qwen3 for models with experts."""
TESTED_PROGRAMS = (TestedProgram("torchtitan 0.2.2", "FSDP2 on two ranks, experts"),)


def unsupported(spec: RunSpec) -> list[str]:
    """Return what torchtitan cannot do of `spec`, one sentence each."""
    if not isinstance(spec.model, DecoderShape):
        return refusals(spec, ANY_MODEL)
    problems = refusals(spec, SUPPORT[family(spec.model)])
    return [
        *unknown_settings(spec, ENGINE_SETTINGS),
        *problems,
        *small_vocabulary(spec),
        *_layout_problems(spec, spec.model),
        *_expert_problems(spec, spec.model),
        *_precision_problems(spec),
        *_schedule_problems(spec),
    ]


def family(model: DecoderShape) -> str:
    """Return torchtitan's name of the model: qwen3 has experts, with or without normed queries."""
    return "qwen3" if model.num_experts > 1 else "llama3"


def missing(spec: RunSpec) -> str | None:
    """Return what is missing for a start, as `what; remedy`, or None."""
    return not_installed(spec, ("torchtitan", *IMPORTS))


def job(spec: RunSpec, name: str) -> Job:
    """Return the Job for `torchtitan.train`, once per device; on a CPU through `cpu_program.py`."""
    package = __package__ or ""
    values = settings(spec)
    on_cpu = spec.cluster.device == "cpu"
    start = ("cpu_program.py",) if on_cpu else ("-m", "torchtitan.train")
    files = {
        **program_file(package, "shape_program.py"),
        **(program_file(package, "cpu_program.py") if on_cpu else {}),
        **windows_program(),
        SHAPE_FILE: json.dumps(values["shape"], indent=2) + "\n",
        CONFIG_FILE: as_toml(values["config"]),
    }
    return launch(
        spec,
        name,
        ("{python}", *start, "--job.config_file", CONFIG_FILE),
        python=interpreter(spec),
        env={} if on_cpu else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        files=files,
        replaceable=REPLACEABLE,
        file_options=[
            f"{section}.{key}" for section, part in values["config"].items() for key in part
        ],
    )


def settings(spec: RunSpec) -> dict[str, Any]:
    """Return torchtitan's sections (`config`) and the input of Paceline's program (`shape`)."""
    return {"config": _config(spec), "shape": _shape(spec)}


def as_toml(sections: dict[str, dict[str, Any]]) -> str:
    """Return sections of scalars and lists as TOML."""
    lines: list[str] = []
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{key} = {_scalar(v)}" for key, v in values.items()), ""]
    return "\n".join(lines)


def _scalar(value: Any) -> str:
    return "inf" if value == math.inf else json.dumps(value)


def _shape(spec: RunSpec) -> dict[str, Any]:
    model, training = spec.model, spec.training
    assert isinstance(model, DecoderShape), "unsupported refuses any other"
    return {
        "family": family(model),
        "flavor": _flavor(spec),
        "model_args": {
            "dim": model.hidden_size,
            "n_layers": model.num_layers,
            "n_heads": model.num_heads,
            "n_kv_heads": model.kv_heads,
            "vocab_size": model.padded_vocab(spec.layout.tp),
            "norm_eps": model.norm_eps,
            "rope_theta": model.rope_theta,
            "max_seq_len": training.seq_len,
            **(_widths(model) if model.num_experts == 1 else _widths_with_experts(model)),
        },
        "experts": _experts(spec, model),
        "expected_parameters": spec.num_parameters,
        "data": data_settings(spec),
        "seq_len": training.seq_len,
        "vocab_size": model.vocab_size,
        "samples": training.steps * training.global_batch,
        "seed": training.seed,
    }


def _widths(model: DecoderShape) -> dict[str, Any]:
    """Return llama3's width: it computes int(multiplier x 8/3 dim), rounded up to a multiple."""
    return {
        "multiple_of": model.ffn_size,
        "ffn_dim_multiplier": 0.25 * model.ffn_size / model.hidden_size,
    }


def _widths_with_experts(model: DecoderShape) -> dict[str, Any]:
    return {
        "head_dim": model.head_dim,
        "qk_norm": model.qk_norm,
        "moe_enabled": True,
        "moe_inter_dim": model.ffn_size,
    }


def _experts(spec: RunSpec, model: DecoderShape) -> dict[str, Any] | None:
    """Return the fields of torchtitan's MoEArgs; its loss-free balancing is off."""
    if model.num_experts == 1:
        return None
    groups = model.expert_groups if model.expert_groups > 1 else None
    return {
        "num_experts": model.num_experts,
        "num_shared_experts": model.shared_ffn_size // model.ffn_size,
        "top_k": model.experts_per_token,
        "score_func": model.router_score,
        "route_norm": model.router_normalize,
        "route_scale": model.router_scale,
        "score_before_experts": False,
        "num_expert_groups": groups,
        "num_limited_groups": model.groups_per_token if groups else None,
        "load_balance_coeff": None,
        # Its grouped GEMM pads tokens by a Triton kernel.
        "use_grouped_mm": spec.cluster.device != "cpu",
    }


def _flavor(spec: RunSpec) -> str:
    return re.sub(r"[^\w.-]", "-", spec.recipe)


def _config(spec: RunSpec) -> dict[str, dict[str, Any]]:
    training, layout = spec.training, spec.layout
    assert isinstance(spec.model, DecoderShape), "unsupported refuses any other"
    timeout_s = int(spec.hang_limit_s)
    microbatches = layout.num_microbatches(spec.world_size, training.global_batch)
    return {
        "job": {"dump_folder": "output", "description": spec.recipe},
        "metrics": {"log_freq": 1, "disable_color_printing": True},
        "model": {"name": family(spec.model), "flavor": _flavor(spec)},
        "optimizer": {
            "name": "AdamW",
            "lr": training.lr,
            "beta1": training.betas[0],
            "beta2": training.betas[1],
            "eps": training.eps,
            "weight_decay": training.weight_decay,
            "implementation": "fused",
        },
        "lr_scheduler": _schedule(spec),
        "training": {
            # With pipeline parallelism, torchtitan splits the local batch into micro-batches.
            "local_batch_size": layout.micro_batch * (microbatches if layout.pp > 1 else 1),
            "global_batch_size": training.global_batch,
            "seq_len": training.seq_len,
            "max_norm": training.grad_clip or math.inf,
            "steps": training.steps,
            "dtype": "float32",
            "mixed_precision_param": DTYPES.get(training.dtype, training.dtype),
            "mixed_precision_reduce": "float32",
        },
        "parallelism": _parallelism(spec),
        "checkpoint": {"enable": False},
        "activation_checkpoint": {"mode": layout.recompute, "selective_ac_option": "op"},
        "compile": {"enable": training.compile == "blocks", "components": _compiled(spec)},
        "comm": {"init_timeout_seconds": timeout_s, "train_timeout_seconds": timeout_s},
        "experimental": {"custom_import": "shape_program"},
        "debug": {
            "seed": training.seed,
            **({"moe_force_load_balance": True} if training.routing == "forced" else {}),
        },
    }


def _compiled(spec: RunSpec) -> list[str]:
    return ["model", *(["loss"] if spec.engine_settings.get("compile_loss") else [])]


def _parallelism(spec: RunSpec) -> dict[str, Any]:
    layout, dp = spec.layout, spec.dp
    shard = layout.shards(dp) // layout.cp if layout.zero_stage >= 2 else 1
    sizes = {
        "data_parallel_replicate_degree": dp // shard,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": "never" if layout.zero_stage == 2 else "default",
        "tensor_parallel_degree": layout.tp,
        "pipeline_parallel_degree": layout.pp,
        "context_parallel_degree": layout.cp,
        "context_parallel_rotate_method": layout.cp_exchange.replace("-to-", "to").replace("-", ""),
        **({"expert_parallel_degree": layout.ep} if layout.ep > 1 else {}),
    }
    if layout.pp == 1:
        return sizes
    return {
        **sizes,
        "pipeline_parallel_schedule": SCHEDULES.get(layout.effective_schedule, "1F1B"),
        "pipeline_parallel_microbatch_size": layout.micro_batch,
        "pipeline_parallel_layers_per_stage": _layers(spec) // (layout.pp * layout.vp),
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
    }


def _layers(spec: RunSpec) -> int:
    assert isinstance(spec.model, DecoderShape), "unsupported refuses any other"
    return spec.model.num_layers


def _schedule(spec: RunSpec) -> dict[str, Any]:
    """Return the learning rate schedule; a constant rate is a decay of zero steps after the end."""
    training, plan = spec.training, spec.training.lr_schedule
    batch = training.global_batch if plan.unit == "samples" else 1
    warmup = plan.warmup // batch
    if plan.kind == "constant":
        length = max(training.steps, warmup)
        return {"warmup_steps": warmup, "total_steps": length, "decay_ratio": 0.0}
    return {
        "warmup_steps": warmup,
        "total_steps": plan.decay // batch if plan.decay else training.steps,
        "decay_type": plan.kind,
        "min_lr_factor": plan.min_lr / training.lr,
    }


def _layout_problems(spec: RunSpec, model: DecoderShape) -> Iterator[str]:
    layout = spec.layout
    if layout.tp > 1 and not layout.sequence_parallel:
        yield (
            "layout.tp without sequence_parallel: torchtitan's tensor parallelism includes "
            "sequence parallelism; set layout.sequence_parallel=true"
        )
    if layout.zero_stage == 0 and spec.dp > 1 and layout.model_devices > 1:
        yield (
            "layout.zero_stage 0 with tp, pp or cp: torchtitan's DDP does not support other axes; "
            "use layout.zero_stage=3"
        )
    if layout.cp > 1 and spec.cluster.device == "cpu":
        yield "layout.cp > 1: torch has no context parallelism on a CPU; use layout.cp=1"
    if layout.dp_shard is not None and layout.dp_shard % layout.cp:
        yield f"layout.dp_shard {layout.dp_shard} must be a multiple of layout.cp {layout.cp}"
    yield from unequal_stages(spec, "torchtitan")


def _expert_problems(spec: RunSpec, model: DecoderShape) -> Iterator[str]:
    if model.num_experts == 1:
        return
    if spec.layout.pp > 1:
        yield "layout.pp > 1: torchtitan's qwen3 has no pipeline stages; use layout.pp=1"
    if spec.layout.ep > 1 and spec.cluster.device == "cpu":
        yield "layout.ep > 1: torchtitan sorts tokens by a Triton kernel; on a CPU use layout.ep=1"
    if model.shared_ffn_size % model.ffn_size:
        yield (
            f"model.shared_ffn_size {model.shared_ffn_size}: torchtitan's shared experts have the "
            f"width of the others; use a multiple of model.ffn_size {model.ffn_size}"
        )


def _precision_problems(spec: RunSpec) -> list[str]:
    layout, dtype = spec.layout, spec.training.dtype
    sharded = layout.cp > 1 or (layout.zero_stage >= 2 and layout.shards(spec.dp) > 1)
    if dtype == "bf16" and not sharded and layout.tp * layout.pp > 1:
        return [
            "training.dtype bf16 without FSDP: torchtitan's mixed precision needs FSDP; set "
            "training.dtype=fp32, or shard over data-parallel ranks"
        ]
    return []


def _schedule_problems(spec: RunSpec) -> list[str]:
    training, plan = spec.training, spec.training.lr_schedule
    batch = training.global_batch if plan.unit == "samples" else 1
    problems: list[str] = []
    if plan.warmup % batch or (plan.decay or 0) % batch:
        problems.append(
            "training.lr_schedule: torchtitan counts steps, so warmup and decay must be multiples "
            f"of the global batch {batch}"
        )
    if plan.decay is not None and plan.decay < training.steps * batch:
        problems.append(
            f"training.lr_schedule.decay {plan.decay} must not end before training.steps: "
            "torchtitan's learning rate does not stay at its minimum"
        )
    return problems
