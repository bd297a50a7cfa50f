"""What a training asks of the disks: samples each second, and checkpoints."""

from __future__ import annotations

from paceline.core.run import RunSpec
from paceline.core.shape import DecoderShape, trainable_parameters
from paceline.core.units import binary, si
from paceline.core.value import Value
from paceline.staging.conversions.indexed import token_dtype

TOKEN_BYTES = {"uint16": 2, "uint32": 4, "int32": 4, "int64": 8}
WEIGHT_BYTES, MOMENTS_BYTES = 4, 8
"""Of a parameter in the native trainer's checkpoints: fp32, and Adam's two moments if trained."""


class StorageDemand(Value):
    """What one training needs; None where it cannot be told."""

    recipe: str
    source: str
    """Where samples/s come from: an estimate on some devices, or a measured run."""
    hosts: int
    samples_per_s: float | None
    """Of the whole training."""
    low_samples_per_s: float | None = None
    high_samples_per_s: float | None = None
    """80 % interval of an estimate."""
    host_samples_per_s: float | None
    """Samples that a host's replicas read, each once: S x min(1, replicas of a host / dp)."""
    sample_bytes: int | None
    """seq_len + 1 tokens; None for samples of another kind."""
    checkpoint_bytes: float
    """4 bytes a parameter and 8 more for each trained one, of all hosts together."""
    notes: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """What it needs, in words."""
        saved = f"a checkpoint has {binary(self.checkpoint_bytes)}"
        if self.samples_per_s is None or self.host_samples_per_s is None:
            return f"{self.recipe}: {'; '.join(self.notes)}; {saved}."
        size = "" if self.sample_bytes is None else f" of {self.sample_bytes:,} bytes"
        rate = f"{self.samples_per_s:,.1f} samples/s"
        bytes_per_s = (
            ""
            if self.sample_bytes is None
            else f" ({si(self.host_samples_per_s * self.sample_bytes, 'B/s')})"
        )
        return (
            f"{self.recipe} needs {rate} by {self.source}, a host "
            f"{self.host_samples_per_s:,.1f}{size}{bytes_per_s}; {saved}."
        )


def demand_of(
    spec: RunSpec,
    source: str,
    samples_per_s: float | None,
    interval: tuple[float | None, float | None] = (None, None),
    notes: tuple[str, ...] = (),
) -> StorageDemand:
    """The demand of a resolved run that trains so fast."""
    on_host = max(1, spec.cluster.devices_per_node // spec.layout.model_devices)
    share = min(1.0, on_host / spec.dp)
    parameters = WEIGHT_BYTES * spec.num_parameters
    trained = MOMENTS_BYTES * trainable_parameters(spec.model, spec.lora)
    return StorageDemand(
        recipe=spec.recipe,
        source=source,
        hosts=spec.cluster.nodes,
        samples_per_s=samples_per_s,
        low_samples_per_s=interval[0],
        high_samples_per_s=interval[1],
        host_samples_per_s=None if samples_per_s is None else samples_per_s * share,
        sample_bytes=sample_bytes(spec),
        checkpoint_bytes=parameters + trained,
        notes=notes,
    )


def sample_bytes(spec: RunSpec) -> int | None:
    """Bytes of seq_len + 1 tokens as files hold them; None for samples that are no tokens.

    Text counts as the indexed data set that it becomes.
    """
    if not isinstance(spec.model, DecoderShape):
        return None
    if spec.data.source == "tokens":
        width = TOKEN_BYTES[spec.data.token_dtype]
    else:
        width = token_dtype(spec.model.vocab_size).itemsize
    return (spec.training.seq_len + 1) * width
