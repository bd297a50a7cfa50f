"""Why the trainer cannot run its input: what contradicts itself or does not divide evenly."""

from __future__ import annotations

from paceline.trainer.config import (
    COMPUTE_DTYPES,
    DECAYS,
    FP8_RECIPES,
    LATENT_FILES,
    LATENT_SOURCES,
    LEVELS,
    LOSSES,
    MEANS,
    MESH_AXES,
    OTHER_AXES,
    PACKINGS,
    RECOMPUTE,
    SOURCES,
    UNITS,
    DataConfig,
    LayoutConfig,
    TrainerConfig,
)
from paceline.trainer.model_config import FluxConfig, ModelConfig
from paceline.trainer.parallel.stages import schedule_problems, stage_layers
from paceline.trainer.wording import counted

DOCUMENT_SOURCES = ("stdlib", "text", "jsonl", "indexed")
BLOCK_SCALED = ("blockwise", "mxfp8", "nvfp4")
"""Recipes of low precision whose weight gradients sum over blocks of tokens."""
TOKEN_FILES = ("tokens", "indexed")
"""Sources that a mask can go with."""


def config_problems(config: TrainerConfig, world_size: int) -> list[str]:
    """Why this trainer cannot run the input, one sentence each; empty when it can."""
    present = layout_features(config)
    model, layout = config.model, config.layout
    if isinstance(model, FluxConfig):
        sizes = flux_size_problems(model, layout)
    else:
        sizes = decoder_size_problems(model, config)
    return (
        world_problems(config, world_size)
        + [rule.reason for rule in config.layout_rules if rule.features <= present]
        + level_problems(config)
        + batch_problems(config)
        + data_problems(config.data, model.kind)
        + evaluation_problems(config)
        + sizes
    )


def world_problems(config: TrainerConfig, world_size: int) -> list[str]:
    """What is unknown, or asks for another number of processes, one sentence each."""
    layout, training = config.layout, config.training
    problems: list[str] = []
    if layout.zero_stage not in (0, 1, 2, 3):
        problems.append(f"layout.zero_stage {layout.zero_stage}: use 0, 1, 2 or 3")
    if layout.recompute not in RECOMPUTE:
        problems.append(f"layout.recompute {layout.recompute}: use one of {', '.join(RECOMPUTE)}")
    if training.dtype not in COMPUTE_DTYPES:
        problems.append(f"training.dtype {training.dtype}: use one of {', '.join(COMPUTE_DTYPES)}")
    if training.fp8_recipe not in FP8_RECIPES:
        allowed = ", ".join(FP8_RECIPES)
        problems.append(f"training.fp8_recipe {training.fp8_recipe}: use one of {allowed}")
    plan = training.lr_schedule
    if plan.kind not in DECAYS:
        problems.append(f"training.lr_schedule.kind {plan.kind}: use one of {', '.join(DECAYS)}")
    if plan.unit not in UNITS:
        problems.append(f"training.lr_schedule.unit {plan.unit}: use one of {', '.join(UNITS)}")
    if config.world_size != world_size:
        problems.append(
            f"dp {config.dp} x tp {layout.tp} x pp {layout.pp} x cp {layout.cp}: {world_size} "
            f"processes were started; start {config.world_size}"
        )
    ranks = config.dp * layout.cp
    return problems + uneven([("dp x cp", ranks, "dp_shard", layout.dp_shard or 1)])


def level_problems(config: TrainerConfig) -> list[str]:
    """Why blocks do not know what to compute anew by a budget, one sentence each."""
    levels, num_layers = config.recompute_levels, getattr(config.model, "num_layers", None)
    if config.layout.recompute != "budget" or num_layers is None:
        return []
    problems = [
        f"recompute_levels {level}: use {', '.join(LEVELS)}" for level in {*levels} - {*LEVELS}
    ]
    if len(levels) != num_layers:
        stated, needed = counted(len(levels), "level"), counted(num_layers, "layer")
        problems.append(f"recompute_levels: {stated} for {needed}")
    return problems


