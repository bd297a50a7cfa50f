"""Checks of the configuration against the number of processes."""

from __future__ import annotations

from paceline.trainer.config import MESH_AXES, TrainerConfig
from paceline.trainer.model_config import FluxConfig
from paceline.trainer.parallel.stages import schedule_problems


def config_problems(config: TrainerConfig, world_size: int) -> list[str]:
    """Return why this number of processes cannot run the configuration, one sentence each.

    Without these checks, sizes that do not divide evenly would silently give wrong results.
    """
    layout, model, seq_len = config.layout, config.model, config.training.seq_len
    tp, cp, ranks = layout.tp, layout.cp, config.dp * layout.cp
    problems: list[str] = []
    if config.world_size != world_size:
        sizes = " x ".join(f"{axis} {getattr(layout, axis, config.dp)}" for axis in MESH_AXES)
        problems.append(f"{sizes}: {world_size} processes were started; start {config.world_size}")
    share = config.dp * layout.micro_batch
    batch = share * config.num_microbatches
    if batch != config.training.global_batch or any(b % share for b in config.training.batches):
        problems.append(
            f"training.global_batch {config.training.global_batch}: dp {config.dp} x micro_batch "
            f"{layout.micro_batch} x num_microbatches {config.num_microbatches} is {batch}, and "
            "every batch is a multiple of dp x micro_batch"
        )
    parts = [("dp x cp", ranks, "dp_shard", layout.dp_shard or 1)]
    if isinstance(model, FluxConfig):
        parts += [
            ("heads", model.num_heads, "tp", tp),
            ("MLP width", model.mlp_ratio * model.hidden_size, "tp", tp),
            ("text tokens", model.text_len, "cp", cp),
            ("image tokens", model.patches**2, "cp", cp),
        ]
    else:
        head_ranks = tp * cp if cp > 1 and layout.cp_exchange == "all-to-all" else 1
        parts += [
            ("key/value heads", model.kv_heads, "tp", tp),
            ("ffn_size", model.ffn_size, "tp", tp),
            ("padded_vocab", model.padded_vocab, "tp", tp),
            ("seq_len", seq_len, "2 x cp", 2 * cp if cp > 1 else 1),
            ("seq_len", seq_len, "tp x cp", tp * cp if layout.sequence_parallel else 1),
            ("query heads", model.num_heads, "tp x cp", head_ranks),
            ("num_experts", model.num_experts, "ep", layout.ep),
            ("dp x cp", ranks, "ep", layout.ep),
        ]
    problems += [
        f"{what} {size}: {by} {number} does not divide it"
        for what, size, by, number in parts
        if size % number
    ]
    return problems + schedule_problems(
        layout.schedule, layout.pp, layout.vp, config.num_microbatches
    )
