"""The trainer's input: one resolved JSON file, schema 1."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

SCHEMA = 1
COMPUTE_DTYPES = ("fp32", "bf16", "fp16", "fp64")
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


@dataclass(frozen=True)
class TrainerConfig:
    """Everything that one training needs to know."""

    model: ModelConfig
    training: TrainingConfig
    data: DataConfig
    layout: LayoutConfig
    dp: int
    num_microbatches: int
    device: str
    threads: int | None
    expected_parameters: int

    @property
    def tokens_per_rank(self) -> int:
        """Tokens that one rank trains on in a step; windows are packed, so all of them are real."""
        return self.num_microbatches * self.layout.micro_batch * self.training.seq_len

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
    for axis in ("tp", "pp", "cp", "vp", "ep"):
        if getattr(layout, axis) != 1:
            problems.append(
                f"layout.{axis} {getattr(layout, axis)}: only data parallelism is built in; use 1"
            )
    if layout.zero_stage not in (0, 1, 2, 3):
        problems.append(f"layout.zero_stage {layout.zero_stage}: use 0, 1, 2 or 3")
    if layout.recompute not in ("none", "full"):
        problems.append(f"layout.recompute {layout.recompute}: not built in; use none or full")
    if config.dp != world_size:
        problems.append(f"dp {config.dp}: {world_size} processes were started; start {config.dp}")
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
    return problems


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
