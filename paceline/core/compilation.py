"""Estimate of whether compiling blocks pays: time saved in all steps against compile time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.core.flops import FlopsInput, model_flops_per_token
from paceline.core.hardware import Dtype
from paceline.core.shape import LoraSpec, Shape
from paceline.core.units import pluralize

Compile = Literal["none", "blocks"]
CompileOption = Literal["auto", "none", "blocks"]
Kind = Literal["llama", "lora", "gpt", "opt", "flux"]


@dataclass(frozen=True)
class CompileGain:
    """Measured speedup and cost of compiled blocks for one kind of model."""

    speedup: float
    """Step time without compilation divided by step time with compilation."""
    throughput: float
    """Throughput without compilation: FLOP/s per core on CPUs, share of the dense peak on GPUs."""
    compile_s: float
    """Additional time of the first step in seconds. On CPUs it is processor time with an empty
    cache."""


CPU_GAINS: dict[tuple[Kind, Dtype], CompileGain] = {
    ("llama", "fp32"): CompileGain(1.06, 53.4e9, 50.0),
    ("llama", "bf16"): CompileGain(1.11, 102.5e9, 50.0),
    ("gpt", "fp32"): CompileGain(1.09, 46.6e9, 45.0),
    ("gpt", "bf16"): CompileGain(1.11, 94e9, 45.0),
    ("opt", "bf16"): CompileGain(1.09, 106.5e9, 32.0),
    ("lora", "fp32"): CompileGain(1.41, 28.7e9, 80.0),
    ("lora", "bf16"): CompileGain(1.68, 40.9e9, 80.0),
    ("flux", "fp32"): CompileGain(1.12, 44.6e9, 65.0),
    ("flux", "bf16"): CompileGain(1.33, 67.7e9, 65.0),
}
"""Gains on CPUs. Sources: benchmarks/results/peers.json (causal FLOPs, two cores),
compile_cache.json.

OPT in fp32 is not listed: its gain of 3% was smaller than the run-to-run variation.
"""
GPU_GAINS: dict[tuple[Kind, Dtype], CompileGain] = {
    ("llama", "bf16"): CompileGain(1.126, 0.491, 8.0)
}
"""Gains on GPUs, from the one training in benchmarks/results/gpu_proof.json measured both ways."""


@dataclass(frozen=True)
class CompileSaving:
    """Expected time saved by compiled blocks in one run, and compile time, both in seconds."""

    saved_s: float
    compile_s: float
    steps: int

    @property
    def pays(self) -> bool:
        """True if all steps together save more time than compilation costs."""
        return self.saved_s > self.compile_s

    def __str__(self) -> str:
        return (
            f"{pluralize(self.steps, 'step', 'save')} about {self.saved_s:,.0f} s, "
            f"compiling takes about {self.compile_s:.0f} s"
        )


@dataclass(frozen=True)
class Work:
    """The properties of a training that determine its step time."""

    shape: Shape
    lora: LoraSpec | None
    dtype: Dtype
    seq_len: int
    sequences_per_device: float
    """Sequences per device in one optimizer step."""
    steps: int

    @property
    def flops_per_step(self) -> float:
        """Model FLOPs of one step on one device.

        They are counted in the causal convention, or in the first one of a shape that lists its
        own.
        """
        x = FlopsInput(self.shape, self.seq_len, lora=self.lora)
        convention = self.shape.conventions[0] if self.shape.conventions else "causal"
        return self.sequences_per_device * self.seq_len * model_flops_per_token(convention, x)


def saving(
    work: Work, *, threads: int | None = None, peak: float | None = None
) -> CompileSaving | None:
    """Return the expected saving of compiled blocks; None if no measurement covers the model.

    On a CPU, pass `threads` per device. On a GPU, pass the dense `peak` (FLOP/s) of the dtype.
    """
    gains = GPU_GAINS if threads is None else CPU_GAINS
    kind, resource = _kind(work), peak if threads is None else threads
    gain = gains.get((kind, work.dtype)) if kind else None
    if gain is None or not resource:
        return None
    step_s = work.flops_per_step / (resource * gain.throughput)
    return CompileSaving(work.steps * step_s * (1 - 1 / gain.speedup), gain.compile_s, work.steps)


def _kind(work: Work) -> Kind | None:
    """Return the measured kind of model that is closest to this one; None if there is none."""
    shape = work.shape
    if shape.kind == "mmdit":
        return "flux"
    if shape.sliding_window is not None or shape.num_experts > 1:
        return None
    if shape.gated_ffn and shape.norm == "rmsnorm" and shape.positions == "rope":
        return "lora" if work.lora else "llama"
    of_gpt = not shape.gated_ffn and shape.norm == "layernorm" and shape.positions == "learned"
    if not of_gpt or work.lora:
        return None
    return "opt" if shape.activation == "relu" else "gpt"
