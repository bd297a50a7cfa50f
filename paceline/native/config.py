"""The trainer's input: one resolved JSON file, schema 1."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from stages import schedule_problems, stage_layers

SCHEMA = 1
COMPUTE_DTYPES = ("fp32", "bf16", "fp16", "fp64")
RECOMPUTE = ("none", "selective", "full")
SOURCES = ("synthetic", "stdlib", "text", "jsonl", "tokens")

T = TypeVar("T")


class ConfigError(Exception):
    """The input asks for something that this trainer cannot do; the message is one sentence."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape; null sizes mean the usual value, which the properties fill in."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int | None
    head_size: int | None
    ffn_size: int
    vocab_size: int
    padded_vocab: int
    gated_ffn: bool
    activation: str
    norm: str
    norm_position: str
    norm_eps: float
    final_norm: bool
    embedding_norm: bool
    positions: str
    max_positions: int
    position_offset: int
    rope_theta: float
    bias: bool
    tied_embeddings: bool
    embedding_size: int | None

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def embed_dim(self) -> int:
        """Width of the token embedding."""
        return self.embedding_size or self.hidden_size


@dataclass(frozen=True)
class TrainingConfig:
    """What is trained, apart from the model's shape."""

    seq_len: int
    global_batch: int
    steps: int
    dtype: str
    matmul_precision: str
    compile: str
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_clip: float
    seed: int


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from."""

    source: str
    path: str | None
    token_dtype: str
    text_key: str


@dataclass(frozen=True)
class LayoutConfig:
    """Sizes of the parallel axes."""

    tp: int
    pp: int
    cp: int
    vp: int
    ep: int
    zero_stage: int
    micro_batch: int
    recompute: str
    schedule: str
    sequence_parallel: bool
    dp_shard: int | None
    cp_exchange: str


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state is saved, and which one training begins with."""

    every: int | None
    resume: str | None
    asynchronous: bool


@dataclass(frozen=True)
class LayoutRule:
    """A combination that is refused when all of its features are present; the reason is one sentence."""

    features: frozenset[str]
    reason: str


@dataclass(frozen=True)
class TrainerConfig:
    """Everything that one training needs to know."""

    model: ModelConfig
    training: TrainingConfig
    data: DataConfig
    layout: LayoutConfig
    layout_rules: tuple[LayoutRule, ...]
    checkpoint: CheckpointConfig
    dp: int
    num_microbatches: int
    device: str
    threads: int | None
    hang_limit_s: float
    memory_limit_bytes: float | None
    memory_parts: bool
    expected_parameters: int

    @property
    def world_size(self) -> int:
        """Ranks that the layout needs: dp x tp x pp x cp."""
        return self.dp * self.layout.tp * self.layout.pp * self.layout.cp

    def layout_record(self) -> dict[str, Any]:
        """The layout with the sizes derived from it, for the start line."""
        return {**asdict(self.layout), "dp": self.dp, "num_microbatches": self.num_microbatches}


def parse_config(raw: Mapping[str, Any]) -> TrainerConfig:
    """The trainer's input from decoded JSON; keys that this version does not know are ignored.

    Raises ConfigError for a missing key or another schema.
    """
    if raw.get("schema") != SCHEMA:
        raise ConfigError(
            f"schema: {raw.get('schema')!r} is not the {SCHEMA} that this trainer reads"
        )
    parts = {
        "model": _record(ModelConfig, raw, "model"),
        "training": _record(TrainingConfig, raw, "training"),
        "data": _record(DataConfig, raw, "data"),
        "layout": _record(LayoutConfig, raw, "layout"),
        "layout_rules": _rules(raw.get("layout_rules")),
        "checkpoint": _record(CheckpointConfig, raw, "checkpoint"),
    }
    return _build(TrainerConfig, {**raw, **parts}, "")


def read_json(path: str) -> dict[str, Any]:
    """The JSON object in a file; raises ConfigError when it holds something else."""
    raw = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: holds no JSON object")
    return raw


