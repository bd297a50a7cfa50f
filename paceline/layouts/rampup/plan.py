"""The plan of a ramp-up: for every stage the nodes, the layout and what it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from paceline.core.errors import UserError
from paceline.core.layout import Layout
from paceline.core.rates import tokens_per_s
from paceline.core.units import SECONDS_PER_DAY
from paceline.core.value import Value
from paceline.layouts.rampup.stages import RampStage, doublings, given_stages, stages_of_ramp_up
from paceline.layouts.rampup.timing import Setting, StageEstimates, runnable, timed
from paceline.layouts.search.space import Space

HOUR_S = 3600.0


@dataclass(frozen=True)
class Wish:
    """What a plan is made for."""

    batches: tuple[int, ...] = ()
    """First batch of each stage; empty doubles the ramp-up's first one until it is the whole."""
    most_nodes: int = 64
    least_efficiency: float = 0.8
    """Tokens/s of a device that a stage keeps of the best that the last stage's batch reaches."""
    samples: tuple[float, ...] = ()
    """Samples of the stages; empty takes the recipe's ramp-up."""
    tokens: float | None = None
    """Length of the whole training; None takes the recipe's."""
    every_batch: bool = False
    """A stage trains all batches of the ramp-up up to the next stage's."""
    most_tp: int | None = None
    """None is a node, at most 8."""


class StagePlan(Value):
    """One stage in one layout on one number of nodes; fractions are 0-1, 80 % lie in low to high."""

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


def plan_ramp_up(here: Setting, wish: Wish) -> RampPlan:
    """The plan; raises UserError for stages that cannot be made or do not fit into memory."""
    stages = stages_of(here, wish)
    space = space_of(here, wish)
    found = [options(here, stage, wish, space) for stage in stages]
    best = max(one.tokens_per_s_per_device for one in found[-1])
    chosen = [_chosen(each, best * wish.least_efficiency) for each in found]
    told = [one.against(chosen[-1]) for one in chosen]
    return RampPlan(
        recipe=here.recipe.name,
        device=here.machine.device.name,
        devices_per_node=here.per_node,
        most_nodes=wish.most_nodes,
        least_efficiency=wish.least_efficiency,
        stages=tuple(told),
        alternatives=tuple(one.against(chosen[-1]) for each in found for one in each),
        device_hours=total([one.device_hours for one in told]),
        days=total([one.days for one in told]),
        notes=here.machine.notes,
        evidence=here.evidence.title,
    )


def stages_of(here: Setting, wish: Wish) -> list[RampStage]:
    """The stages with their steps; raises UserError when neither recipe nor wish says how long."""
    training = here.recipe.training
    ramp_up = training.ramp_up
    whole = training.global_batch if isinstance(training.global_batch, int) else None
    batches, tokens = wish.batches, wish.tokens or training.total_tokens
    if tokens and not isfinite(tokens):
        raise UserError(f"--tokens {tokens}", "is no finite number")
    total_samples = tokens / training.seq_len if tokens else None
    if not batches and ramp_up and whole:
        batches = tuple(doublings(ramp_up.start, whole))
    if not batches:
        raise UserError(here.recipe.name, "has no ramp-up", remedy="--stages 32,64,128,256,512")
    try:
        if wish.samples:
            return given_stages(batches, wish.samples, total_samples)
        if ramp_up and whole:
            return stages_of_ramp_up(ramp_up, whole, batches, total_samples, wish.every_batch)
    except ValueError as error:
        raise UserError(f"--stages {','.join(map(str, batches))}", str(error)) from error
    raise UserError(
        here.recipe.name,
        "has no ramp-up that says how long a stage lasts",
        remedy="--samples 133000 for each, or --set "
        "'training.ramp_up={start: 32, increment: 32, samples: 2000000}'",
    )


def space_of(here: Setting, wish: Wish) -> Space:
    """What a plan varies: tensor and pipeline parallelism, micro-batch, recomputation.

    ZeRO stage and context parallelism stay as in the recipe. Stages that go on from each other's
    checkpoint need one vocabulary, so a tp that would pad it more is left out there.
    """
    layout, shape = here.recipe.layout, here.spec.model
    most_tp = wish.most_tp or min(8, here.per_node)
    if wish.every_batch and shape.kind == "decoder":
        rows = shape.padded_vocab(1)
        most_tp = max(tp for tp in doublings(1, most_tp) if shape.padded_vocab(tp) == rows)
    space = Space(most_tp=most_tp, most_cp=layout.cp, zero_stages=(layout.zero_stage,))
    return space.around(layout)


def options(here: Setting, stage: RampStage, wish: Wish, space: Space) -> list[StagePlan]:
    """The fastest layout that fits on 1, 2, 4, ... nodes; raises UserError when there is none."""
    found: list[StagePlan] = []
    for nodes in doublings(1, wish.most_nodes):
        layouts = runnable(here, stage, nodes, space)
        fastest = timed(here, layouts, stage, nodes).fastest() if layouts else None
        if fastest:
            found.append(stage_plan(here, stage, fastest))
    if not found:
        raise UserError(
            f"a stage of {stage.batch}",
            f"has no layout that fits on up to {wish.most_nodes} nodes of {here.per_node} x "
            f"{here.machine.device.name}",
            remedy="--max-nodes, or another --set layout.zero_stage",
        )
    return found


def stage_plan(here: Setting, stage: RampStage, estimates: StageEstimates) -> StagePlan:
    """The first layout as a plan of the stage; its efficiency is still that against itself."""
    layout, devices = estimates.layouts[0], estimates.nodes * here.per_node
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
        tokens_per_s=tokens_per_s(here.spec.training.seq_len, mean, step),
        efficiency=1.0,
        samples=stage.samples,
        steps=stage.steps,
        device_hours=None if seconds is None else seconds * devices / HOUR_S,
        days=None if seconds is None else seconds / SECONDS_PER_DAY,
    )


def total(values: Sequence[float | None]) -> float | None:
    """The sum; None where a value is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _chosen(found: Sequence[StagePlan], least: float) -> StagePlan:
    """The fastest that keeps `least` tokens/s of a device, or the one that keeps most."""
    enough = [one for one in found if one.tokens_per_s_per_device >= least]
    if not enough:
        return max(found, key=lambda one: one.tokens_per_s_per_device)
    return max(enough, key=lambda one: one.tokens_per_s)
