"""Plan a batch ramp-up: nodes, layout, time and cost of every stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from paceline.core.errors import UserError
from paceline.core.layout import Layout
from paceline.core.rates import tokens_per_s
from paceline.core.units import SECONDS_PER_DAY, pluralize
from paceline.core.value import Value
from paceline.layouts.rampup.timing import (
    RampContext,
    RampStage,
    StageEstimates,
    doublings,
    runnable_layouts,
    stage_estimates,
    stages_from_batches,
    stages_from_ramp_up,
)
from paceline.layouts.search.space import SearchSpace

HOUR_S = 3600.0


@dataclass(frozen=True)
class RampOptions:
    """Options of a ramp-up plan."""

    batches: tuple[int, ...] = ()
    """First batch of each stage; empty doubles the ramp-up's first batch up to the full one."""
    max_nodes: int = 64
    min_efficiency: float = 0.8
    """Minimum tokens/s/device of a stage, 0-1, relative to the best at the full batch."""
    samples: tuple[float, ...] = ()
    """Samples per stage; empty takes the recipe's ramp-up."""
    tokens: float | None = None
    """Tokens of the whole training; None takes the recipe's."""
    one_stage_per_batch: bool = False
    """A stage trains all batches of the ramp-up up to the next stage."""
    max_tp: int | None = None
    """Maximum tensor parallelism; None is the size of a node, up to 8."""


class StagePlan(Value):
    """One stage in one layout on a number of nodes; shares are 0-1, low and high span 80%."""

    batch: int
    batches: tuple[int, ...]
    nodes: int
    devices: int
    layout: Layout
    label: str
    micro_batches: int
    """Micro-batches per replica in a step of `batch`."""
    step_time_s: float
    low_s: float
    high_s: float
    bubble_share: float
    """Share of the step lost to filling and draining the pipeline."""
    exchange_share: float
    """Share of the step with exposed communication of gradients and weights."""
    memory_bytes: float
    p_oom: float
    tokens_per_s: float
    efficiency: float
    """Tokens/s/device relative to the last stage."""
    samples: int | None
    steps: int | None
    device_hours: float | None
    days: float | None

    @property
    def tokens_per_s_per_device(self) -> float:
        """Tokens/s per device."""
        return self.tokens_per_s / self.devices

    def relative_to(self, last: StagePlan) -> StagePlan:
        """Return the plan with its efficiency relative to another one."""
        share = self.tokens_per_s_per_device / last.tokens_per_s_per_device
        return self.model_copy(update={"efficiency": share})


class RampPlan(Value):
    """Plan of all stages, in order."""

    recipe: str
    device: str
    devices_per_node: int
    max_nodes: int
    min_efficiency: float
    stages: tuple[StagePlan, ...]
    alternatives: tuple[StagePlan, ...]
    """Fastest layout of every stage on every number of nodes considered."""
    device_hours: float | None
    days: float | None
    notes: tuple[str, ...]
    evidence: str


def plan_ramp_up(setting: RampContext, options: RampOptions) -> RampPlan:
    """Return the plan; raise UserError for stages that are invalid or do not fit in memory."""
    stages = planned_stages(setting, options)
    space = search_space(setting, options)
    by_stage = [fastest_by_nodes(setting, stage, options, space) for stage in stages]
    best = max(plan.tokens_per_s_per_device for plan in by_stage[-1])
    stage_plans = [_fastest_efficient(plans, best * options.min_efficiency) for plans in by_stage]
    last = stage_plans[-1]
    stage_plans = [plan.relative_to(last) for plan in stage_plans]
    return RampPlan(
        recipe=setting.recipe.name,
        device=setting.machine.device.name,
        devices_per_node=setting.per_node,
        max_nodes=options.max_nodes,
        min_efficiency=options.min_efficiency,
        stages=tuple(stage_plans),
        alternatives=tuple(plan.relative_to(last) for plans in by_stage for plan in plans),
        device_hours=total_if_known([plan.device_hours for plan in stage_plans]),
        days=total_if_known([plan.days for plan in stage_plans]),
        notes=setting.machine.notes,
        evidence=setting.evidence.title,
    )


