"""Step time, its interval, memory and the chance to run out of it: where every estimate is made.

`run`, `estimate`, `sweep`, `tune`, `rampup`, scenarios and explanations ask here, so that the same
training on the same machine by the same evidence gets the same figures from all of them. One
answer holds many rows as arrays. Where thousands of layouts are ranked, rows have the closed form
of a step at first; the picked ones are then `followed`, which is what a single estimate is.
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
from paceline.estimate.model.coefficients import named
from paceline.estimate.model.machine import Machine
from paceline.estimate.model.pipeline import followed_step
from paceline.estimate.model.step import StepTime, step_time
from paceline.estimate.run_case import Software, case_of, cases_of_layouts, software_of

P_OOM_EVEN = 0.5
"""What runs out of memory with a higher probability does not fit."""
P_OOM_SURE = 0.95
"""What runs out of memory with a higher probability is not worth a run."""


@dataclass(frozen=True)
class Estimates:
    """Trainings on one kind of device by one evidence, one row each."""

    x: Cases
    evidence: Evidence
    time: StepTime
    """Seconds of a step, by part."""
    frameworks: Mapping[str, Framework] | Framework
    context_bytes: float | None
    """Of the device's driver; None takes what is usual for its generation."""
    device_bytes: Floats
    """Memory of the device, infinite where nobody knows."""
    tensor_bytes: Floats
    """What live tensors may take at most by the recipe, infinite where it does not say."""

    @property
    def step_time_s(self) -> Floats:
        """Seconds of a step."""
        return self.time.total

    @cached_property
    def interval_s(self) -> tuple[Floats, Floats]:
        """(low, high): 80 % of the steps lie between them."""
        by = self.evidence
        sd = log_sd(self.x, by.fit(), by.residual_sd, by.levels)
        return bounds(self.step_time_s, sd)

    @cached_property
    def memory(self) -> MemoryEstimate:
        """Bytes of the most loaded device: allocated, reserved, in use, and by part."""
        return memory(self.x, self.frameworks, self.context_bytes)

    @property
    def limit_bytes(self) -> Floats:
        """What a device may have in use: its memory, or what the recipe's limit leaves of it."""
        beside = self.memory.device_used - self.memory.allocated
        return np.minimum(self.device_bytes, self.tensor_bytes + beside)

    @cached_property
    def p_oom(self) -> Floats:
        """Probability to run out of memory, 0-1; 0 where nobody knows how much there is."""
        return p_oom(self.memory, self.limit_bytes)

    @property
    def fits(self) -> Bools:
        """Which rather fit than not."""
        return self.p_oom <= P_OOM_EVEN

    def pick(self, rows: NDArray[np.int64]) -> Estimates:
        """Some of the rows, by their numbers."""
        return replace(
            self,
            x=self.x.pick(rows),
            time=self.time.pick(rows),
            device_bytes=self.device_bytes[rows],
            tensor_bytes=self.tensor_bytes[rows],
        )

    def at_batch(self, global_batch: int) -> Estimates:
        """The rows with another batch, in closed form."""
        x = self.x.changed(global_batch=global_batch)
        return replace(self, x=x, time=step_time(x, named(self.evidence.fit().centre)))

    def followed(self) -> Estimates:
        """The rows with their pipelines followed pass by pass: exact, and not for thousands."""
        return replace(self, time=followed_step(self.x, named(self.evidence.fit().centre)))


def estimates_of_cases(x: Cases, evidence: Evidence) -> Estimates:
    """Of cases that are no runs, in closed form; nothing limits their memory."""
    unlimited = np.full(x.size, inf)
    time = step_time(x, named(evidence.fit().centre))
    return Estimates(x, evidence, time, FRAMEWORKS, None, unlimited, unlimited)


def estimates_of_runs(
    specs: Sequence[RunSpec],
    machines: Sequence[Machine],
    evidence: Evidence,
    software: Software | None = None,
) -> Estimates:
    """Of runs, each on its machine, followed; `software` None is what their engines compute by.

    Machines are of one kind of device. Raises UserError as `case_of` does.
    """
    softwares = [software or software_of(spec) for spec in specs]
    x = cases_of(list(map(case_of, specs, machines, softwares)))
    native = any(each.native for each in softwares)
    return _limited(x, specs, machines, evidence, native).followed()


def estimates_of_layouts(
    spec: RunSpec,
    machine: Machine,
    evidence: Evidence,
    layouts: Sequence[Layout],
    software: Software | None = None,
) -> Estimates:
    """Of one run in many layouts, in closed form."""
    software = software or software_of(spec)
    x = cases_of_layouts(spec, machine, software, layouts)
    return _limited(x, [spec] * x.size, [machine] * x.size, evidence, software.native)


def _limited(
    x: Cases,
    specs: Sequence[RunSpec],
    machines: Sequence[Machine],
    evidence: Evidence,
    native: bool,
) -> Estimates:
    """Cases of runs in closed form, with the memory that each may use.

    Processes of one machine share its memory, so that runs of more of them have less each.
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
