"""What is known of a run, whoever made it: what figures and comparisons are based on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, PositiveFloat

from paceline.core.flops import FlopsInput, flops_input, known_convention
from paceline.core.hardware import Dtype
from paceline.core.layout import Layout
from paceline.core.run import RunSpec
from paceline.core.shape import LoraSpec, Shape
from paceline.core.value import PositiveInt, Value

PROFILERS = ("profile", "nccl_trace")
"""Engine settings that attach a profiler or a trace, which slows a run."""
OF_ALL_DEVICES = ("{world_size}", "{devices_per_node}")
"""Placeholders of a command that takes all devices that there are."""
Headline = Literal["tokens_per_s", "samples_per_s"]
"""The metric that states a speed."""


class Facts(Value):
    """One run's settings; None = nobody said, which is never taken for a default."""

    recipe: str | None = None
    variant: str | None = None
    engine: str | None = None
    model: Shape | None = None
    lora: LoraSpec | None = None
    dtype: Dtype | None = None
    matmul_precision: str | None = None
    seq_len: PositiveInt | None = None
    global_batch: PositiveInt | None = None
    """Sequences per optimizer step over all devices; None also while a batch ramps up."""
    device: str | None = None
    """A name of the device catalog, or `cpu`."""
    device_label: str | None = None
    device_memory_bytes: PositiveFloat | None = None
    num_devices: PositiveInt | None = None
    devices_per_node: PositiveInt | None = None
    layout: Layout | None = None
    data: str | None = None
    """Kind of data: `synthetic`, `stdlib`, `text`, ..."""
    packing: str | None = None
    """`packed` samples are windows of one line of tokens, `padded` ones records of their own."""
    document_mask: bool | None = None
    """Whether tokens of packed samples attend to their own document alone."""
    loss_on: str | None = None
    """Of padded or masked samples: `all` positions, or the `text` alone."""
    real_tokens_per_sample: PositiveFloat | None = None
    flops_convention: Annotated[str, AfterValidator(known_convention)] | None = None
    nominal_parameters: PositiveFloat | None = None
    total_tokens: PositiveFloat | None = None
    profiled: bool | None = None
    """Whether a profiler was attached, which slows a run."""
    origin: Literal["measured", "imported"] = "measured"

    @property
    def headline(self) -> Headline:
        """The metric that states the speed: samples/s of padded records and of captioned images."""
        images = self.model is not None and self.model.kind == "mmdit"
        return "samples_per_s" if images or self.packing == "padded" else "tokens_per_s"

    @property
    def batch_of(self) -> str:
        """What a batch is counted in: one of them."""
        return "sample" if self.headline == "samples_per_s" else "sequence"

    @property
    def flops_input(self) -> FlopsInput | None:
        """What the FLOPs conventions look at; None while model or sequence length is unknown."""
        if self.model is None or self.seq_len is None:
            return None
        return flops_input(
            self.model, self.seq_len, self.layout, self.lora, self.nominal_parameters
        )

    def unknown(self, *names: str) -> str | None:
        """`not known: model, device` for those of `names` that are None, or None."""
        missing = [name.replace("_", " ") for name in names if getattr(self, name) is None]
        return f"not known: {', '.join(missing)}" if missing else None


def facts_of(spec: RunSpec) -> Facts:
    """All facts of a run that Paceline itself starts."""
    cluster, training = spec.cluster, spec.training
    if spec.bare:
        return _facts_of_command(spec)
    return Facts(
        recipe=spec.recipe,
        variant=spec.variant,
        engine=spec.engine,
        model=spec.model,
        lora=spec.lora,
        dtype=training.dtype,
        matmul_precision=training.matmul_precision,
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
        total_tokens=training.whole_tokens,
        profiled=spec.profile is not None
        or any(spec.engine_settings.get(name) for name in PROFILERS),
    )


def _facts_of_command(spec: RunSpec) -> Facts:
    """What is known of a program before it has said anything: where it runs."""
    cluster = spec.cluster
    # A program that is started once a node may use any of its devices.
    shares_out = any(name in word for word in spec.command for name in OF_ALL_DEVICES)
    settings = spec.engine_settings
    counted = settings.get("per") == "device" or "devices" in settings or shares_out
    return Facts(
        recipe=spec.recipe,
        engine=spec.engine,
        device=cluster.device,
        device_label=cluster.device_label,
        device_memory_bytes=cluster.device_memory_bytes,
        num_devices=spec.world_size if counted else None,
        devices_per_node=cluster.devices_per_node if counted else None,
        profiled=None,
    )
