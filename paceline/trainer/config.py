"""The trainer's input: one resolved JSON file, schema 2.

Paceline writes the parts of its RunSpec under their own names and has checked them against each
other (`core/layout_checks.py`, `engines/native.py`). What is checked again here is what a damaged
file could turn into a wrong result: keys, choices, and sizes that ranks divide.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import cache
from math import prod
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from paceline.trainer.model_config import Model, ModelConfig

SCHEMA = 2
MESH_AXES = ("pp", "dp", "cp", "tp")
"""Axes that ranks are spread over, the outermost first: ranks of the last one are neighbors."""
NARROW = ("fp8", "mxfp8", "nvfp4")
"""Formats of GEMMs only."""
LATENT_FILES = ("latents", "webdataset")
Dtype = Literal["fp32", "bf16", "fp16", "fp64", "fp8", "mxfp8", "nvfp4"]
Fp8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"]
Mean = Literal["targets", "samples"]
Level = Literal["full", "ffn", "activation", "none"]
"""Part of a block that is recomputed, from all of it to nothing."""
Source = Literal[
    "synthetic", "stdlib", "text", "jsonl", "tokens", "indexed", "latents", "webdataset"
]

T = TypeVar("T")


class ConfigError(Exception):
    """The input is invalid or not supported; the message is one sentence."""


@dataclass(frozen=True)
class LrScheduleConfig:
    """Learning rate schedule; see `LearningRate`."""

    kind: Literal["constant", "linear", "cosine"]
    warmup: int
    decay: int | None
    min_lr: float
    unit: Literal["steps", "samples"]


@dataclass(frozen=True)
class LossScaleConfig:
    """Loss scale of fp16; see `LossScaler`."""

    initial: float = 65536.0
    window: int = 2000
    hysteresis: int = 1


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation on held-out samples; see `Evaluator`."""

    every_samples: int
    skip_first: int
    samples: int
    target: float | None
    path: str | None
    loss_mask: str | None = None
    mean: Mean = "targets"
    """Unit of the mean that is the result: `targets` or `samples`."""


@dataclass(frozen=True)
class TrainingConfig:
    """Hyperparameters of the training."""

    seq_len: int
    global_batch: int
    steps: int
    dtype: Dtype
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
    """(until, batch) pairs: a smaller batch until `until` samples; see `BatchSizes`."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    evaluation: EvaluationConfig | None = None
    initial_weights: str | None = None
    """Checkpoint with the initial weights."""
    fp8_recipe: Fp8Recipe = "tensorwise"
    """Elements that share a scale in fp8 GEMMs; see `low_precision_gemm`."""
    routing: Literal["learned", "forced", "pattern"] = "learned"
    """Choice of experts: by the router's scores, round robin, or by `routing_weights`."""
    routing_weights: tuple[int, ...] = ()
    """Loads of the experts of a layer, in any unit."""
    router_aux_loss: float = 0.0
    """Factor of the loss that balances experts."""
    router_z_loss: float = 0.0
    """Factor of the loss that keeps the router's logits small."""
    router_bias_update_rate: float = 1e-3
    """Step of the routers' choice biases."""
    mtp_loss_weight: float = 0.3
    """Weight of the loss of multi-token prediction."""

    @property
    def low_precision_recipe(self) -> str | None:
        """The recipe of `low_precision_gemm`; None where no GEMM is narrower than 16 bits."""
        if self.dtype not in NARROW:
            return None
        return self.fp8_recipe if self.dtype == "fp8" else self.dtype

    @property
    def batches(self) -> list[int]:
        """All global batch sizes of the ramp-up and of the training."""
        return [*(batch for _, batch in self.ramp_up), self.global_batch]


@dataclass(frozen=True)
class DataConfig:
    """The data source."""

    source: Source
    path: str | None
    token_dtype: str
    text_key: str
    packing: Literal["packed", "padded"]
    """`packed`: windows of concatenated documents; `padded`: one record per sample."""
    loss_on: Literal["all", "text"]
    """For padded samples: loss on `all` positions, or on the `text` only."""
    loss_mask: str | None = None
    """File with one byte per token of a token file; 0 excludes it as a target."""
    split: tuple[float, ...] | None = None
    """Relative sizes of the source's parts."""
    split_part: int = 0
    document_mask: bool = False
    """Restrict attention in packed windows to the token's own document."""
    blend: tuple[tuple[str, float], ...] = ()
    """(path, weight) of indexed datasets to mix, in place of `path`."""


@dataclass(frozen=True)
class LayoutConfig:
    """Sizes of the parallel axes."""

    tp: int
    pp: int
    cp: int
    vp: int
    ep: int
    zero_stage: Literal[0, 1, 2, 3]
    micro_batch: int
    recompute: Literal["none", "selective", "full", "budget"]
    schedule: str
    sequence_parallel: bool
    dp_shard: int | None
    cp_exchange: str
    gradient_sync: str | None
    recompute_budget: float | None = None


