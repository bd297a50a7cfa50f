"""Engine support as data: the features of a RunSpec, and limits on them.

FEATURES contains every feature that some engine lacks. An engine declares a `Support`: a limit with
its reason for each feature that it does not fully support. `refusals` converts a run and a
`Support` into sentences. Checks that are not a lookup (a path must exist, two settings exclude each
other) remain functions of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.layout import AXIS_FIELDS, Layout
from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape, LoraSpec, has_experts
from paceline.core.training import Checkpointing, Data, LossScale, LrSchedule, Training

BYTE_VOCAB = 257
"""Vocabulary that text needs without a tokenizer: one id per byte and one that ends a document."""

TEXT_SOURCES = ("stdlib", "text", "jsonl")
"""Data sources of text that is read as bytes."""


@dataclass(frozen=True)
class Feature:
    """Feature that a run may request from an engine."""

    field: str
    """Name of the feature in a recipe, for `--set`."""
    value: Callable[[RunSpec], Any]
    """Function that returns the requested value."""
    unused: Any
    """Value in a run that does not use the feature."""


@dataclass(frozen=True)
class Limit:
    """Limit of an engine's support for a feature, with the reason."""

    reason: str
    allowed: tuple[Any, ...] | None = None
    """Supported values; None if the feature is not supported at all."""
    remedy: str = ""
    """Alternative for the user; by default, to use a supported value or to leave the feature out.
    """

    def sentence(self, feature: Feature, value: Any) -> str | None:
        """Return the refusal of `value` as `field value is not supported: reason; remedy`."""
        allowed = (feature.unused,) if self.allowed is None else self.allowed
        if value is None or value in allowed:
            return None
        value_text = f" {_text(value)}" if isinstance(value, bool | int | float | str) else ""
        why = f": {self.reason}" if self.reason else ""
        remedy = self.remedy or _default_remedy(feature.field, allowed)
        return f"{feature.field}{value_text} is not supported{why}; {remedy}"

    @property
    def takes(self) -> str:
        """Supported values as text, `no` if there are none."""
        return "no" if self.allowed is None else ", ".join(map(_text, self.allowed))


@dataclass(frozen=True)
class TestedProgram:
    """Version of a real program that an engine has started."""

    program: str
    cpu: str
    """Kinds of runs on CPUs, or `no`."""
    gpu: str = "no"
    """Kinds of runs on GPUs, or `no`."""


Support = Mapping[str, Limit]
"""Limits by the feature's field; a feature without a limit is supported."""


def no(reason: str, remedy: str = "") -> Limit:
    """Return the limit of a feature that an engine does not have."""
    return Limit(reason, None, remedy)


def only(*allowed: Any, reason: str = "", remedy: str = "") -> Limit:
    """Return the limit of a feature for which an engine supports only these values."""
    return Limit(reason, allowed, remedy)


def refusals(spec: RunSpec, support: Support) -> list[str]:
    """Return a sentence for each feature of `spec` beyond `support`.

    An unsupported kind of model gives the only sentence, since the sizes of another kind do not
    apply.
    """
    sentences: list[str] = []
    for field, feature in FEATURES.items():
        sentence = support[field].sentence(feature, feature.value(spec)) if field in support else ""
        if sentence and field == "model.kind":
            return [sentence]
        sentences += [sentence] if sentence else []
    return sentences


def unequal_stages(spec: RunSpec, program: str, *, ends_count: bool = False) -> list[str]:
    """Return a problem if `program` cannot split the layers into equal pipeline stages.

    With `ends_count`, embedding and head count as one layer each. Our own `stage_sizes` accepts
    both, so an engine whose program accepts only one must call this.
    """
    layout, stages = spec.layout, spec.layout.pp * spec.layout.vp
    layers = spec.model.num_layers + 2 * ends_count
    if layout.pp == 1 or spec.model.kind != "decoder" or layers % stages == 0:
        return []
    kind = " with embedding and head" if ends_count else ""
    return [
        f"{layers} layers{kind} cannot be split over pp {layout.pp} x vp {layout.vp} = {stages} "
        f"stages: the stages of {program} are equal; use a pp x vp that divides {layers}"
    ]


