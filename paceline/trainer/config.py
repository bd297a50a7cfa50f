"""The trainer's input: one resolved JSON file, schema 1."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from paceline.trainer.model_config import MODELS, Model, ModelConfig
from paceline.trainer.side_outputs import MlperfConfig, ProfileConfig

SCHEMA = 1
MESH_AXES = ("pp", "dp", "cp", "tp")
"""Axes that ranks are spread over, the outermost first: ranks of the last one are neighbours."""
OTHER_AXES = ("vp", "ep")
NARROW = ("fp8", "mxfp8", "nvfp4")
"""What only matrix products are computed in."""
COMPUTE_DTYPES = ("fp32", "bf16", "fp16", "fp64", *NARROW)
FP8_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")
RECOMPUTE = ("none", "selective", "full", "budget")
LEVELS = ("full", "ffn", "activation", "none")
"""What of a block is computed anew, from all of it to nothing."""
DECAYS, UNITS = ("constant", "linear", "cosine"), ("steps", "samples")
PACKINGS, LOSSES, MEANS = ("packed", "padded"), ("all", "text"), ("targets", "samples")
LATENT_FILES = ("latents", "webdataset")
SOURCES = ("synthetic", "stdlib", "text", "jsonl", "tokens", "indexed", *LATENT_FILES)
LATENT_SOURCES = ("synthetic", *LATENT_FILES)

T = TypeVar("T")


class ConfigError(Exception):
    """The input asks for something that this trainer cannot do; the message is one sentence."""


@dataclass(frozen=True)
class LrScheduleConfig:
    """How the learning rate rises and falls; see `LearningRate`."""

    kind: str
    warmup: int
    decay: int | None
    min_lr: float
    unit: str


@dataclass(frozen=True)
class LossScaleConfig:
    """How fp16's loss scale begins and moves; see `LossScaler`."""

    initial: float = 65536.0
    window: int = 2000
    hysteresis: int = 1


@dataclass(frozen=True)
class EvaluationConfig:
    """When the model is tried on samples that it never trains on; see `Evaluator`."""

    every_samples: int
    skip_first: int
    samples: int
    target: float | None
    path: str | None
    loss_mask: str | None = None
    mean: str = "targets"
    """What counts the same in the result: every one of the `targets`, or of the `samples`."""


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
    lr_schedule: LrScheduleConfig
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_clip: float
    seed: int
    ramp_up: tuple[tuple[int, int], ...]
    """(until, batch): a smaller batch before `until` samples are behind; see `BatchSizes`."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    evaluation: EvaluationConfig | None = None
    initial_weights: str | None = None
    """A checkpoint that the model's weights are taken from."""
    fp8_recipe: str = "tensorwise"
    """What shares a scale in fp8's products; see `low_precision_product`."""

    @property
    def low_precision_recipe(self) -> str | None:
        """What `low_precision_product` takes; None where no product is narrower than 16 bits."""
        if self.dtype not in NARROW:
            return None
        return self.fp8_recipe if self.dtype == "fp8" else self.dtype

    @property
    def batches(self) -> list[int]:
        """Every global batch that a step may have."""
        return [*(batch for _, batch in self.ramp_up), self.global_batch]


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from."""

    source: str
    path: str | None
    token_dtype: str
    text_key: str
    packing: str
    """`packed` windows of one line of tokens, or one record a sample, cut or `padded`."""
    loss_on: str
    """Of padded samples: `all` positions, or the `text` alone."""
    loss_mask: str | None = None
    """A byte for each token of a token file, 0 where it is no target."""
    split: tuple[float, ...] | None = None
    """Sizes of the source's parts, in proportion to each other."""
    split_part: int = 0
    document_mask: bool = False
    """Whether tokens of a packed window attend to their own document alone."""
    blend: tuple[tuple[str, float], ...] = ()
    """(path, weight) of indexed data sets that are mixed, in place of `path`."""


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
    gradient_sync: str | None
    recompute_budget: float | None = None


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters, and what trains beside them."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    train_rest: bool
    lr: float | None = None
    """The adapters' highest rate where it is another than the rest's."""

    def trains(self, name: str) -> bool:
        """Whether a parameter has a gradient: adapters always, the rest unless it is adapted."""
        *_, layer, kind = name.split(".")
        adapted = kind == "weight" and layer in self.targets
        return is_adapter(name) or (self.train_rest and not adapted)


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of an adapter's matrices."""
    return name.rpartition(".")[2] in ("lora_a", "lora_b")


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state is saved, and which one training begins with."""

    every: int | None
    resume: str | None
    asynchronous: bool


@dataclass(frozen=True)
class LayoutRule:
    """A combination that is refused when all of its features are present, and why in a sentence."""

    features: frozenset[str]
    reason: str


@dataclass(frozen=True)
class TrainerConfig:
    """Everything that one training needs to know."""

    model: Model
    lora: LoraConfig | None
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
    """Parameters of the whole model, adapters included."""
    expected_trainable: int
    recompute_levels: tuple[str, ...] = ()
    """What of each block is computed anew where recompute is `budget`, the first layer's first."""
    mlperf: MlperfConfig | None = None
    profile: ProfileConfig | None = None

    @property
    def world_size(self) -> int:
        """Ranks that the layout needs: the product of MESH_AXES."""
        return self.dp * prod(getattr(self.layout, axis) for axis in MESH_AXES if axis != "dp")

    @property
    def draws(self) -> bool:
        """Whether training drops anything at random."""
        model, lora = self.model, self.lora
        decoder = isinstance(model, ModelConfig)
        return bool(
            (lora and lora.dropout) or (decoder and (model.dropout or model.dropped_probabilities))
        )

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
        "model": parse_model(raw.get("model")),
        "lora": parse_lora(raw),
        "training": _training(raw),
        "data": _record(DataConfig, raw, "data"),
        "layout": _record(LayoutConfig, raw, "layout"),
        "layout_rules": _rules(raw.get("layout_rules")),
        "checkpoint": _record(CheckpointConfig, raw, "checkpoint"),
        "mlperf": _optional(MlperfConfig, raw, "mlperf"),
        "profile": _optional(ProfileConfig, raw, "profile"),
    }
    return _build(TrainerConfig, {**raw, **parts}, "")


