"""What a profile run is asked for; such a run is no measure of speed."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from paceline.core.value import NonNegativeInt, PositiveInt, Value

ToolName = Literal["torch", "nsys", "nccl", "memory"]
PROFILES_FOLDER = "profiles"
"""In the run folder: what the tools leave, one file or more a rank."""


class Profiling(Value):
    """One tool, attached to some ranks for some steps."""

    tool: ToolName
    ranks: tuple[NonNegativeInt, ...] = Field(min_length=1)
    first_step: PositiveInt = 20
    last_step: PositiveInt = 30
    """The last one that is profiled."""
    gpu_metrics: bool = False
    """nsys samples the devices' counters as well."""
    cpu_samples: bool = False
    """nsys samples what the CPU does as well."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.last_step < self.first_step:
            raise ValueError(f"the steps {self.first_step}-{self.last_step} run backwards")
        return self

    @property
    def num_steps(self) -> int:
        """Steps that are profiled."""
        return self.last_step - self.first_step + 1
