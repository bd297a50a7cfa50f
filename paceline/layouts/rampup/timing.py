"""The stages of a batch ramp-up, and what each takes in every layout."""

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
from paceline.core.units import counted
from paceline.engines import engine
from paceline.estimate.estimates import Estimates, estimates_of_layouts
from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.model.case import Floats
from paceline.estimate.model.machine import Machine
from paceline.estimate.model.step import StepTime
from paceline.estimate.request import EstimateRequest
from paceline.estimate.run_case import Software
from paceline.files.recipe import Recipe
from paceline.layouts.search.space import Space, feasible


@dataclass(frozen=True)
class Stretch:
    """Steps of one batch; None where nobody knows how many."""

    batch: int
    steps: int | None


@dataclass(frozen=True)
class RampStage:
    """What one layout trains: one batch, or those of a ramp-up up to the next stage's."""

    stretches: tuple[Stretch, ...]

    @property
    def batch(self) -> int:
        """The batch that it begins with."""
        return self.stretches[0].batch

    @property
    def batches(self) -> list[int]:
        """All its batches, the smallest first."""
        return [stretch.batch for stretch in self.stretches]

    @property
    def steps(self) -> int | None:
        """Steps of the stage."""
        counts = [stretch.steps for stretch in self.stretches]
        return None if None in counts else sum(count or 0 for count in counts)

    @property
    def samples(self) -> int | None:
        """Samples of the stage, whole steps of them."""
        if self.steps is None:
            return None
        return sum(stretch.batch * (stretch.steps or 0) for stretch in self.stretches)


