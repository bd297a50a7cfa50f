"""Complete closed-division logs of round 6.1, with every key that its rules require."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import sqrt
from typing import Any

from tests.mlperf.samples import EPOCH_MS, line

ADAMW = {
    "opt_name": "adamw",
    "opt_adamw_beta_1": 0.9,
    "opt_adamw_beta_2": 0.95,
    "opt_adamw_weight_decay": 0.1,
    "opt_gradient_clip_norm": 1.0,
}
COMMON = {
    "submission_org": "Example",
    "submission_platform": "2xBox",
    "submission_division": "closed",
    "seed": 1,
    "gradient_accumulation_steps": 2,
    "train_samples": 1_574_207_408,
    "lowest_numerical_precision_in_linear": "fp8",
    "lowest_numerical_precision_in_attn": "bfloat16",
    "lowest_numerical_precision_in_comm": "bfloat16",
    "tensor_parallelism": 1,
    "pipeline_parallelism": 4,
    "context_parallelism": 1,
    "expert_parallelism": 8,
    "micro_batch_size": 1,
    "config_filename": "config_2x8x1xtp1pp4cp1.sh",
}


def hyperparameters(benchmark: str, batch: int) -> dict[str, Any]:
    """Values that the closed division accepts at a global batch size."""
    return {
        "gpt_oss_20b": {
            **ADAMW,
            "max_sequence_length": 8192,
            "opt_adamw_epsilon": 1e-5,
            "opt_base_learning_rate": 4e-4,
            "opt_end_learning_rate": 4e-5,
            "opt_learning_rate_warmup_steps": 128,
            "opt_learning_rate_decay_steps": 1_199_872,
            "opt_learning_rate_decay_schedule": "cosine with linear warmup",
            "eval_samples": 1024,
            "max_steps": 1_200_000,
        },
        "deepseekv3_671b": {
            **ADAMW,
            "max_sequence_length": 4096,
            "opt_adamw_epsilon": 1e-8,
            "opt_base_learning_rate": round(2.4e-5 * sqrt(batch / 16_384), 9),
            "opt_learning_rate_warmup_steps": 4,
            "opt_learning_rate_decay_steps": 11_996,
            "opt_learning_rate_decay_schedule": "cosine with linear warmup",
            "moe_aux_loss_coeff": 0.01,
            "eval_samples": 1024,
            "max_steps": 60,
        },
        "qwen35_397b_grpo": {
            **ADAMW,
            "max_sequence_length": 65_536,
            "init_checkpoint_step": 0,
            "opt_base_learning_rate": 1e-6 * sqrt(batch / 256),
            "opt_adamw_beta_2": 0.999,
            "opt_adamw_epsilon": 1e-8,
            "opt_adamw_weight_decay": 0.0,
            "opt_gradient_clip_norm": 0.125 * sqrt(256 / batch),
            "opt_learning_rate_warmup_steps": 0,
            "opt_learning_rate_decay_schedule": "constant",
            "generation_training_rollout_temperature": 1.0,
            "generation_training_rollout_top_p": 1.0,
            "generation_validation_rollout_temperature": 0.1,
            "generation_validation_rollout_top_p": 0.95,
            "num_prompts_per_step": batch // 16,
            "num_generations_per_prompt": 16,
            "eval_samples": 251,
            "max_steps": 40,
        },
        "dlrmv4": {
            "max_sequence_length": 4096,
            "train_samples": 2_290_835_423,
            "eval_samples": 2_058_204,
            "opt_name": "Adam",
            "opt_base_learning_rate": 1e-6 * batch / 8192,
            "opt_adam_beta_1": 0.95,
            "opt_adam_beta_2": 0.999,
            "opt_adam_epsilon": 1e-8,
            "opt_weight_decay": 0.0,
            "opt_gradient_clip_norm": 1.0,
            "opt_sparse_name": "RowWiseAdagrad",
            "opt_sparse_base_learning_rate": 1e-6 * batch / 8192,
            "opt_learning_rate_warmup_steps": 24_000,
            "opt_learning_rate_warmup_start_lr": 0.0,
            "eval_every_data_pct": 0.001,
        },
    }[benchmark]


def complete_log(
    benchmark: str,
    batch: int,
    evaluations: Mapping[int, float],
    without: Collection[str] = (),
    **changes: Any,
) -> str:
    """A run with an evaluation result after each number of samples; `changes` replace values."""
    values = {
        **COMMON,
        "submission_benchmark": benchmark,
        "global_batch_size": batch,
        **hyperparameters(benchmark, batch),
        **changes,
    }
    run, step, where = EPOCH_MS + 60_000, 600_000, {}
    lines = [line("cache_clear", True, EPOCH_MS - 1), line("init_start", None, EPOCH_MS)]
    lines += [line(key, value, EPOCH_MS + 1) for key, value in values.items() if key not in without]
    lines += [line("init_stop", None, run - 1), line("run_start", None, run)]
    for at, (samples, result) in enumerate(evaluations.items()):
        start, where = run + at * step, {"samples_count": samples}
        lines += [
            line("block_start", None, start, **where),
            line("block_stop", None, start + 1, **where),
            line("eval_start", None, start + 2, **where),
            line("eval_accuracy", result, start + 3, **where),
            line("eval_stop", None, start + 4, **where),
        ]
    stop = run + len(evaluations) * step
    lines.append(line("run_stop", None, stop, status="success", **where))
    return "".join(f"{text}\n" for text in lines)