def config_problems(config: TrainerConfig, world_size: int) -> list[str]:
    """Why this trainer cannot run the input, one sentence each; empty when it can."""
    layout, training, model = config.layout, config.training, config.model
    problems: list[str] = []
    if layout.zero_stage not in (0, 1, 2, 3):
        problems.append(f"layout.zero_stage {layout.zero_stage}: use 0, 1, 2 or 3")
    if layout.recompute not in RECOMPUTE:
        problems.append(f"layout.recompute {layout.recompute}: use one of {', '.join(RECOMPUTE)}")
    if config.world_size != world_size:
        problems.append(
            f"dp {config.dp} x tp {layout.tp} x pp {layout.pp} x cp {layout.cp}: {world_size} "
            f"processes were started; start {config.world_size}"
        )
    present = layout_features(config)
    problems += [rule.reason for rule in config.layout_rules if rule.features <= present]
    batch = config.dp * layout.micro_batch * config.num_microbatches
    if batch != training.global_batch:
        problems.append(
            f"training.global_batch {training.global_batch}: dp {config.dp} x micro_batch "
            f"{layout.micro_batch} x num_microbatches {config.num_microbatches} is {batch}"
        )
    if training.dtype not in COMPUTE_DTYPES:
        problems.append(f"training.dtype {training.dtype}: use one of {', '.join(COMPUTE_DTYPES)}")
    if config.data.source not in SOURCES:
        problems.append(f"data.source {config.data.source}: use one of {', '.join(SOURCES)}")
    if model.positions == "learned" and training.seq_len > model.max_positions:
        problems.append(
            f"training.seq_len {training.seq_len}: the model has only "
            f"{model.max_positions} learned positions"
        )
    return problems + size_problems(config)


def size_problems(config: TrainerConfig) -> list[str]:
    """What does not divide evenly, one sentence each: a part too short would be a wrong result."""
    model, layout, seq_len = config.model, config.layout, config.training.seq_len
    tp, cp, ranks = layout.tp, layout.cp, config.dp * layout.cp
    exchange = layout.cp_exchange if cp > 1 else ""
    parts = [
        ("key/value heads", model.kv_heads, "tp", tp),
        ("ffn_size", model.ffn_size, "tp", tp),
        ("padded_vocab", model.padded_vocab, "tp", tp),
        ("seq_len", seq_len, "2 x cp", 2 * cp if cp > 1 else 1),
        ("seq_len", seq_len, "tp x cp", tp * cp if layout.sequence_parallel else 1),
        ("query heads", model.num_heads, "tp x cp", tp * cp if exchange == "all-to-all" else 1),
        ("dp x cp", ranks, "dp_shard", layout.dp_shard or 1),
    ]
    problems = [
        f"{what} {size}: {by} {number} does not divide it"
        for what, size, by, number in parts
        if size % number
    ]
    if exchange == "ring" and config.device == "cuda":
        width = model.head_dim
        if width % 8 or width > 256:
            problems.append(f"heads {width} wide: a ring on a GPU takes multiples of 8 up to 256")
    try:
        stage_layers(model.num_layers, layout.pp, layout.vp)
    except ValueError as error:
        problems.append(str(error))
    schedule, num = layout.schedule, config.num_microbatches
    return problems + schedule_problems(schedule, layout.pp, layout.vp, num)


def layout_features(config: TrainerConfig) -> frozenset[str]:
    """The names by which the rules speak of a layout, as whoever wrote the rules derives them."""
    layout = config.layout
    axes = {axis: getattr(layout, axis) > 1 for axis in ("tp", "pp", "cp", "vp")}
    chunked = layout.schedule == "1f1b" and axes["pp"] and axes["vp"]
    schedule = "interleaved" if chunked else layout.schedule
    shard = layout.dp_shard
    present = {
        **axes,
        **{f"no-{axis}": not used for axis, used in axes.items()},
        "dp": config.dp > 1,
        "ep": layout.ep > 1,
        "sp": layout.sequence_parallel,
        f"zero{layout.zero_stage}": True,
        "dp-shard": shard is not None,
        "hybrid": shard is not None and shard < config.dp * layout.cp,
        schedule: axes["pp"] or schedule != "1f1b",
        layout.cp_exchange: axes["cp"] or layout.cp_exchange != "all-gather",
        layout.recompute: layout.recompute != "none",
        "compile": config.training.compile != "none",
        "tied": config.model.tied_embeddings,
        config.training.dtype: True,
        config.device: True,
    }
    return frozenset(name for name, there in present.items() if there)


def _rules(raw: Any) -> tuple[LayoutRule, ...]:
    if not isinstance(raw, list):
        raise ConfigError("layout_rules: is missing or no list")
    try:
        return tuple(LayoutRule(frozenset(rule["features"]), rule["reason"]) for rule in raw)
    except (KeyError, TypeError) as error:
        raise ConfigError("layout_rules: every rule has features and a reason") from error


def _record(kind: type[T], raw: Mapping[str, Any], name: str) -> T:
    part = raw.get(name)
    if not isinstance(part, Mapping):
        raise ConfigError(f"{name}: is missing or no object")
    return _build(kind, part, f"{name}.")


def _build(kind: type[T], part: Mapping[str, Any], where: str) -> T:
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    missing = [name for name in names if name not in part]
    if missing:
        raise ConfigError(f"{where}{missing[0]}: is missing")
    return kind(**{name: part[name] for name in names})