def doublings(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first, ... below last, and last."""
    numbers = [first]
    while numbers[-1] * 2 < last:
        numbers.append(numbers[-1] * 2)
    return numbers if first >= last else [*numbers, last]


def given_stages(
    batches: Sequence[int], samples: Sequence[float], total_samples: float | None
) -> list[RampStage]:
    """One batch a stage, each for its own samples; one number holds for all but the last.

    Where the last stage's samples are not given it trains what remains of the total. Raises
    ValueError for another number of numbers, and for batches that do not rise.
    """
    if not _rise(batches):
        raise ValueError("must rise")
    ramp = list(samples) * (len(batches) - 1) if len(samples) == 1 else list(samples)
    if len(ramp) == len(batches) - 1:
        ramp.append(_rest(total_samples, sum(ramp)) if total_samples is not None else -1)
    if len(ramp) != len(batches):
        raise ValueError(f"{len(samples)} numbers of samples for {counted(len(batches), 'stage')}")
    return [
        RampStage((Stretch(batch, ceil(count / batch) if count >= 0 else None),))
        for batch, count in zip(batches, ramp, strict=True)
    ]


def stages_of_ramp_up(
    ramp_up: RampUp,
    global_batch: int,
    batches: Sequence[int],
    total_samples: float | None,
    every_batch: bool = False,
) -> list[RampStage]:
    """The stages of a ramp-up to `global_batch`, by their first batches.

    A stage lasts until the ramp-up has come to the next stage's batch, the last one to the end. It
    trains its own batch all the time, or with `every_batch` those of the ramp-up, each for the
    steps that it has there. Raises ValueError for batches that do not rise or lie outside the
    ramp-up.
    """
    pairs = [*ramp_up.sizes(global_batch), (None, global_batch)]
    if batches[0] < ramp_up.start or batches[-1] > global_batch or not _rise(batches):
        raise ValueError(f"must rise from {ramp_up.start} on to at most {global_batch}")
    stages: list[RampStage] = []
    behind = 0
    for number, batch in enumerate(batches):
        # What the ramp-up trains before the first stage's batch, that stage trains too.
        lower = batch if number else 0
        upper = batches[number + 1] if number + 1 < len(batches) else global_batch + 1
        ends = [(until, b) for until, b in pairs if lower <= b < upper]
        if not every_batch:
            ends = [(ends[-1][0], batch)] if ends else []
        stage = _stage(ends, behind, total_samples)
        stages.append(stage if ends else RampStage((Stretch(batch, 0),)))
        behind += stage.samples or 0
    return stages


def _rise(batches: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(batches))


def _stage(
    ends: Sequence[tuple[int | None, int]], behind: int, total_samples: float | None
) -> RampStage:
    """(until, batch) pairs in steps, with `behind` samples before them."""
    stretches: list[Stretch] = []
    for until, batch in ends:
        limits = [limit for limit in (until, total_samples) if limit is not None]
        steps = ceil(_rest(min(limits), behind) / batch) if limits else None
        behind += (steps or 0) * batch
        stretches.append(Stretch(batch, steps))
    return RampStage(tuple(stretches))


def _rest(total: float, behind: float) -> float:
    return max(0.0, total - behind)


NATIVE = "native"
"""The engine whose own rules are of layouts."""
FOLLOWED = 8
"""The fastest layouts by the closed form of a step, among which the choice is made by following."""


@dataclass(frozen=True)
class Setting:
    """The recipe and the machine of a ramp-up."""

    recipe: Recipe
    spec: RunSpec
    """The recipe on one node."""
    machine: Machine
    evidence: Evidence
    software: Software

    @property
    def per_node(self) -> int:
        """Devices of a node."""
        return self.machine.devices_per_node

    def on(self, nodes: int, batch: int) -> RunSpec:
        """The recipe on so many nodes, at that batch."""
        cluster = self.spec.cluster.model_copy(update={"nodes": nodes})
        training = self.spec.training.model_copy(update={"global_batch": batch})
        return self.spec.model_copy(update={"cluster": cluster, "training": training})


@dataclass(frozen=True)
class StageEstimates:
    """Layouts on one number of nodes with what a stage's mean step takes in each."""

    layouts: Sequence[Layout]
    nodes: int
    weights: tuple[float, ...]
    """Share of the stage's steps that each batch has."""
    batches: tuple[Estimates, ...]

    @property
    def step_s(self) -> Floats:
        """Seconds of the mean step."""
        return self._mean(lambda time: time.total)

    @property
    def interval_s(self) -> tuple[Floats, Floats]:
        """(low, high) of it, as far from it as those of the largest batch's step are from that."""
        largest = self.batches[-1]
        low, high = (end / largest.step_time_s * self.step_s for end in largest.interval_s)
        return low, high

    @property
    def bubble(self) -> Floats:
        """Share of the step in which a rank waits for the pipeline, 0-1."""
        return self._mean(lambda time: time.bubble) / self.step_s

    @property
    def exchange(self) -> Floats:
        """Share in which it waits for gradients and weights of other replicas, 0-1."""
        return self._mean(lambda time: time.dp + time.zero) / self.step_s

    @property
    def memory_bytes(self) -> Floats:
        """In use on the device, at the largest batch."""
        return self.batches[-1].memory.device_used

    @property
    def p_oom(self) -> Floats:
        """Probability to run out of it."""
        return self.batches[-1].p_oom

    def pick(self, rows: NDArray[np.int64]) -> StageEstimates:
        """Some of the layouts."""
        return replace(
            self,
            layouts=[self.layouts[row] for row in rows],
            batches=tuple(estimates.pick(rows) for estimates in self.batches),
        )

    def followed(self) -> StageEstimates:
        """The same with pipelines followed pass by pass."""
        return replace(self, batches=tuple(estimates.simulated() for estimates in self.batches))

    def fastest(self) -> StageEstimates | None:
        """The fastest layout that fits, followed; None where none does."""
        fits = np.flatnonzero(self.batches[-1].fits)
        if not fits.size:
            return None
        near = self.pick(fits[self.step_s[fits].argsort()[:FOLLOWED]]).followed()
        return near.pick(near.step_s.argsort()[:1])

    def _mean(self, seconds: Callable[[StepTime], Floats]) -> Floats:
        """Over the steps of the stage."""
        pairs = zip(self.weights, self.batches, strict=True)
        return np.sum([weight * seconds(estimates.time) for weight, estimates in pairs], axis=0)


def setting_of(question: EstimateRequest, evidence: Evidence) -> Setting:
    """What a question stands for, on one node; the recipe's own ramp-up does not count.

    Raises UserError for what is in no catalog, and for what the recipe's engine refuses.
    """
    machine = question.machine
    if machine.device.memory_bytes is None:
        raise UserError(machine.device.name, "has no memory size in the catalog")
    recipe, spec = question.resolved_recipe, question.spec_of_any_layout
    plain = spec.model_copy(update={"layout": Layout(zero_stage=spec.layout.zero_stage)})
    if spec.engine != NATIVE and (faults := engine(spec.engine).unsupported(plain)):
        raise UserError(recipe.name, "; ".join(faults), remedy="change it with --set")
    return Setting(recipe, spec, machine, evidence, question.resolved_software)


def runnable(setting: Setting, stage: RampStage, nodes: int, space: Space) -> list[Layout]:
    """Layouts that run every batch of the stage on so many nodes."""
    shape, seq_len, devices = (
        setting.spec.model,
        setting.spec.training.seq_len,
        nodes * setting.per_node,
    )
    layouts, _ = feasible(shape, devices, stage.batch, seq_len, space)
    valid: dict[Layout, bool] = {}

    def runs(layout: Layout) -> bool:
        native = setting.spec.engine == NATIVE
        key = layout.model_copy(update={"recompute": "none"}) if native else layout
        if key not in valid:
            valid[key] = not any(problems(setting, layout, batch, nodes) for batch in stage.batches)
        return valid[key]

    return [layout for layout in layouts if runs(layout)]


def problems(setting: Setting, layout: Layout, batch: int, nodes: int) -> list[str]:
    """Why a layout cannot train a batch on so many nodes, by all engines' rules and its own."""
    spec, devices = setting.spec, nodes * setting.per_node
    run = replace(spec.parallel, layout=layout, world_size=devices, global_batch=batch)
    faults = layout_problems(run)
    if faults:
        return faults
    if spec.engine != NATIVE:
        return engine(spec.engine).unsupported(spec.model_copy(update={"layout": layout}))
    return native_problems(replace(run, device="cuda"))


def timed(
    setting: Setting, layouts: Sequence[Layout], stage: RampStage, nodes: int
) -> StageEstimates:
    """The layouts with the stage's mean step, in closed form; memory is its largest batch's."""
    steps = [float(stretch.steps or 0) for stretch in stage.stretches]
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
