"""What torchtitan 0.2 cannot do of a RunSpec, one sentence each."""

from __future__ import annotations

from typing import Any

from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape
from paceline.engines.launch.model_options import option_problems
from paceline.engines.launch.programs import unknown_settings
from paceline.engines.samples import data_problems, training_problems

ENGINE_SETTINGS = ("compile_loss",)
LLAMA: dict[str, Any] = {
    "norm": "rmsnorm",
    "positions": "rope",
    "gated_ffn": True,
    "activation": "silu",
    "bias": False,
    "tied_embeddings": False,
    "norm_position": "pre",
    "final_norm": True,
    "embedding_norm": False,
    "embedding_size": None,
    "num_experts": 1,
    "dropout": 0.0,
    "dropped_probabilities": 0.0,
}
"""What the llama3 of torchtitan has, whatever its arguments."""


def unsupported(spec: RunSpec) -> list[str]:
    """What this engine cannot do of `spec`, one sentence each."""
    model = spec.model
    if not isinstance(model, DecoderShape):
        return [f"model.kind {model.kind} is not in this engine: it trains torchtitan's llama3"]
    problems = unknown_settings(spec, ENGINE_SETTINGS) + _shape_problems(model)
    if spec.lora:
        problems.append("lora is not in this engine: torchtitan trains whole models")
    problems += data_problems(spec) + _layout_problems(spec) + _precision_problems(spec)
    return problems + _schedule_problems(spec) + training_problems(spec)


def _shape_problems(model: DecoderShape) -> list[str]:
    problems = [
        f"model.{name.replace('dropped_probabilities', 'attention_dropout')} "
        f"{getattr(model, name)}: torchtitan's llama3 has {value}"
        for name, value in LLAMA.items()
        if getattr(model, name) != value
    ]
    if model.head_dim * model.num_heads != model.hidden_size:
        problems.append(
            f"model.head_size {model.head_dim}: torchtitan's llama3 has hidden_size / num_heads"
        )
    return problems + option_problems(model)


def _layout_problems(spec: RunSpec) -> list[str]:
    layout, problems = spec.layout, list[str]()
    if layout.ep > 1:
        problems.append("layout.ep > 1: a llama3 has no experts, so use layout.ep=1")
    if layout.zero_stage == 1:
        problems.append("layout.zero_stage 1: torchtitan has DDP (0) and FSDP2 (2, 3)")
    if layout.tp > 1 and not layout.sequence_parallel:
        problems.append(
            "layout.tp without sequence_parallel: torchtitan cuts the sequence wherever it cuts "
            "tensors, so set layout.sequence_parallel=true"
        )
    if layout.zero_stage == 0 and spec.dp > 1 and layout.model_devices > 1:
        problems.append(
            "layout.zero_stage 0 beside tp, pp or cp: torchtitan's DDP stands alone, so use "
            "layout.zero_stage=3"
        )
    if layout.cp > 1 and spec.cluster.device == "cpu":
        problems.append("layout.cp > 1 on a CPU: torch exchanges no keys and values there")
    if layout.cp > 1 and layout.cp_exchange == "ring":
        problems.append("layout.cp_exchange ring: torchtitan has all-gather and all-to-all")
    if layout.dp_shard is not None and layout.dp_shard % layout.cp:
        problems.append(f"layout.dp_shard {layout.dp_shard} has to be a multiple of cp {layout.cp}")
    return problems + _pipeline_problems(spec)


def _pipeline_problems(spec: RunSpec) -> list[str]:
    layout, model = spec.layout, spec.model
    if layout.pp == 1 or not isinstance(model, DecoderShape):
        return []
    problems: list[str] = []
    if layout.effective_schedule == "zero-bubble":
        problems.append("layout.schedule zero-bubble is not in this engine: use 1f1b")
    if model.num_layers % (layout.pp * layout.vp):
        problems.append(
            f"model.num_layers {model.num_layers}: stages are equal here, so use a multiple of "
            f"pp x vp = {layout.pp * layout.vp}"
        )
    return problems


def _precision_problems(spec: RunSpec) -> list[str]:
    layout, dtype = spec.layout, spec.training.dtype
    if dtype not in ("fp32", "bf16"):
        return [f"dtype {dtype} is not among fp32, bf16 in this engine"]
    sharded = layout.cp > 1 or (layout.zero_stage >= 2 and layout.shards(spec.dp) > 1)
    if dtype == "bf16" and not sharded and layout.tp * layout.pp > 1:
        return [
            "bf16 with tp or pp alone: torchtitan's mixed precision is FSDP's there, and without "
            "it all is fp32; set training.dtype=fp32, or shard over data-parallel ranks"
        ]
    return []


def _schedule_problems(spec: RunSpec) -> list[str]:
    training, plan = spec.training, spec.training.lr_schedule
    batch = training.global_batch if plan.unit == "samples" else 1
    problems: list[str] = []
    if plan.warmup % batch or (plan.decay or 0) % batch:
        problems.append(
            f"lr_schedule: torchtitan counts steps, so warmup and decay have to be multiples of "
            f"the batch {batch}"
        )
    if plan.decay is not None and plan.decay < training.steps * batch:
        problems.append(
            f"lr_schedule.decay {plan.decay}: torchtitan's rate would not stay at its lowest "
            "behind it, so let it end with training.steps or later"
        )
    return problems