def planned_stages(setting: RampContext, options: RampOptions) -> list[RampStage]:
    """Return the stages with their steps; raise UserError if their length is unknown."""
    training = setting.recipe.training
    ramp_up = training.ramp_up
    full_batch = training.global_batch if isinstance(training.global_batch, int) else None
    batches, tokens = options.batches, options.tokens or training.total_tokens
    if tokens and not isfinite(tokens):
        raise UserError(f"--tokens {tokens}", "is not a finite number")
    total_samples = tokens / training.seq_len if tokens else None
    if not batches and ramp_up and full_batch:
        batches = tuple(doublings(ramp_up.start, full_batch))
    if not batches:
        raise UserError(setting.recipe.name, "has no ramp-up", remedy="--stages 32,64,128,256,512")
    try:
        if options.samples:
            return stages_from_batches(batches, options.samples, total_samples)
        if ramp_up and full_batch:
            return stages_from_ramp_up(
                ramp_up, full_batch, batches, total_samples, options.one_stage_per_batch
            )
    except ValueError as error:
        raise UserError(f"--stages {','.join(map(str, batches))}", str(error)) from error
    raise UserError(
        setting.recipe.name,
        "has no ramp-up that defines how long a stage lasts",
        remedy="--samples 133000 for each, or --set "
        "'training.ramp_up={start: 32, increment: 32, samples: 2000000}'",
    )


def search_space(setting: RampContext, options: RampOptions) -> SearchSpace:
    """Return the search space: tensor and pipeline parallelism, micro-batch, recomputation.

    ZeRO stage and context parallelism stay as in the recipe. Stages that resume from each other's
    checkpoint need the same padded vocabulary, so larger tp is excluded if it pads more.
    """
    layout, shape = setting.recipe.layout, setting.spec.model
    max_tp = options.max_tp or min(8, setting.per_node)
    if options.one_stage_per_batch and shape.kind == "decoder":
        rows = shape.padded_vocab(1)
        max_tp = max(tp for tp in doublings(1, max_tp) if shape.padded_vocab(tp) == rows)
    space = SearchSpace(max_tp=max_tp, max_cp=layout.cp, zero_stages=(layout.zero_stage,))
    return space.around(layout)


def fastest_by_nodes(
    setting: RampContext, stage: RampStage, options: RampOptions, space: SearchSpace
) -> list[StagePlan]:
    """Return the fastest layout that fits on 1, 2, 4, ... nodes; raise UserError if none does."""
    plans: list[StagePlan] = []
    for nodes in doublings(1, options.max_nodes):
        layouts = runnable_layouts(setting, stage, nodes, space)
        fastest = stage_estimates(setting, layouts, stage, nodes).fastest() if layouts else None
        if fastest:
            plans.append(stage_plan(setting, stage, fastest))
    if not plans:
        raise UserError(
            f"a stage of {stage.batch}",
            f"has no layout that fits on up to {pluralize(options.max_nodes, 'node')} of "
            f"{setting.per_node} x "
            f"{setting.machine.device.name}",
            remedy="--max-nodes, or another --set layout.zero_stage",
        )
    return plans


def stage_plan(setting: RampContext, stage: RampStage, estimates: StageEstimates) -> StagePlan:
    """Return the first layout as a plan of the stage, with efficiency 1."""
    layout, devices = estimates.layouts[0], estimates.nodes * setting.per_node
    step, (low, high) = float(estimates.step_s[0]), estimates.interval_s
    mean = stage.samples / stage.steps if stage.samples and stage.steps else stage.batch
    seconds = None if stage.steps is None else stage.steps * step
    return StagePlan(
        batch=stage.batch,
        batches=tuple(stage.batches),
        nodes=estimates.nodes,
        devices=devices,
        layout=layout,
        label=layout.label(devices),
        micro_batches=layout.num_microbatches(devices, stage.batch),
        step_time_s=step,
        low_s=float(low[0]),
        high_s=float(high[0]),
        bubble_share=float(estimates.bubble_share[0]),
        exchange_share=float(estimates.exchange_share[0]),
        memory_bytes=float(estimates.memory_bytes[0]),
        p_oom=float(estimates.p_oom[0]),
        tokens_per_s=tokens_per_s(setting.spec.training.seq_len, mean, step),
        efficiency=1.0,
        samples=stage.samples,
        steps=stage.steps,
        device_hours=None if seconds is None else seconds * devices / HOUR_S,
        days=None if seconds is None else seconds / SECONDS_PER_DAY,
    )


def total_if_known(values: Sequence[float | None]) -> float | None:
    """Return the sum; None if a value is unknown."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) if len(numbers) == len(values) else None


def _fastest_efficient(plans: Sequence[StagePlan], min_rate: float) -> StagePlan:
    """Return the fastest plan with `min_rate` tokens/s/device, or the most efficient one."""
    enough = [plan for plan in plans if plan.tokens_per_s_per_device >= min_rate]
    if not enough:
        return max(plans, key=lambda plan: plan.tokens_per_s_per_device)
    return max(enough, key=lambda plan: plan.tokens_per_s)