def read_json(path: str) -> dict[str, Any]:
    """The JSON object in a file; raises ConfigError when it holds something else."""
    raw = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: holds no JSON object")
    return raw


def parse_model(raw: Any) -> Model:
    """The model's sizes; one that states no kind is a decoder. Raises ConfigError."""
    kind = raw.get("kind", "decoder") if isinstance(raw, Mapping) else "decoder"
    if kind not in MODELS:
        raise ConfigError(f"model.kind {kind}: use one of {', '.join(MODELS)}")
    return _record(MODELS[kind], {"model": raw}, "model")


def parse_lora(raw: Mapping[str, Any]) -> LoraConfig | None:
    """The adapters that an object names, if any. Raises ConfigError."""
    return _optional(LoraConfig, raw, "lora")


def _training(raw: Mapping[str, Any]) -> TrainingConfig:
    part = raw.get("training")
    if not isinstance(part, Mapping):
        raise ConfigError("training: is missing or no object")
    inner = {
        "lr_schedule": _record(LrScheduleConfig, part, "lr_schedule", "training."),
        "loss_scale": _build(LossScaleConfig, part.get("loss_scale") or {}, ""),
        "evaluation": _optional(EvaluationConfig, part, "evaluation", "training."),
    }
    return _build(TrainingConfig, {**part, **inner}, "training.")


def _rules(raw: Any) -> tuple[LayoutRule, ...]:
    if not isinstance(raw, list):
        raise ConfigError("layout_rules: is missing or no list")
    try:
        return tuple(LayoutRule(frozenset(rule["features"]), rule["reason"]) for rule in raw)
    except (KeyError, TypeError) as error:
        raise ConfigError("layout_rules: every rule has features and a reason") from error


def _record(kind: type[T], raw: Mapping[str, Any], name: str, where: str = "") -> T:
    part = raw.get(name)
    if not isinstance(part, Mapping):
        raise ConfigError(f"{where}{name}: is missing or no object")
    return _build(kind, part, f"{where}{name}.")


def _optional(kind: type[T], raw: Mapping[str, Any], name: str, where: str = "") -> T | None:
    return None if raw.get(name) is None else _record(kind, raw, name, where)


def _build(kind: type[T], part: Mapping[str, Any], where: str) -> T:
    declared = fields(kind)  # type: ignore[arg-type]
    missing = [f.name for f in declared if f.name not in part and f.default is MISSING]
    if missing:
        raise ConfigError(f"{where}{missing[0]}: is missing")
    return kind(**{f.name: part[f.name] for f in declared if f.name in part})