@dataclass(frozen=True)
class LoraConfig:
    """LoRA adapters, and whether the other weights train."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    train_rest: bool
    lr: float | None = None
    """Maximum learning rate of the adapters; None for that of the other weights."""

    def trains(self, name: str) -> bool:
        """Return whether a parameter is trained: adapters always, others unless adapted."""
        *_, layer, kind = name.split(".")
        has_adapter = kind == "weight" and layer in self.targets
        return is_adapter(name) or (self.train_rest and not has_adapter)


def is_adapter(name: str) -> bool:
    """Return whether a parameter is a matrix of a LoRA adapter."""
    return name.rpartition(".")[2] in ("lora_a", "lora_b")


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoint interval and the checkpoint to resume from."""

    every: int | None
    resume: str | None
    asynchronous: bool


@dataclass(frozen=True)
class MlperfConfig:
    """Submission data of an MLPerf log, and the number of untimed warm-up steps."""

    benchmark: str
    org: str
    platform: str
    division: str
    status: str
    warmup_steps: int
    cache_cleared: bool | None


@dataclass(frozen=True)
class ProfileConfig:
    """The profiler, the ranks it runs on, and its steps, including the last one."""

    tool: str
    ranks: list[int]
    first_step: int
    last_step: int


@dataclass(frozen=True)
class TrainerConfig:
    """The complete configuration of a training."""

    model: Model
    lora: LoraConfig | None
    training: TrainingConfig
    data: DataConfig
    layout: LayoutConfig
    checkpoint: CheckpointConfig
    dp: int
    num_microbatches: int
    device: str
    threads: int | None
    hang_limit_s: float
    memory_limit_bytes: float | None
    memory_parts: bool
    expected_parameters: int
    """Number of parameters of the whole model, including adapters."""
    expected_trainable: int
    recompute_levels: tuple[Level, ...] = ()
    """Recomputed part of each block, in layer order, when recompute is `budget`."""
    mlperf: MlperfConfig | None = None
    profile: ProfileConfig | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks of the layout, the product of MESH_AXES."""
        return self.dp * prod(getattr(self.layout, axis) for axis in MESH_AXES if axis != "dp")

    @property
    def uses_dropout(self) -> bool:
        """True if the training uses dropout."""
        model, lora = self.model, self.lora
        decoder = isinstance(model, ModelConfig)
        return bool(
            (lora and lora.dropout) or (decoder and (model.dropout or model.attention_dropout_p))
        )

    def layout_record(self) -> dict[str, Any]:
        """Return the layout with derived sizes for the start line."""
        return {**asdict(self.layout), "dp": self.dp, "num_microbatches": self.num_microbatches}


def parse_config(raw: Mapping[str, Any]) -> TrainerConfig:
    """Return the trainer's input from decoded JSON; unknown keys are ignored.

    Raise ConfigError for another schema, a missing key, or a value that is none of the choices.
    """
    if raw.get("schema") != SCHEMA:
        raise ConfigError(
            f"schema: {raw.get('schema')!r} is not supported; this trainer reads schema {SCHEMA}"
        )
    return from_mapping(TrainerConfig, raw)


def read_json(path: str) -> dict[str, Any]:
    """Return the JSON object in a file; raise ConfigError when it holds something else."""
    raw = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return raw


def parse_model(raw: Any) -> Model:
    """Return the model's sizes; without a kind it is a decoder. Raise ConfigError."""
    return _value(Model, raw, "model")


def parse_lora(raw: Mapping[str, Any]) -> LoraConfig | None:
    """Return an object's LoRA settings, if any. Raise ConfigError."""
    return _value(LoraConfig | None, raw.get("lora"), "lora")


def from_mapping(kind: type[T], raw: Any, where: str = "") -> T:
    """Return a dataclass from decoded JSON, with the dataclasses that its fields hold."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: is missing or not an object")
    types, values = _types(kind), {}
    for field in fields(kind):  # type: ignore[arg-type]
        place = f"{where}.{field.name}" if where else field.name
        if field.name in raw:
            values[field.name] = _value(types[field.name], raw[field.name], place)
        elif field.default is MISSING:
            raise ConfigError(f"{place}: is missing")
    return kind(**values)


@cache
def _types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _value(kind: Any, raw: Any, where: str) -> Any:
    """Return a field's value: checked against its choices, or made of a mapping."""
    members = get_args(kind)
    if get_origin(kind) is Literal:
        if raw not in members:
            raise ConfigError(f"{where} {raw}: use one of {', '.join(map(str, members))}")
    elif is_dataclass(kind):
        return from_mapping(kind, raw, where)  # type: ignore[arg-type]
    elif raw is None and NoneType in members:
        return None
    elif any(map(is_dataclass, members)):
        return from_mapping(_member(members, raw, where), raw, where)
    elif get_origin(kind) is tuple and get_origin(members[0]) is Literal:
        return tuple(_value(members[0], item, where) for item in raw or ())
    return raw


def _member(members: tuple[Any, ...], raw: Any, where: str) -> Any:
    """Return the dataclass of a union that the value's `kind` names, the first one without it."""
    kinds = [member for member in members if is_dataclass(member)]
    name = raw.get("kind") if isinstance(raw, Mapping) else None
    if name is None or len(kinds) == 1:
        return kinds[0]
    by_name = {get_args(_types(kind)["kind"])[0]: kind for kind in kinds}
    if name not in by_name:
        raise ConfigError(f"{where}.kind {name}: use one of {', '.join(by_name)}")
    return by_name[name]
