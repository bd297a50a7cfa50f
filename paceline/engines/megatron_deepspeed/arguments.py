"""Arguments of BigScience's Megatron-DeepSpeed, and DeepSpeed's settings beside them.

As `train/tr3-1B3-baseline/tr3m-1B3-emb-norm-pile.slurm` of bigscience-workshop/bigscience has them.
"""

from __future__ import annotations

import json
from typing import Any

from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape
from paceline.engines.megatron.arguments import (
    Arguments,
    batch_arguments,
    data_prefix,
    dropout_arguments,
    layout_arguments,
    length_arguments,
    log2_of,
    optimizer_arguments,
    shape_arguments,
)

CONFIG_FILE = "ds_config.json"
STEPS_PER_PRINT = 2000
"""Beyond what is read: DeepSpeed's own lines tell a running average."""


def arguments(spec: RunSpec, config_file: str) -> Arguments:
    """Everything behind `pretrain_gpt.py`; `config_file` holds what `deepspeed_config` says."""
    model = spec.model
    assert isinstance(model, DecoderShape)
    training, own = spec.training, spec.engine_settings
    return {
        **layout_arguments(spec),
        "distributed-backend": ["gloo" if spec.cluster.device == "cpu" else "nccl"],
        **_shape(model, training.seq_len),
        **dropout_arguments(model),
        **batch_arguments(training, stepwise=own.get("spelling") == "new"),
        **length_arguments(training),
        **_precision(spec),
        **optimizer_arguments(training),
        **({"checkpoint-activations": []} if spec.layout.recompute == "full" else {}),
        **_tokenizer(spec),
        "data-path": [data_prefix(spec) or ""],
        "data-impl": ["mmap"],
        "split": [own.get("split") or "949,50,1"],
        "log-interval": [1],
        "eval-iters": [0],
        "eval-interval": [1000],
        "deepspeed": [],
        "deepspeed_config": [config_file],
        "zero-stage": [spec.layout.zero_stage],
        **({"deepspeed-activation-checkpointing": []} if spec.layout.recompute == "full" else {}),
    }


def deepspeed_config(spec: RunSpec) -> str:
    """The JSON that DeepSpeed reads; the accumulation steps follow from the batch as it grows."""
    training = spec.training
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": spec.layout.micro_batch,
        "train_batch_size": training.global_batch,
        "gradient_clipping": training.grad_clip,
        "zero_optimization": {"stage": spec.layout.zero_stage},
        "steps_per_print": STEPS_PER_PRINT,
        "wall_clock_breakdown": False,
    }
    if training.dtype == "fp16":
        scale = training.loss_scale
        config["fp16"] = {
            "enabled": True,
            "loss_scale": 0,
            "loss_scale_window": scale.window,
            "hysteresis": scale.hysteresis,
            "min_loss_scale": 1,
            "initial_scale_power": log2_of(scale.initial),
        }
    elif training.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return json.dumps(config, indent=2) + "\n"


def _shape(model: DecoderShape, seq_len: int) -> Arguments:
    shape = shape_arguments(model, seq_len)
    if model.positions == "rope":
        shape.pop("max-position-embeddings")
        shape["position-embedding-type"] = ["rotary"]
    shape["layernorm-epsilon"] = [model.norm_eps]
    if model.embedding_norm:
        shape["embed-layernorm"] = []
    if model.gated_ffn:
        unit = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}[model.activation]
        shape |= {"glu-activation": [unit], "no-bias-gelu-fusion": []}
    return shape


def _precision(spec: RunSpec) -> Arguments:
    dtype, scale = spec.training.dtype, spec.training.loss_scale
    if dtype == "fp16":
        # The study's own argument; DeepSpeed scales, and begins at 2 to that power.
        return {"fp16": [], "loss-scale": [log2_of(scale.initial)]}
    return {"bf16": []} if dtype == "bf16" else {}


def _tokenizer(spec: RunSpec) -> Arguments:
    own = spec.engine_settings
    if own.get("tokenizer"):
        return {
            "tokenizer-type": ["PretrainedFromHF"],
            "tokenizer-name-or-path": [own["tokenizer"]],
        }
    data = f"{own.get('checkout')}/data"
    return {
        "vocab-file": [own.get("vocab_file") or f"{data}/gpt2-vocab.json"],
        "merge-file": [own.get("merge_file") or f"{data}/gpt2-merges.txt"],
    }
