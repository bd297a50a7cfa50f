"""The plan of a ramp-up: for every stage the nodes, the layout and what it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from paceline.core.errors import UserError
from paceline.core.layout import Layout
from paceline.core.rates import tokens_per_s
from paceline.core.units import SECONDS_PER_DAY, counted
from paceline.core.value import Value
from paceline.layouts.rampup.timing import (
    RampStage,
    Setting,
    StageEstimates,
    doublings,
    given_stages,
    runnable,
    stages_of_ramp_up,
    timed,
)
from paceline.layouts.search.space import Space

HOUR_S = 3600.0


@dataclass(frozen=True)
class RampOptions:
    """What a plan is made for."""

    batches: tuple[int, ...] = ()
    """First batch of each stage; empty doubles the ramp-up's first one up to the whole."""
    most_nodes: int = 64
    least_efficiency: float = 0.8
    """Share of the best tokens/s of a device at the last stage's batch that a stage keeps, 0-1."""
    samples: tuple[float, ...] = ()
    """Samples of the stages; empty takes the recipe's ramp-up."""
    tokens: float | None = None
    """Length of the whole training; None takes the recipe's."""
    every_batch: bool = False
    """A stage trains all batches of the ramp-up up to the next stage's."""
    most_tp: int | None = None
    """None is a node, at most 8."""


class StagePlan(Value):
    """One stage in one layout on so many nodes; fractions are 0-1, 80 % lie in low to high."""

    batch: int
    batches: tuple[int, ...]
    nodes: int
    devices: int
    layout: Layout
    label: str
    micro_batches: int
    """Of one replica in a step of `batch`."""
    step_time_s: float
    low_s: float
    high_s: float
    bubble: float
    """Share of the step that is lost to filling and draining the pipeline."""
    exchange: float
    """Share in which replicas wait for each other's gradients and weights."""
    memory_bytes: float
    p_oom: float
    tokens_per_s: float
    efficiency: float
    """Tokens/s of a device over the last stage's."""
    samples: int | None
    steps: int | None
    device_hours: float | None
    days: float | None

    @property
    def tokens_per_s_per_device(self) -> float:
        """Tokens/s of one device."""
        return self.tokens_per_s / self.devices

    def against(self, last: StagePlan) -> StagePlan:
        """The plan with its efficiency held against another one."""
        share = self.tokens_per_s_per_device / last.tokens_per_s_per_device
        return self.model_copy(update={"efficiency": share})


class RampPlan(Value):
    """The stages, in order."""

    recipe: str
    device: str
    devices_per_node: int
    most_nodes: int
    least_efficiency: float
    stages: tuple[StagePlan, ...]
    alternatives: tuple[StagePlan, ...]
    """The fastest layout of every stage on every number of nodes that was looked at."""
    device_hours: float | None
    days: float | None
    notes: tuple[str, ...]
    evidence: str


def plan_ramp_up(setting: Setting, options: RampOptions) -> RampPlan:
    """The plan; raises UserError for stages that cannot be made or do not fit into memory."""
    stages = stages_of(setting, options)
    space = space_of(setting, options)
    by_stage = [fastest_by_nodes(setting, stage, options, space) for stage in stages]
    best = max(plan.tokens_per_s_per_device for plan in by_stage[-1])
    chosen = [_chosen(plans, best * options.least_efficiency) for plans in by_stage]
    last = chosen[-1]
    chosen = [plan.against(last) for plan in chosen]
    return RampPlan(
        recipe=setting.recipe.name,
        device=setting.machine.device.name,
        devices_per_node=setting.per_node,
        most_nodes=options.most_nodes,
        least_efficiency=options.least_efficiency,
        stages=tuple(chosen),
        alternatives=tuple(plan.against(last) for plans in by_stage for plan in plans),
        device_hours=total([plan.device_hours for plan in chosen]),
        days=total([plan.days for plan in chosen]),
        notes=setting.machine.notes,
        evidence=setting.evidence.title,
    )


