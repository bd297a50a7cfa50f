"""What a stage of a ramp-up takes in each of many layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.errors import UserError
from paceline.core.hardware import Cluster
from paceline.core.layout import Layout
from paceline.core.layout_sizes import layout_problems, native_problems
from paceline.core.run import RunSpec
from paceline.estimate.estimate import Question, case_of, machine_of, recipe_of
from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.fit.interval import bounds, log_sd
from paceline.estimate.memory.device_memory import memory, p_oom
from paceline.estimate.memory.framework import frameworks_of
from paceline.estimate.model.case import Case, Floats, varied
from paceline.estimate.model.coefficients import named
from paceline.estimate.model.machine import Machine
from paceline.estimate.model.step import step_time
from paceline.files.recipe import Recipe, resolve
from paceline.layouts.rampup.stages import RampStage
from paceline.layouts.search.columns import columns
from paceline.layouts.search.space import Space, feasible

EVEN_ODDS = 0.5
"""A layout that runs out of memory with a higher probability is not chosen."""


@dataclass(frozen=True)
class Setting:
    """The recipe and the machine of a ramp-up."""

    recipe: Recipe
    spec: RunSpec
    """The recipe on one device, for what does not depend on their number."""
    case: Case
    machine: Machine
    evidence: Evidence
    limit_bytes: float

    @property
    def per_node(self) -> int:
        """Devices of a node."""
        return self.machine.devices_per_node


@dataclass(frozen=True)
class Timed:
    """Layouts on one number of nodes with what a stage's mean step takes in each."""

    layouts: Sequence[Layout]
    nodes: int
    step_s: Floats
    low_s: Floats
    high_s: Floats
    bubble: Floats
    """Share of the step in which a rank waits for the pipeline, 0-1."""
    exchange: Floats
    """Share in which it waits for gradients and weights of other replicas, 0-1."""
    memory_bytes: Floats
    p_oom: Floats

    def fastest(self) -> int | None:
        """The row of the fastest layout that fits; None where none does."""
        fits = np.flatnonzero(self.p_oom <= EVEN_ODDS)
        return int(fits[self.step_s[fits].argmin()]) if fits.size else None


def setting(question: Question, evidence: Evidence) -> Setting:
    """What a question stands for; its devices and the recipe's own ramp-up do not count.

    Raises UserError for what is in no catalog.
    """
    recipe = recipe_of(question)
    here = machine_of(question)
    if here.device.memory_bytes is None:
        raise UserError(here.device.name, "has no memory size in the catalog")
    single = recipe.training.model_copy(
        update={"ramp_up": None, "global_batch": 1, "batch_per_device": None}
    )
    plain = recipe.model_copy(update={"layout": Layout(), "training": single})
    one = Cluster(name="estimate", device=here.device.name, nodes=1, devices_per_node=1)
    spec = resolve(plain, one, True, question.variant)
    case = case_of(spec, here, question.stack, question.compiled)
    # Megatron of 2020-22 stores the scores of attention.
    return Setting(recipe, spec, case, here, evidence, here.device.memory_bytes)


def runnable(here: Setting, stage: RampStage, nodes: int, space: Space) -> list[Layout]:
    """Layouts that run every batch of the stage on so many nodes."""
    shape, seq_len, devices = here.spec.model, here.spec.training.seq_len, nodes * here.per_node
    found, _ = feasible(shape, devices, stage.batch, seq_len, space)
    known: dict[Layout, bool] = {}

    def runs(layout: Layout) -> bool:
        key = layout.model_copy(update={"recompute": "none"})
        if key not in known:
            known[key] = not any(problems(here, layout, batch, nodes) for batch in stage.batches)
        return known[key]

    return [layout for layout in found if runs(layout)]


def problems(here: Setting, layout: Layout, batch: int, nodes: int) -> list[str]:
    """Why a layout cannot train a batch on so many nodes, by any engine's rules and the recipe's."""
    spec, devices = here.spec, nodes * here.per_node
    found = layout_problems(layout, spec.model, devices, batch, spec.training.seq_len)
    if found or spec.engine != "native":
        return found
    compiled = spec.training.compile != "none"
    return native_problems(
        layout, spec.model, devices, batch,
        dtype=spec.training.dtype, device="cuda", compiled=compiled,
    )  # fmt: skip


def timed(here: Setting, layouts: Sequence[Layout], stage: RampStage, nodes: int) -> Timed:
    """The layouts with the stage's mean step; memory is that of its largest batch."""
    coefficients = named(here.evidence.fit().centre)
    weights = [float(stretch.steps or 0) for stretch in stage.stretches]
    weights = weights if sum(weights) else [1.0] * len(weights)
    total = bubble = exchange = np.zeros(len(layouts))
    x = varied(here.case, columns(layouts))
    devices = np.full(len(layouts), float(nodes * here.per_node))
    for batch, weight in zip(stage.batches, weights, strict=True):
        x.numbers.update(devices=devices, global_batch=np.full(len(layouts), float(batch)))
        time = step_time(x, coefficients)
        total = total + weight * time.total
        bubble = bubble + weight * time.bubble
        exchange = exchange + weight * (time.dp + time.zero)
    frameworks = frameworks_of(here.machine.generation, native=False)
    needed = memory(x, frameworks, here.machine.device.context_bytes)
    step = total / sum(weights)
    low, high = bounds(step, log_sd(x, here.evidence.fit(), here.evidence.residual_sd))
    return Timed(
        layouts, nodes, step, low, high, bubble / total, exchange / total,
        needed.device_used, p_oom(needed, here.limit_bytes),
    )  # fmt: skip