def small_vocabulary(spec: RunSpec) -> list[str]:
    """Return a problem if the vocabulary is too small for text in a program that reads bytes."""
    model = spec.model
    if model.kind != "decoder" or spec.data.source not in TEXT_SOURCES:
        return []
    if model.vocab_size >= BYTE_VOCAB:
        return []
    return [
        f"model.vocab_size {model.vocab_size} is too small for text, which needs {BYTE_VOCAB}: one "
        "id per byte and one for the end of a document; use a larger one, or data.source=synthetic"
    ]


def _text(value: object) -> str:
    """Return a value as written in a recipe."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _default_remedy(field: str, allowed: tuple[Any, ...]) -> str:
    if allowed == (None,):
        return f"leave {field} out"
    *others, last = map(_text, allowed)
    return f"use {field}={', '.join(others)}{' or ' * bool(others)}{last}"


_PARTS: dict[str, type[Any]] = {
    "": RunSpec,
    "model": DecoderShape,
    "lora": LoraSpec,
    "training": Training,
    "training.lr_schedule": LrSchedule,
    "training.loss_scale": LossScale,
    "checkpoint": Checkpointing,
    "layout": Layout,
    "data": Data,
}


def _feature(field: str) -> Feature:
    """Return the feature of a field of the run; its default counts as unused."""
    part, _, name = field.rpartition(".")
    info = _PARTS[part].model_fields[name]
    unused = None if info.is_required() else info.get_default(call_default_factory=True)

    def value(spec: RunSpec) -> Any:
        value: Any = spec
        for step in field.split("."):
            value = getattr(value, step, None)
            if value is None:
                return unused
        return value

    return Feature(field, value, unused)


def _decoder_size(
    field: str, size: Callable[[DecoderShape], int], default: Callable[[DecoderShape], int]
) -> Feature:
    """Return the feature of a size that may differ from the usual one of its shape."""

    def value(spec: RunSpec) -> int | None:
        model = spec.model
        if not isinstance(model, DecoderShape) or size(model) == default(model):
            return None
        return size(model)

    return Feature(field, value, None)


def _schedule(spec: RunSpec) -> str:
    """Return the pipeline schedule in use; 1f1b without pipeline stages."""
    return spec.layout.effective_schedule if spec.layout.pp > 1 else "1f1b"


def _routing(spec: RunSpec) -> str | None:
    """Return the choice of experts; None for a model without experts."""
    return spec.training.routing if has_experts(spec.model) else None


_SHAPE_OPTIONS = (
    "norm_zero_centered",
    "qkv_bias",
    "qk_norm",
    "rope_local_theta",
    "rope_scaling_factor",
    "rope_original_positions",
    "rope_attention_factor",
    "partial_rotary_factor",
    "sliding_window",
    "sliding_window_pattern",
    "attention_sinks",
    "activation_limit",
    "up_offset",
    "query_pre_attn_scalar",
    "scale_embedding",
)
_DEEPSEEK_FIELDS = (
    "latent_attention",
    "first_dense_layers",
    "dense_ffn_size",
    "mtp_layers",
    "router_score",
    "router_normalize",
    "router_scale",
    "router_choice_bias",
)
_FIELDS = (
    "model.kind",
    "model.num_experts",
    "model.activation",
    "model.gated_ffn",
    "model.norm",
    "model.norm_position",
    "model.norm_eps",
    "model.final_norm",
    "model.positions",
    "model.position_offset",
    "model.rope_theta",
    "model.bias",
    "model.tied_embeddings",
    "model.embedding_norm",
    "model.dropout",
    *(f"model.{name}" for name in (*_SHAPE_OPTIONS, *_DEEPSEEK_FIELDS)),
    "lora",
    "lora.alpha",
    "lora.dropout",
    "lora.lr",
    "lora.train_rest",
    "training.dtype",
    "training.fp8_recipe",
    "training.compile",
    "training.betas",
    "training.eps",
    "training.grad_clip",
    "training.router_aux_loss",
    "training.router_z_loss",
    "training.router_bias_update_rate",
    "training.mtp_loss_weight",
    "training.lr_schedule.kind",
    "training.lr_schedule.min_lr",
    "training.lr_schedule.unit",
    "training.ramp_up",
    "training.evaluation",
    "training.initial_weights",
    "checkpoint.every",
    "checkpoint.resume",
    "mlperf",
    "memory_limit_bytes",
    *(f"layout.{axis}" for axis in AXIS_FIELDS),
    "layout.zero_stage",
    "layout.micro_batch",
    "layout.recompute",
    "layout.sequence_parallel",
    "layout.dp_shard",
    "layout.cp_exchange",
    "layout.gradient_sync",
    "data.source",
    "data.packing",
    "data.document_mask",
    "data.loss_on",
    "data.loss_mask",
    "data.split",
    "data.split_part",
    "data.blend",
)
_DERIVED = (
    _decoder_size("model.num_kv_heads", lambda m: m.kv_heads, lambda m: m.num_heads),
    _decoder_size("model.head_size", lambda m: m.head_dim, lambda m: m.hidden_size // m.num_heads),
    _decoder_size("model.embedding_size", lambda m: m.embed_dim, lambda m: m.hidden_size),
    Feature(
        "model.attention_dropout", lambda s: getattr(s.model, "dropped_probabilities", 0.0), 0.0
    ),
    Feature("layout.schedule", _schedule, "1f1b"),
    Feature("training.routing", _routing, "learned"),
)
FEATURES: Mapping[str, Feature] = {
    feature.field: feature for feature in (*map(_feature, _FIELDS), *_DERIVED)
}
"""Every feature that some engine lacks, by field."""

_NATIVE = no("only engine native supports it")
SHAPE_OPTIONS: Support = {
    **{f"model.{name}": _NATIVE for name in _SHAPE_OPTIONS},
    "model.norm_position": only("pre", "post", reason="only engine native supports both at once"),
}
"""Limits of an engine with none of the native trainer's newer decoder options."""
DEEPSEEK: Support = {
    **{
        f"model.{name}": no(
            "only engines native and megatron_bridge, and megatron with engine_settings.checkout, "
            "train such models"
        )
        for name in _DEEPSEEK_FIELDS
    },
}
"""Limits of an engine that does not train DeepSeek-V3."""
NATIVE_ONLY: Support = {
    "training.router_aux_loss": _NATIVE,
    "training.router_z_loss": _NATIVE,
    "training.router_bias_update_rate": _NATIVE,
    "training.mtp_loss_weight": _NATIVE,
    "training.routing": only(
        "learned", "forced", reason="only engine native supports unequal loads"
    ),
    "training.fp8_recipe": _NATIVE,
    "layout.recompute": only(
        "none", "selective", "full", reason="only engine native supports a memory budget"
    ),
    "layout.gradient_sync": _NATIVE,
    "data.document_mask": _NATIVE,
}
"""Limits of every engine except the native trainer and user programs."""
LEARNED_ROUTING: Support = {"training.routing": no("its routers only learn")}
"""Limits of an engine whose program cannot force an equal load on experts."""
NO_CHECKPOINTS: Support = {
    **NATIVE_ONLY,
    "training.evaluation": _NATIVE,
    "training.initial_weights": _NATIVE,
    "checkpoint.every": _NATIVE,
    "checkpoint.resume": _NATIVE,
    "mlperf": _NATIVE,
    "memory_limit_bytes": _NATIVE,
}
"""Limits of an engine without evaluation and checkpoints."""
OPT_SHAPE: Support = {
    "model.norm": only("layernorm", reason="OPT uses LayerNorm"),
    "model.norm_eps": only(1e-5, reason="OPT's epsilon is fixed"),
    "model.positions": only("learned", reason="OPT has learned positions"),
    "model.position_offset": only(2, reason="OPT's position table has two unused rows"),
    "model.gated_ffn": only(False, reason="OPT has no gated FFN"),
    "model.num_kv_heads": no("OPT's attention heads are not grouped"),
    "model.head_size": no("OPT's head size is hidden_size / num_heads"),
}
"""Limits of transformers' OPT."""
WITHOUT_RAMP_UP: Support = {"training.ramp_up": no("its batch size is constant")}
TOKEN_WINDOWS: Support = {
    "data.source": only(
        "synthetic", "stdlib", "text", "tokens", reason="its samples are token windows"
    ),
    "data.packing": only("packed", reason="its samples are token windows"),
    "data.loss_mask": _NATIVE,
    "data.split": _NATIVE,
}
"""Limits of a program that reads samples through `token_windows_program.py`."""