def batch_problems(config: TrainerConfig) -> list[str]:
    """What of the batch sizes does not fit the layout, one sentence each."""
    layout, training = config.layout, config.training
    problems: list[str] = []
    share = config.dp * layout.micro_batch
    batch = share * config.num_microbatches
    for ragged in [size for size in training.batches if size % share][:1]:
        problems.append(
            f"training.ramp_up: a batch of {ragged} is no multiple of dp {config.dp} x micro_batch "
            f"{layout.micro_batch}"
        )
    if batch != training.global_batch:
        problems.append(
            f"training.global_batch {training.global_batch}: dp {config.dp} x micro_batch "
            f"{layout.micro_batch} x num_microbatches {config.num_microbatches} is {batch}"
        )
    schedule, num = layout.schedule, config.num_microbatches
    return problems + schedule_problems(schedule, layout.pp, layout.vp, num)


def data_problems(data: DataConfig, kind: str) -> list[str]:
    """Why samples cannot be made as asked for, one sentence each."""
    problems: list[str] = []
    if data.source not in SOURCES:
        problems.append(f"data.source {data.source}: use one of {', '.join(SOURCES)}")
    if kind == "mmdit" and data.source not in LATENT_SOURCES:
        problems.append(f"data.source {data.source}: an mmdit takes {', '.join(LATENT_SOURCES)}")
    if kind != "mmdit" and data.source in LATENT_FILES:
        problems.append(f"data.source {data.source}: a {kind} takes tokens")
    if data.packing not in PACKINGS:
        problems.append(f"data.packing {data.packing}: use one of {', '.join(PACKINGS)}")
    if data.loss_on not in LOSSES:
        problems.append(f"data.loss_on {data.loss_on}: use one of {', '.join(LOSSES)}")
    if data.loss_mask is not None and (data.source not in TOKEN_FILES or data.blend):
        problems.append(f"data.loss_mask: source {data.source} is no file of tokens")
    if data.blend and data.source != "indexed":
        problems.append(f"data.blend: mixes indexed data sets, and source is {data.source}")
    if data.split is not None and data.source in LATENT_FILES:
        problems.append("data.split: latents are not split; use a text or token source")
    if data.split is not None and not 0 <= data.split_part < len(data.split):
        parts = counted(len(data.split), "part")
        problems.append(f"data.split_part {data.split_part}: split has {parts}")
    if data.packing == "padded" and data.blend:
        problems.append("data.packing padded: its samples are of one data set, so no data.blend")
    if data.packing == "padded" and data.source == "tokens":
        problems.append("data.packing padded: a token file has no records; use jsonl or text")
    if data.document_mask and (data.source not in DOCUMENT_SOURCES or data.packing == "padded"):
        allowed = ", ".join(DOCUMENT_SOURCES)
        problems.append(f"data.document_mask: is for packed samples of {allowed}")
    return problems


def evaluation_problems(config: TrainerConfig) -> list[str]:
    """Why the model cannot be tried as asked for, one sentence each."""
    evaluation, source = config.training.evaluation, config.data.source
    problems: list[str] = []
    if evaluation is not None and evaluation.mean not in MEANS:
        problems.append(
            f"training.evaluation.mean {evaluation.mean}: use one of {', '.join(MEANS)}"
        )
    if evaluation is not None and evaluation.loss_mask is not None and source not in TOKEN_FILES:
        problems.append(f"training.evaluation.loss_mask: source {source} is no file of tokens")
    return problems


def decoder_size_problems(model: ModelConfig, config: TrainerConfig) -> list[str]:
    """What of a decoder a layout cannot divide: a part too short would be a wrong result."""
    layout, seq_len = config.layout, config.training.seq_len
    tp, cp, exchange = layout.tp, layout.cp, layout.cp_exchange if layout.cp > 1 else ""
    problems = uneven(
        [
            ("key/value heads", model.kv_heads, "tp", tp),
            ("ffn_size", model.ffn_size, "tp", tp),
            ("padded_vocab", model.padded_vocab, "tp", tp),
            ("seq_len", seq_len, "2 x cp", 2 * cp if cp > 1 else 1),
            ("seq_len", seq_len, "tp x cp", tp * cp if layout.sequence_parallel else 1),
            ("query heads", model.num_heads, "tp x cp", tp * cp if exchange == "all-to-all" else 1),
        ]
    )
    if model.positions == "learned" and seq_len > model.max_positions:
        problems.append(
            f"training.seq_len {seq_len}: "
            f"the model has only {model.max_positions} learned positions"
        )
    width = model.head_dim
    if exchange == "ring" and config.device == "cuda" and (width % 8 or width > 256):
        problems.append(f"heads {width} wide: a ring on a GPU takes multiples of 8 up to 256")
    if exchange == "ring" and model.dropped_probabilities:
        problems.append("model.attention_dropout: attention in a ring drops nothing")
    if exchange == "ring" and model.sliding_window is not None:
        problems.append("model.sliding_window: attention in a ring has no window")
    problems += low_precision_problems(model, config)
    try:
        stage_layers(model.num_layers, layout.pp, layout.vp)
    except ValueError as error:
        problems.append(str(error))
    return problems


