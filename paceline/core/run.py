"""RunSpec: one fully resolved run. RunSettings: the known settings of any run."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    AfterValidator,
    PositiveFloat,
    SerializerFunctionWrapHandler,
    field_serializer,
    model_serializer,
    model_validator,
)

from paceline.core.flops import FlopsInput, flops_input, validate_convention
from paceline.core.hardware import Cluster, Dtype
from paceline.core.layout import Layout
from paceline.core.parallel_run import ParallelRun
from paceline.core.secrets import redacted_words
from paceline.core.shape import LoraSpec, Shape, has_experts, lora_parameters, num_parameters
from paceline.core.training import Checkpointing, Data, MlperfLog, Profiling, Training, log_problem
from paceline.core.value import (
    FieldMark,
    PositiveInt,
    RunLabel,
    Value,
    marked_fields,
)

EngineSettings = dict[str, bool | int | float | str | None]


PROFILER_SETTINGS = ("profile", "nccl_trace")
"""Engine settings that attach a profiler or a trace. Both slow the run."""
ALL_DEVICE_PLACEHOLDERS = ("{world_size}", "{devices_per_node}")
"""Placeholders of a command that uses all available devices."""
Headline = Literal["tokens_per_s", "samples_per_s"]
"""Metric that states the speed."""
PLACEHOLDER_FIELDS: dict[str, Any] = {
    "model": {
        "kind": "decoder",
        "num_layers": 1,
        "hidden_size": 1,
        "num_heads": 1,
        "ffn_size": 1,
        "vocab_size": 1,
    },
    "training": {"seq_len": 1, "steps": 1, "dtype": "fp32"},
}
"""Placeholder values for unknown settings of a bare run. They are never written to a file."""


class RunSpec(Value):
    """Everything that determines what runs. Equal specs have equal keys."""

    recipe: RunLabel[str]
    variant: RunLabel[str | None] = None
    engine: str = "native"
    engine_settings: EngineSettings = {}
    """Settings of the engine, by their names in that engine."""
    command: tuple[str, ...] = ()
    """Program of engine `command` and its arguments."""
    bare: bool = False
    """True for a command without a recipe. What it trains is unknown. No figure may use `model`,
    `training`, `data` or `layout`, and files omit them."""
    model: Annotated[Shape, FieldMark.TRAINED]
    lora: Annotated[LoraSpec | None, FieldMark.TRAINED] = None
    training: Annotated[Training, FieldMark.TRAINED]
    data: Annotated[Data, FieldMark.TRAINED] = Data()
    layout: Annotated[Layout, FieldMark.TRAINED] = Layout()
    cluster: Cluster
    flops_convention: Annotated[str, AfterValidator(validate_convention), FieldMark.TRAINED] = (
        "causal"
    )
    nominal_parameters: PositiveFloat | None = None
    """Rounded parameter count P of the six-n convention, if a source uses one (1.3e9)."""
    time_limit_s: RunLabel[PositiveFloat | None] = None
    hang_limit_s: RunLabel[PositiveFloat] = 300.0
    """Seconds without a finished micro-batch after which a rank counts as hung."""
    memory_limit_bytes: PositiveFloat | None = None
    """On a CPU, the maximum number of bytes that each rank may allocate in addition to its use
    before the model is created."""
    memory_parts: RunLabel[bool] = True
    """Measure memory by part in one early step. No figure includes the time of this step."""
    checkpoint: Annotated[Checkpointing, FieldMark.TRAINED] = Checkpointing()
    mlperf: RunLabel[MlperfLog | None] = None
    """Labels of the MLPerf log that the run writes. Unset writes none."""
    profile: Profiling | None = None
    """Attached profiling tool, which slows the run. Unset profiles nothing."""
    references: RunLabel[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _fill_placeholders(cls, fields: object) -> object:
        if not isinstance(fields, dict):
            return fields
        known_fields = cast(dict[str, Any], fields)
        if known_fields.get("bare") is not True:
            return known_fields
        training = {**PLACEHOLDER_FIELDS["training"], "global_batch": _world_size(known_fields)}
        return {**PLACEHOLDER_FIELDS, **known_fields, "training": training}

    @model_validator(mode="after")
    def _log_has_evaluations(self) -> Self:
        problem = log_problem(self.training, self.mlperf)
        if problem:
            raise ValueError(problem)
        return self

    @field_serializer("command")
    def _without_secrets(self, command: tuple[str, ...]) -> tuple[str, ...]:
        return redacted_words(command, os.environ)

    @model_serializer(mode="wrap")
    def _omit_placeholders(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        placeholders = marked_fields(RunSpec, FieldMark.TRAINED) if self.bare else {}
        return {name: value for name, value in handler(self).items() if name not in placeholders}

    @property
    def steps_requested(self) -> int | None:
        """Number of steps of the complete training; None if a user's program decides."""
        return None if self.command else self.training.steps

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.cluster.world_size

    @property
    def dp(self) -> int:
        """Number of data-parallel replicas."""
        return self.layout.dp(self.world_size)

    @property
    def parallel(self) -> ParallelRun:
        """Input of the rules, the memory and the traffic of the parallel axes."""
        training = self.training
        return ParallelRun(
            layout=self.layout,
            shape=self.model,
            world_size=self.world_size,
            global_batch=training.global_batch,
            seq_len=training.seq_len,
            dtype=training.dtype,
            device="cpu" if self.cluster.device == "cpu" else "cuda",
            lora=self.lora,
            fp8_recipe=training.fp8_recipe,
            compiled=training.compile != "none",
            document_mask=self.data.document_mask,
        )

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model, adapters included."""
        adapters = lora_parameters(self.model, self.lora) if self.lora else 0
        return num_parameters(self.model, self.layout.tp) + adapters

    @property
    def key(self) -> str:
        """Eight hexadecimal digits that identify what runs.

        They cover all fields that differ from the defaults, except labels.
        """
        labels = marked_fields(RunSpec, FieldMark.LABEL)
        content = self.model_dump(mode="json", exclude_defaults=True, exclude=labels)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


class RunSettings(Value):
    """Known settings of a run, independent of who started it.

    None means unknown. It never means a default.
    """

    recipe: str | None = None
    variant: str | None = None
    engine: str | None = None
    model: Shape | None = None
    lora: LoraSpec | None = None
    dtype: Dtype | None = None
    matmul_precision: str | None = None
    routing: str | None = None
    """Choice of experts: `forced` to an equal load, `pattern:...` to unequal ones, `learned from
    scratch` or `learned, trained`; also None for a dense model."""
    seq_len: PositiveInt | None = None
    global_batch: PositiveInt | None = None
    """Sequences per optimizer step over all devices; also None during a batch ramp-up."""
    device: str | None = None
    """Name in the device catalog, or `cpu`."""
    device_label: str | None = None
    device_memory_bytes: PositiveFloat | None = None
    num_devices: PositiveInt | None = None
    devices_per_node: PositiveInt | None = None
    layout: Layout | None = None
    data: str | None = None
    """Kind of data: `synthetic`, `stdlib`, `text`, ..."""
    packing: str | None = None
    """Packing of samples: `packed` samples are windows of one token stream, `padded` samples are
    single records."""
    document_mask: bool | None = None
    """True if tokens of packed samples attend only to their own document."""
    loss_on: str | None = None
    """Positions in the loss of padded or masked samples: `all`, or `text` only."""
    real_tokens_per_sample: PositiveFloat | None = None
    flops_convention: Annotated[str, AfterValidator(validate_convention)] | None = None
    nominal_parameters: PositiveFloat | None = None
    total_tokens: PositiveFloat | None = None
    profiled: bool | None = None
    """True if a profiler was attached, which slows a run."""
    origin: Literal["measured", "imported"] = "measured"

    @classmethod
    def of(cls, spec: RunSpec) -> RunSettings:
        """Return the settings of a run that Paceline starts."""
        cluster, training = spec.cluster, spec.training
        if spec.bare:
            return cls._of_command(spec)
        return cls(
            recipe=spec.recipe,
            variant=spec.variant,
            engine=spec.engine,
            model=spec.model,
            lora=spec.lora,
            dtype=training.dtype,
            matmul_precision=training.matmul_precision,
            routing=_routing(spec),
            seq_len=training.seq_len,
            global_batch=training.global_batch,
            device=cluster.device,
            device_label=cluster.device_label,
            device_memory_bytes=cluster.device_memory_bytes,
            num_devices=spec.world_size,
            devices_per_node=cluster.devices_per_node,
            layout=spec.layout,
            data=spec.data.source,
            packing=spec.data.packing,
            document_mask=spec.data.document_mask,
            loss_on=spec.data.loss_on,
            real_tokens_per_sample=spec.data.real_tokens_per_sample,
            flops_convention=spec.flops_convention,
            nominal_parameters=spec.nominal_parameters,
            total_tokens=training.training_tokens,
            profiled=spec.profile is not None
            or any(spec.engine_settings.get(name) for name in PROFILER_SETTINGS),
        )

    @classmethod
    def _of_command(cls, spec: RunSpec) -> RunSettings:
        """Return the known settings of a program before it prints anything: where it runs."""
        cluster, settings = spec.cluster, spec.engine_settings
        # A program that is started once per node may use any of its devices.
        takes_all = any(name in word for word in spec.command for name in ALL_DEVICE_PLACEHOLDERS)
        uses_all_devices = settings.get("per") == "device" or "devices" in settings or takes_all
        return cls(
            recipe=spec.recipe,
            engine=spec.engine,
            device=cluster.device,
            device_label=cluster.device_label,
            device_memory_bytes=cluster.device_memory_bytes,
            num_devices=spec.world_size if uses_all_devices else None,
            devices_per_node=cluster.devices_per_node if uses_all_devices else None,
        )

    @property
    def headline(self) -> Headline:
        """Metric of the speed: samples/s for padded records and captioned images."""
        images = self.model is not None and self.model.kind == "mmdit"
        return "samples_per_s" if images or self.packing == "padded" else "tokens_per_s"

    @property
    def batch_unit(self) -> str:
        """Unit of a batch, in the singular."""
        return "sample" if self.headline == "samples_per_s" else "sequence"

    @property
    def flops_input(self) -> FlopsInput | None:
        """Input of the FLOPs conventions; None if model or sequence length is unknown."""
        if self.model is None or self.seq_len is None:
            return None
        return flops_input(
            self.model, self.seq_len, self.layout, self.lora, self.nominal_parameters
        )

    def unknown(self, *names: str) -> str | None:
        """Return `not known: model, device` for those of `names` that are None, else None."""
        missing = [name.replace("_", " ") for name in names if getattr(self, name) is None]
        return f"not known: {', '.join(missing)}" if missing else None


def _routing(spec: RunSpec) -> str | None:
    """Return how experts are chosen; None for a model without experts."""
    if not has_experts(spec.model):
        return None
    if spec.training.routing != "learned":
        return spec.training.routing
    return "learned, trained" if spec.training.initial_weights else "learned from scratch"


def _world_size(fields: dict[str, Any]) -> int:
    """Return the number of devices of an unvalidated spec; 1 without a valid cluster."""
    cluster = fields.get("cluster")
    if isinstance(cluster, Cluster):
        return cluster.world_size
    try:
        return int(cluster["nodes"]) * int(cluster["devices_per_node"])  # type: ignore[index]
    except (TypeError, KeyError, ValueError, OverflowError):
        return 1
