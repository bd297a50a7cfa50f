"""Step time with its interval, memory, and the probability of running out of memory.

All commands (`run`, `estimate`, `sweep`, `tune`, `estimate rampup`, `explain`) use this module and
therefore report the same values for the same run. Estimates are arrays with one row per run. A
single estimate simulates its pipeline. Thousands of layouts are first ranked in closed form, and
only the best of them are simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from paceline.core.layout import Layout
from paceline.core.run import RunSpec
from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.fit.interval import bounds, log_sd
from paceline.estimate.memory.device_memory import MemoryEstimate, memory, p_oom
from paceline.estimate.memory.framework import FRAMEWORKS, Framework, frameworks_of
from paceline.estimate.model.case import Bools, Cases, Floats, cases_of
from paceline.estimate.model.coefficients import coefficient_values
from paceline.estimate.model.machine import Machine
from paceline.estimate.model.pipeline import simulated_step
from paceline.estimate.model.step import StepTime, step_time
from paceline.estimate.run_case import Software, case_of, cases_of_layouts, software_of

MAX_P_OOM_TO_FIT = 0.5
"""Maximum probability of running out of memory at which a layout counts as fitting."""
MAX_P_OOM_TO_RUN = 0.95
"""Maximum probability of running out of memory at which a trial run is worthwhile."""


@dataclass(frozen=True)
class Estimates:
    """Estimates of training runs on one kind of device, one row per run."""

    x: Cases
    evidence: Evidence
    time: StepTime
    """Seconds of a step by part."""
    frameworks: Mapping[str, Framework] | Framework
    context_bytes: float | None
    """Bytes of the driver's context; None takes the default of the device's generation."""
    device_bytes: Floats
    """Memory of the device in bytes; infinite if unknown."""
    tensor_bytes: Floats
    """The recipe's limit on live tensors in bytes; infinite without a limit."""

    @property
    def step_time_s(self) -> Floats:
        """Seconds of a step."""
        return self.time.total

    @cached_property
    def interval_s(self) -> tuple[Floats, Floats]:
        """Bounds (low, high) of the 80% interval of the step time."""
        by = self.evidence
        sd = log_sd(self.x, by.fit(), by.residual_sd, by.levels)
        return bounds(self.step_time_s, sd)

    @cached_property
    def memory(self) -> MemoryEstimate:
        """Memory of the most loaded device in bytes: allocated, reserved, in use, and by part."""
        return memory(self.x, self.frameworks, self.context_bytes)

    @property
    def limit_bytes(self) -> Floats:
        """Maximum memory in use, by the size of the device and the recipe's limit."""
        overhead = self.memory.device_used - self.memory.allocated
        return np.minimum(self.device_bytes, self.tensor_bytes + overhead)

    @cached_property
    def p_oom(self) -> Floats:
        """Probability of running out of memory, 0-1; 0 if the memory size is unknown."""
        return p_oom(self.memory, self.limit_bytes)

    @property
    def fits(self) -> Bools:
        """Rows that fit into memory more likely than not."""
        return self.p_oom <= MAX_P_OOM_TO_FIT

    def pick(self, rows: NDArray[np.int64]) -> Estimates:
        """Return the given rows."""
        return replace(
            self,
            x=self.x.pick(rows),
            time=self.time.pick(rows),
            device_bytes=self.device_bytes[rows],
            tensor_bytes=self.tensor_bytes[rows],
        )

    def at_batch(self, global_batch: int) -> Estimates:
        """Return the rows with another batch, in closed form."""
        x = self.x.with_numbers(global_batch=global_batch)
        return replace(self, x=x, time=step_time(x, coefficient_values(self.evidence.fit().centre)))

    def simulated(self) -> Estimates:
        """Return the rows with simulated pipelines: exact, but too slow for thousands of rows."""
        return replace(
            self, time=simulated_step(self.x, coefficient_values(self.evidence.fit().centre))
        )


def estimates_of_cases(x: Cases, evidence: Evidence) -> Estimates:
    """Estimate cases in closed form, without a memory limit."""
    no_limit = np.full(x.size, inf)
    time = step_time(x, coefficient_values(evidence.fit().centre))
    return Estimates(
        x=x,
        evidence=evidence,
        time=time,
        frameworks=FRAMEWORKS,
        context_bytes=None,
        device_bytes=no_limit,
        tensor_bytes=no_limit,
    )


def estimates_of_runs(
    specs: Sequence[RunSpec],
    machines: Sequence[Machine],
    evidence: Evidence,
    software: Software | None = None,
) -> Estimates:
    """Estimate runs, each on its machine, with simulated pipelines.

    The default `software` is that of each run's engine. All machines have the same kind of device.
    Raises UserError as `case_of` does.
    """
    softwares = [software or software_of(spec) for spec in specs]
    x = cases_of(list(map(case_of, specs, machines, softwares)))
    native = any(each.native for each in softwares)
    return _with_memory_limits(x, specs, machines, evidence, native).simulated()


def estimates_of_layouts(
    spec: RunSpec,
    machine: Machine,
    evidence: Evidence,
    layouts: Sequence[Layout],
    software: Software | None = None,
) -> Estimates:
    """Estimate one run in many layouts, in closed form."""
    software = software or software_of(spec)
    x = cases_of_layouts(spec, machine, software, layouts)
    return _with_memory_limits(x, [spec] * x.size, [machine] * x.size, evidence, software.native)


def _with_memory_limits(
    x: Cases,
    specs: Sequence[RunSpec],
    machines: Sequence[Machine],
    evidence: Evidence,
    native: bool,
) -> Estimates:
    """Return closed-form estimates of cases with the memory limits of their runs.

    Processes on one CPU machine share its memory, so each gets less if there are more.
    """
    sizes = [
        spec.cluster.device_memory_bytes or machine.device.memory_bytes or inf
        for spec, machine in zip(specs, machines, strict=True)
    ]
    return replace(
        estimates_of_cases(x, evidence),
        frameworks=frameworks_of(machines[0].generation, native),
        context_bytes=machines[0].device.context_bytes,
        device_bytes=np.array(sizes, dtype=float),
        tensor_bytes=np.array([spec.memory_limit_bytes or inf for spec in specs], dtype=float),
    )