def low_precision_problems(model: ModelConfig, config: TrainerConfig) -> list[str]:
    """Sides of a rank's matrices that blocks with one scale, or a GPU's tiles, do not divide."""
    recipe, layout = config.training.low_precision_recipe, config.layout
    if recipe is None:
        return []
    block, tp = block_of(recipe, config.device), layout.tp
    heads, kv_heads = model.num_heads * model.head_dim, model.kv_heads * model.head_dim
    widths = {
        "hidden_size": model.hidden_size,
        "query heads": heads // tp,
        "key/value heads": kv_heads // tp,
        "ffn_size": model.ffn_size // tp,
    }
    rows = layout.micro_batch * config.training.seq_len // layout.cp
    problems = [
        f"{what}: a rank's matrices are {width} wide, and {recipe} takes multiples of {block}"
        for what, width in widths.items()
        if width % block
    ]
    if recipe in BLOCK_SCALED and rows % block:
        has = counted(rows, "token")
        problems.append(f"a micro-batch has {has}, and {recipe} takes multiples of {block}")
    return problems


def block_of(recipe: str, device: str) -> int:
    """What must divide the sides of a matrix in a recipe of low precision, 1 where nothing must."""
    on_gpu = device == "cuda"
    blocks = {"blockwise": 128, "mxfp8": 32, "nvfp4": 128 if on_gpu else 16}
    return blocks.get(recipe, 16 if on_gpu else 1)


def flux_size_problems(model: FluxConfig, layout: LayoutConfig) -> list[str]:
    """What of a diffusion transformer a layout cannot divide."""
    return uneven(
        [
            ("heads", model.num_heads, "tp", layout.tp),
            ("MLP width", model.mlp_ratio * model.hidden_size, "tp", layout.tp),
            ("text tokens", model.text_len, "cp", layout.cp),
            ("image tokens", model.patches**2, "cp", layout.cp),
        ]
    )


def uneven(parts: list[tuple[str, int, str, int]]) -> list[str]:
    """(what, its size, what divides it, that number) -> those that leave a remainder."""
    return [
        f"{what} {size}: {by} {number} does not divide it"
        for what, size, by, number in parts
        if size % number
    ]


def layout_features(config: TrainerConfig) -> frozenset[str]:
    """The names by which the rules speak of a layout, as whoever wrote the rules derives them."""
    layout = config.layout
    sizes = {axis: getattr(layout, axis, config.dp) for axis in (*MESH_AXES, *OTHER_AXES)}
    axes = {axis: size > 1 for axis, size in sizes.items()}
    chunked = layout.schedule == "1f1b" and axes["pp"] and axes["vp"]
    schedule = "interleaved" if chunked else layout.schedule
    shard = layout.dp_shard
    by_budget, shared = layout.recompute == "budget", layout.recompute_budget is not None
    present = {
        **axes,
        **{f"no-{axis}": not used for axis, used in axes.items()},
        "sp": layout.sequence_parallel,
        f"zero{layout.zero_stage}": True,
        "dp-shard": shard is not None,
        "hybrid": shard is not None and shard < config.dp * layout.cp,
        "sync-every": layout.gradient_sync == "every",
        schedule: axes["pp"] or schedule != "1f1b",
        layout.cp_exchange: axes["cp"] or layout.cp_exchange != "all-gather",
        layout.recompute: layout.recompute != "none",
        "budget without share": by_budget and not shared,
        "share without budget": shared and not by_budget,
        "compile": config.training.compile != "none",
        "tied": config.model.tied_embeddings,
        "document-mask": config.data.document_mask,
        "mmdit": config.model.kind == "mmdit",
        config.training.dtype: True,
        config.device: True,
    }
    return frozenset(name for name, there in present.items() if there)
