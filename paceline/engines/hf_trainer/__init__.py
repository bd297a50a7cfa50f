"""Hugging Face Trainer (transformers with accelerate): job creation and log format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from paceline.core.job import Job
from paceline.core.run import RunSpec
from paceline.engines.hf_trainer.configurations import (
    FAMILIES,
    TITLES,
    adapters,
    configuration,
    family,
    family_problems,
)
from paceline.engines.hf_trainer.log_format import LOG_FORMAT as LOG_FORMAT
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
    no,
    only,
    refusals,
    small_vocabulary,
)

REQUIREMENTS = ("transformers==5.23.0", "accelerate==1.15.0", "peft==0.21.2")
IMPORTS = ("torch", "transformers", "accelerate", "peft")
ATTENTIONS = ("sdpa", "eager", "flash_attention_2")
ENGINE_SETTINGS = {"attention": "sdpa", "optimizer": "adamw_torch_fused", "workers": 0}
"""Settings that only this engine has, with their defaults.

They are the attention implementation, the Trainer's optimizer name, and the number of processes
that prefetch samples.
"""
OUTPUT = "output"
PROGRAM_FILE = "trainer_program.py"
SETTINGS_FILE = "hf_trainer.json"


_DATA_PARALLEL = no("the Trainer is data-parallel only")
ANY_SHAPE: Support = {
    **NO_CHECKPOINTS,
    **WITHOUT_RAMP_UP,
    **SHAPE_OPTIONS,
    **DEEPSEEK,
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
SUPPORT = {TITLES[name]: {**ANY_SHAPE, **limits} for name, limits in FAMILIES.items()}


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
    return launch(spec, name, argv, python=interpreter(spec), files=files)


def settings(spec: RunSpec) -> dict[str, Any]:
    """Return the settings for `trainer_program.py`; `arguments` are the Trainer's own."""
    assert spec.model.kind == "decoder", "unsupported refuses any other"
    training = spec.training
    return {
        "model": configuration(spec.model),
        "attention": _engine_settings(spec)["attention"],
        "lora": adapters(spec.model, spec.lora) if spec.lora else None,
        "expected_parameters": spec.num_parameters,
        "arguments": arguments(spec),
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
