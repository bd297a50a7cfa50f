"""Stages of a batch ramp-up, and estimates of each in every layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import UserError
from paceline.core.layout import Layout
from paceline.core.layout_checks import layout_problems, native_problems
from paceline.core.run import RunSpec
from paceline.core.training import RampUp
from paceline.core.units import pluralize
from paceline.engines import engine
from paceline.estimate.estimates import Estimates, estimates_of_layouts
from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.model.case import Floats
from paceline.estimate.model.machine import Machine
from paceline.estimate.model.step import StepTime
from paceline.estimate.request import EstimateRequest
from paceline.estimate.run_case import Software
from paceline.files.recipe import Recipe
from paceline.layouts.search.space import SearchSpace, feasible_layouts


@dataclass(frozen=True)
class BatchSteps:
    """Number of steps with one batch; None if unknown."""

    batch: int
    steps: int | None


@dataclass(frozen=True)
class RampStage:
    """One stage: a single batch, or the batches of a ramp-up until the next stage."""

    parts: tuple[BatchSteps, ...]

    @property
    def batch(self) -> int:
        """First batch of the stage."""
        return self.parts[0].batch

    @property
    def batches(self) -> list[int]:
        """All batches of the stage, the smallest first."""
        return [stretch.batch for stretch in self.parts]

    @property
    def steps(self) -> int | None:
        """Steps of the stage; None if unknown."""
        counts = [stretch.steps for stretch in self.parts]
        return None if None in counts else sum(count or 0 for count in counts)

    @property
    def samples(self) -> int | None:
        """Samples of the stage, a multiple of its batches; None if unknown."""
        if self.steps is None:
            return None
        return sum(stretch.batch * (stretch.steps or 0) for stretch in self.parts)


def doublings(first: int, last: int) -> list[int]:
    """Return first, 2 first, 4 first, ... below last, and last."""
    numbers = [first]
    while numbers[-1] * 2 < last:
        numbers.append(numbers[-1] * 2)
    return numbers if first >= last else [*numbers, last]


def stages_from_batches(
    batches: Sequence[int], samples: Sequence[float], total_samples: float | None
) -> list[RampStage]:
    """Return stages of one batch each; a single number of samples applies to all but the last.

    If the last stage's samples are missing, it trains the remaining samples. Raises ValueError for
    a wrong number of samples, and for batches that do not increase.
    """
    if not _are_increasing(batches):
        raise ValueError("must increase")
    ramp = list(samples) * (len(batches) - 1) if len(samples) == 1 else list(samples)
    if len(ramp) == len(batches) - 1:
        ramp.append(_remaining(total_samples, sum(ramp)) if total_samples is not None else -1)
    if len(ramp) != len(batches):
        raise ValueError(f"{len(samples)} sample counts for {pluralize(len(batches), 'stage')}")
    return [
        RampStage((BatchSteps(batch, ceil(count / batch) if count >= 0 else None),))
        for batch, count in zip(batches, ramp, strict=True)
    ]


def stages_from_ramp_up(
    ramp_up: RampUp,
    global_batch: int,
    batches: Sequence[int],
    total_samples: float | None,
    one_stage_per_batch: bool = False,
) -> list[RampStage]:
    """Return the stages of a ramp-up to `global_batch`, given their first batches.

    A stage lasts until the ramp-up reaches the next stage's batch. It trains its own batch
    throughout, or with `one_stage_per_batch` all batches of the ramp-up for their own steps. Raises
    ValueError for batches that do not increase or are outside the ramp-up.
    """
    pairs = [*ramp_up.sizes(global_batch), (None, global_batch)]
    if batches[0] < ramp_up.start or batches[-1] > global_batch or not _are_increasing(batches):
        raise ValueError(f"must increase from {ramp_up.start} to at most {global_batch}")
    stages: list[RampStage] = []
    num_samples_before = 0
    for number, batch in enumerate(batches):
        # The first stage also trains the batches below its own.
        lower = batch if number else 0
        upper = batches[number + 1] if number + 1 < len(batches) else global_batch + 1
        ends = [(until, b) for until, b in pairs if lower <= b < upper]
        if not one_stage_per_batch:
            ends = [(ends[-1][0], batch)] if ends else []
        stage = _stage(ends, num_samples_before, total_samples)
        stages.append(stage if ends else RampStage((BatchSteps(batch, 0),)))
        num_samples_before += stage.samples or 0
    return stages


def _are_increasing(batches: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(batches))


def _stage(
    ends: Sequence[tuple[int | None, int]], num_samples_before: int, total_samples: float | None
) -> RampStage:
    """Convert (until sample, batch) pairs to steps, after `num_samples_before` earlier samples."""
    parts: list[BatchSteps] = []
    for until, batch in ends:
        limits = [limit for limit in (until, total_samples) if limit is not None]
        steps = ceil(_remaining(min(limits), num_samples_before) / batch) if limits else None
        num_samples_before += (steps or 0) * batch
        parts.append(BatchSteps(batch, steps))
    return RampStage(tuple(parts))


def _remaining(total: float, num_samples_before: float) -> float:
    return max(0.0, total - num_samples_before)


NATIVE = "native"
"""The engine with its own layout rules."""
NUM_SIMULATED = 8
"""Number of fastest layouts by the closed form whose pipelines are then simulated."""


@dataclass(frozen=True)
class RampContext:
    """Recipe, machine and calibration of a ramp-up."""

    recipe: Recipe
    spec: RunSpec
    """Run specification on one node."""
    machine: Machine
    evidence: Evidence
    software: Software

    @property
    def per_node(self) -> int:
        """Devices per node."""
        return self.machine.devices_per_node

    def on(self, nodes: int, batch: int) -> RunSpec:
        """Return the run specification on `nodes` nodes with a global batch."""
        cluster = self.spec.cluster.model_copy(update={"nodes": nodes})
        training = self.spec.training.model_copy(update={"global_batch": batch})
        return self.spec.model_copy(update={"cluster": cluster, "training": training})


@dataclass(frozen=True)
class StageEstimates:
    """Estimates of a stage's mean step for layouts on one number of nodes."""

    layouts: Sequence[Layout]
    nodes: int
    weights: tuple[float, ...]
    """Fraction of the stage's steps with each batch."""
    batches: tuple[Estimates, ...]

    @property
    def step_s(self) -> Floats:
        """Mean step time in seconds."""
        return self._mean(lambda time: time.total)

    @property
    def interval_s(self) -> tuple[Floats, Floats]:
        """80% interval (low, high), with the relative width of the largest batch's interval."""
        largest = self.batches[-1]
        low, high = (end / largest.step_time_s * self.step_s for end in largest.interval_s)
        return low, high

    @property
    def bubble_share(self) -> Floats:
        """Pipeline bubble as a share of the step, 0-1."""
        return self._mean(lambda time: time.bubble) / self.step_s

    @property
    def exchange_share(self) -> Floats:
        """Exposed communication of gradients and weights as a share of the step, 0-1."""
        return self._mean(lambda time: time.dp + time.zero) / self.step_s

    @property
    def memory_bytes(self) -> Floats:
        """Device memory in use at the largest batch."""
        return self.batches[-1].memory.device_used

    @property
    def p_oom(self) -> Floats:
        """Probability of running out of memory at the largest batch."""
        return self.batches[-1].p_oom

    def pick(self, rows: NDArray[np.int64]) -> StageEstimates:
        """Return the estimates of some layouts."""
        return replace(
            self,
            layouts=[self.layouts[row] for row in rows],
            batches=tuple(estimates.pick(rows) for estimates in self.batches),
        )

    def simulated(self) -> StageEstimates:
        """Return the estimates with pipelines simulated pass by pass."""
        return replace(self, batches=tuple(estimates.simulated() for estimates in self.batches))

    def fastest(self) -> StageEstimates | None:
        """Return the fastest layout that fits, with a simulated pipeline; None if none fits."""
        fits = np.flatnonzero(self.batches[-1].fits)
        if not fits.size:
            return None
        near = self.pick(fits[self.step_s[fits].argsort()[:NUM_SIMULATED]]).simulated()
        return near.pick(near.step_s.argsort()[:1])

    def _mean(self, seconds: Callable[[StepTime], Floats]) -> Floats:
        """Average over the steps of the stage."""
        pairs = zip(self.weights, self.batches, strict=True)
        return np.sum([weight * seconds(estimates.time) for weight, estimates in pairs], axis=0)


