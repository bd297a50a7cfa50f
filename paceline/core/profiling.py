"""Settings of a profiling run. Such a run is not a speed measurement."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from paceline.core.value import NonNegativeInt, PositiveInt, Value

ToolName = Literal["torch", "nsys", "nccl", "memory"]
PROFILES_FOLDER = "profiles"
"""Subfolder of the run folder for the output of the tools, one or more files per rank."""


class Profiling(Value):
    """One profiling tool, attached to some ranks for some steps."""

    tool: ToolName
    ranks: tuple[NonNegativeInt, ...] = Field(min_length=1)
    first_step: PositiveInt = 20
    last_step: PositiveInt = 30
    """Last profiled step (inclusive)."""
    gpu_metrics: bool = False
    """Sample GPU performance counters with nsys."""
    cpu_samples: bool = False
    """Sample CPU activity with nsys."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.last_step < self.first_step:
            raise ValueError(f"last_step {self.last_step} is before first_step {self.first_step}")
        return self

    @property
    def num_steps(self) -> int:
        """Number of profiled steps."""
        return self.last_step - self.first_step + 1
