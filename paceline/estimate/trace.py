"""Memory of a layout by following the trainer's own step, beside what the memory model says."""

from __future__ import annotations

import sys
from dataclasses import replace

from paceline.core.run import RunSpec
from paceline.core.value import Value
from paceline.engines import native
from paceline.estimate.memory.device_memory import rank_memory
from paceline.estimate.memory.framework import NATIVE_CPU, NATIVE_CUDA
from paceline.estimate.model.case import Case, cases_of
from paceline.estimate.question import Question
from paceline.estimate.run_case import case_of
from paceline.machines.probe.trace import RankTrace, trace_ranks


class StageTrace(Value):
    """One pipeline rank, traced and estimated alike: live tensors alone."""

    stage: int
    trace: RankTrace
    estimated_bytes: float
    estimated_parts: dict[str, float]

    @property
    def ratio(self) -> float:
        """Estimated over traced."""
        return self.estimated_bytes / self.trace.peak_bytes


class Tracing(Value):
    """The pipeline ranks that need most: the first two and the last."""

    layout: str
    devices: int
    stages: tuple[StageTrace, ...]

    @property
    def largest(self) -> StageTrace:
        """The rank that needs most."""
        return max(self.stages, key=lambda traced: traced.trace.peak_bytes)


def trace(question: Question, python: str = sys.executable) -> Tracing:
    """Follow the recipe in its layout on the devices asked for.

    Raises UserError for what cannot run, SystemFaultError where PyTorch cannot follow it.
    """
    spec = question.spec
    # What follows a step sees no compiled block.
    case = case_of(spec, question.machine, replace(question.software, compiled=False))
    return trace_spec(spec, case, python)


def trace_spec(spec: RunSpec, case: Case, python: str = sys.executable) -> Tracing:
    """Follow a resolved run whose estimate is `case`'s."""
    pp, x = spec.layout.pp, cases_of([case])
    stages = sorted({0, min(1, pp - 1), pp - 1})
    per_stage = spec.world_size // pp
    traces = trace_ranks(
        python, native.settings(spec), spec.world_size, [stage * per_stage for stage in stages]
    )
    # Workspaces of libraries are no tensors, and a trace does not see them.
    framework = NATIVE_CPU if spec.cluster.device == "cpu" else replace(NATIVE_CUDA, fixed=0)
    needed = [rank_memory(x, stage, framework) for stage in stages]
    return Tracing(
        layout=spec.layout.label(spec.world_size),
        devices=spec.world_size,
        stages=tuple(
            StageTrace(
                stage=stage,
                trace=traced,
                estimated_bytes=float(memory.allocated[0]),
                estimated_parts=memory.at(0),
            )
            for stage, traced, memory in zip(stages, traces, needed, strict=True)
        ),
    )