def stages_of(setting: Setting, options: RampOptions) -> list[RampStage]:
    """The stages with their steps; raises UserError where nothing says how long they last."""
    training = setting.recipe.training
    ramp_up = training.ramp_up
    whole = training.global_batch if isinstance(training.global_batch, int) else None
    batches, tokens = options.batches, options.tokens or training.total_tokens
    if tokens and not isfinite(tokens):
        raise UserError(f"--tokens {tokens}", "is no finite number")
    total_samples = tokens / training.seq_len if tokens else None
    if not batches and ramp_up and whole:
        batches = tuple(doublings(ramp_up.start, whole))
    if not batches:
        raise UserError(setting.recipe.name, "has no ramp-up", remedy="--stages 32,64,128,256,512")
    try:
        if options.samples:
            return given_stages(batches, options.samples, total_samples)
        if ramp_up and whole:
            return stages_of_ramp_up(ramp_up, whole, batches, total_samples, options.every_batch)
    except ValueError as error:
        raise UserError(f"--stages {','.join(map(str, batches))}", str(error)) from error
    raise UserError(
        setting.recipe.name,
        "has no ramp-up that says how long a stage lasts",
        remedy="--samples 133000 for each, or --set "
        "'training.ramp_up={start: 32, increment: 32, samples: 2000000}'",
    )


def space_of(setting: Setting, options: RampOptions) -> Space:
    """What a plan varies: tensor and pipeline parallelism, micro-batch, recomputation.

    ZeRO stage and context parallelism stay as in the recipe. Stages that go on from each other's
    checkpoint need one vocabulary, so a tp that would pad it more is left out there.
    """
    layout, shape = setting.recipe.layout, setting.spec.model
    most_tp = options.most_tp or min(8, setting.per_node)
    if options.every_batch and shape.kind == "decoder":
        rows = shape.padded_vocab(1)
        most_tp = max(tp for tp in doublings(1, most_tp) if shape.padded_vocab(tp) == rows)
    space = Space(most_tp=most_tp, most_cp=layout.cp, zero_stages=(layout.zero_stage,))
    return space.around(layout)


def fastest_by_nodes(
    setting: Setting, stage: RampStage, options: RampOptions, space: Space
) -> list[StagePlan]:
    """The fastest layout that fits on 1, 2, 4, ... nodes; raises UserError when there is none."""
    plans: list[StagePlan] = []
    for nodes in doublings(1, options.most_nodes):
        layouts = runnable(setting, stage, nodes, space)
        fastest = timed(setting, layouts, stage, nodes).fastest() if layouts else None
        if fastest:
            plans.append(stage_plan(setting, stage, fastest))
    if not plans:
        raise UserError(
            f"a stage of {stage.batch}",
            f"has no layout that fits on up to {counted(options.most_nodes, 'node')} of "
            f"{setting.per_node} x "
            f"{setting.machine.device.name}",
            remedy="--max-nodes, or another --set layout.zero_stage",
        )
    return plans


def stage_plan(setting: Setting, stage: RampStage, estimates: StageEstimates) -> StagePlan:
    """The first layout as a plan of the stage; its efficiency is still that against itself."""
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
        bubble=float(estimates.bubble[0]),
        exchange=float(estimates.exchange[0]),
        memory_bytes=float(estimates.memory_bytes[0]),
        p_oom=float(estimates.p_oom[0]),
        tokens_per_s=tokens_per_s(setting.spec.training.seq_len, mean, step),
        efficiency=1.0,
        samples=stage.samples,
        steps=stage.steps,
        device_hours=None if seconds is None else seconds * devices / HOUR_S,
        days=None if seconds is None else seconds / SECONDS_PER_DAY,
    )


def total(values: Sequence[float | None]) -> float | None:
    """The sum; None where a value is not known."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) if len(numbers) == len(values) else None


def _chosen(plans: Sequence[StagePlan], least: float) -> StagePlan:
    """The fastest that keeps `least` tokens/s of a device, or the one that keeps most."""
    enough = [plan for plan in plans if plan.tokens_per_s_per_device >= least]
    if not enough:
        return max(plans, key=lambda plan: plan.tokens_per_s_per_device)
    return max(enough, key=lambda plan: plan.tokens_per_s)