def ramp_context(question: EstimateRequest, evidence: Evidence) -> RampContext:
    """Return the context of a request on one node, ignoring the recipe's own ramp-up.

    Raises UserError for what is in no catalog, and for what the recipe's engine refuses.
    """
    machine = question.machine
    if machine.device.memory_bytes is None:
        raise UserError(machine.device.name, "has no memory size in the catalog")
    recipe, spec = question.resolved_recipe, question.spec_of_any_layout
    plain = spec.model_copy(update={"layout": Layout(zero_stage=spec.layout.zero_stage)})
    if spec.engine != NATIVE and (faults := engine(spec.engine).unsupported(plain)):
        raise UserError(recipe.name, "; ".join(faults), remedy="change it with --set")
    return RampContext(recipe, spec, machine, evidence, question.resolved_software)


def runnable_layouts(
    setting: RampContext, stage: RampStage, nodes: int, space: SearchSpace
) -> list[Layout]:
    """Return the layouts that can run every batch of the stage on `nodes` nodes."""
    shape, seq_len, devices = (
        setting.spec.model,
        setting.spec.training.seq_len,
        nodes * setting.per_node,
    )
    layouts, _ = feasible_layouts(shape, devices, stage.batch, seq_len, space)
    valid: dict[Layout, bool] = {}

    def runs(layout: Layout) -> bool:
        native = setting.spec.engine == NATIVE
        key = layout.model_copy(update={"recompute": "none"}) if native else layout
        if key not in valid:
            valid[key] = not any(
                layout_refusals(setting, layout, batch, nodes) for batch in stage.batches
            )
        return valid[key]

    return [layout for layout in layouts if runs(layout)]


def layout_refusals(setting: RampContext, layout: Layout, batch: int, nodes: int) -> list[str]:
    """Return the reasons why a layout cannot train a batch on `nodes` nodes."""
    spec, devices = setting.spec, nodes * setting.per_node
    run = replace(spec.parallel, layout=layout, world_size=devices, global_batch=batch)
    faults = layout_problems(run)
    if faults:
        return faults
    if spec.engine != NATIVE:
        return engine(spec.engine).unsupported(spec.model_copy(update={"layout": layout}))
    return native_problems(replace(run, device="cuda"))


def stage_estimates(
    setting: RampContext, layouts: Sequence[Layout], stage: RampStage, nodes: int
) -> StageEstimates:
    """Return closed-form estimates of the stage's mean step; memory is at the largest batch."""
    steps = [float(stretch.steps or 0) for stretch in stage.parts]
    steps = steps if sum(steps) else [1.0] * len(steps)
    largest = estimates_of_layouts(
        setting.on(nodes, stage.batches[-1]),
        setting.machine,
        setting.evidence,
        layouts,
        setting.software,
    )
    return StageEstimates(
        layouts,
        nodes,
        weights=tuple(count / sum(steps) for count in steps),
        batches=tuple(largest.at_batch(batch) for batch in stage.batches),
    )
