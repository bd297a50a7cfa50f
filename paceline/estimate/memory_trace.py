"""Memory of a layout from a traced step of the native trainer, compared with the memory model."""

from __future__ import annotations

import sys
from dataclasses import replace

from paceline.core.run import RunSpec
from paceline.core.value import Value
from paceline.engines import native
from paceline.estimate.memory.device_memory import rank_memory
from paceline.estimate.memory.framework import NATIVE_CPU, NATIVE_CUDA
from paceline.estimate.model.case import Case, cases_of
from paceline.estimate.request import EstimateRequest
from paceline.estimate.run_case import case_of
from paceline.machines.probe.trace import RankTrace, trace_ranks


class StageTrace(Value):
    """Traced and estimated memory of live tensors on one pipeline rank."""

    stage: int
    trace: RankTrace
    estimated_bytes: float
    estimated_parts: dict[str, float]

    @property
    def ratio(self) -> float:
        """Estimated peak divided by the traced peak."""
        return self.estimated_bytes / self.trace.peak_bytes


class MemoryTrace(Value):
    """Traces of the pipeline ranks with the highest memory: the first two and the last."""

    layout: str
    devices: int
    stages: tuple[StageTrace, ...]

    @property
    def largest(self) -> StageTrace:
        """The rank with the highest peak."""
        return max(self.stages, key=lambda stage: stage.trace.peak_bytes)


def trace(request: EstimateRequest, python: str = sys.executable) -> MemoryTrace:
    """Trace the recipe in its layout on the requested devices.

    Raises UserError if it cannot run, SystemFaultError if PyTorch cannot trace it.
    """
    spec = request.spec
    # Tracing runs without compiled blocks.
    case = case_of(spec, request.machine, replace(request.resolved_software, compiled=False))
    return trace_spec_memory(spec, case, python)


def trace_spec_memory(spec: RunSpec, case: Case, python: str = sys.executable) -> MemoryTrace:
    """Trace a resolved run and compare it with the memory estimate of `case`."""
    pp, x = spec.layout.pp, cases_of([case])
    stages = sorted({0, min(1, pp - 1), pp - 1})
    per_stage = spec.world_size // pp
    traces = trace_ranks(
        python, native.settings(spec), spec.world_size, [stage * per_stage for stage in stages]
    )
    # Library workspaces are not tensors, so a trace does not see them.
    framework = NATIVE_CPU if spec.cluster.device == "cpu" else replace(NATIVE_CUDA, fixed=0)
    estimates = [rank_memory(x, stage, framework) for stage in stages]
    return MemoryTrace(
        layout=spec.layout.label(spec.world_size),
        devices=spec.world_size,
        stages=tuple(
            StageTrace(
                stage=stage,
                trace=rank_trace,
                estimated_bytes=float(memory.allocated[0]),
                estimated_parts=memory.at(0),
            )
            for stage, rank_trace, memory in zip(stages, traces, estimates, strict=True)
        ),
    )
