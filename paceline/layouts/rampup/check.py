"""A schedule made by hand held against the time model: what cannot run, and what runs but is slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from paceline.core.errors import UserError
from paceline.core.layout_sizes import layout_problems
from paceline.core.value import Value
from paceline.estimate.estimates import P_OOM_EVEN
from paceline.layouts.rampup.plan import (
    RampPlan,
    StagePlan,
    Wish,
    space_of,
    stage_plan,
    stages_of,
    total,
)
from paceline.layouts.rampup.schedule_table import ScheduleLine
from paceline.layouts.rampup.stages import RampStage
from paceline.layouts.rampup.timing import Setting, problems, runnable, timed

Verdict = Literal["cannot run", "out of memory", "slow", "good"]
SLOW = 1.1
"""Step time over that of the best layout on the same nodes."""
WORTH_TELLING = 0.1
"""Share of a step that is named as what makes it slow."""


class CheckedStage(Value):
    """One line of a schedule."""

    batch: int
    nodes: int
    label: str
    micro_batch: int
    verdict: Verdict
    reasons: tuple[str, ...]
    plan: StagePlan | None
    """What it takes; None where it cannot run."""
    best: StagePlan | None
    """The fastest layout that fits on the same nodes."""
    slower: float | None
    """Step time over that of `best`."""


class CheckedSchedule(Value):
    """The whole schedule; hours and days as far as every line can run."""

    stages: tuple[CheckedStage, ...]
    device_hours: float | None
    days: float | None


def check_schedule(
    here: Setting, wish: Wish, given: Sequence[ScheduleLine], plan: RampPlan
) -> CheckedSchedule:
    """Every line judged; efficiencies are against the last stage of `plan`.

    Raises UserError for batches that make no stages.
    """
    batches = tuple(one.batch for one in given)
    try:
        made = stages_of(here, replace(wish, batches=batches, every_batch=False))
    except UserError as error:
        raise UserError("the schedule", f"has batches that {error.what}") from error
    stages = {stage.batch: stage for stage in made}
    last = plan.stages[-1]
    told = [
        _checked(here, wish, one, stages[one.batch], _later(batches, one.batch), last)
        for one in given
    ]
    return CheckedSchedule(
        stages=tuple(told),
        device_hours=total([one.plan.device_hours if one.plan else None for one in told]),
        days=total([one.plan.days if one.plan else None for one in told]),
    )


def _checked(
    here: Setting,
    wish: Wish,
    given: ScheduleLine,
    stage: RampStage,
    later: int | None,
    last: StagePlan,
) -> CheckedStage:
    layout, devices = given.layout, given.nodes * here.per_node
    found = layout_problems(
        layout, here.spec.model, devices, given.batch, here.spec.training.seq_len
    )
    plan = None if found else _plan(here, given, stage, last)
    best = _best(here, wish, given, stage, last)
    slower = plan.step_time_s / best.step_time_s if plan and best else None
    told = [*found, *(_reasons(plan) if plan else [])]
    if plan:
        refused = problems(here, layout, given.batch, given.nodes)
        told += [f"Paceline's trainer refuses it: {why.partition(',')[0]}" for why in refused]
        told += _odd_batches(here, given, later)
    if best and slower and slower > SLOW:
        told.append(
            f"{best.label}, micro-batch {best.layout.micro_batch}, recompute {best.layout.recompute} "
            f"takes {best.step_time_s:.3g} s on the same nodes"
        )
    return CheckedStage(
        batch=given.batch,
        nodes=given.nodes,
        label=plan.label if plan else "",
        micro_batch=layout.micro_batch,
        verdict=_verdict(plan, slower),
        reasons=tuple(told),
        plan=plan,
        best=best,
        slower=slower,
    )


def _plan(here: Setting, given: ScheduleLine, stage: RampStage, last: StagePlan) -> StagePlan:
    estimates = timed(here, [given.layout], stage, given.nodes).followed()
    return stage_plan(here, stage, estimates).against(last)


def _best(
    here: Setting, wish: Wish, given: ScheduleLine, stage: RampStage, last: StagePlan
) -> StagePlan | None:
    layouts = runnable(here, stage, given.nodes, space_of(here, wish))
    if not layouts:
        return None
    fastest = timed(here, layouts, stage, given.nodes).fastest()
    return stage_plan(here, stage, fastest).against(last) if fastest else None


def _verdict(plan: StagePlan | None, slower: float | None) -> Verdict:
    if plan is None:
        return "cannot run"
    if plan.p_oom > P_OOM_EVEN:
        return "out of memory"
    return "slow" if slower is not None and slower > SLOW else "good"


def _reasons(plan: StagePlan) -> list[str]:
    """What the step loses most to."""
    num, pp = plan.micro_batches, plan.layout.pp
    told: list[str] = []
    if plan.p_oom > P_OOM_EVEN:
        told.append(f"needs {plan.memory_bytes / 1e9:.1f} GB a device")
    each = "one micro-batch" if num == 1 else f"{num} micro-batches"
    if plan.bubble >= WORTH_TELLING:
        told.append(f"{each} for {pp} pipeline stages: {plan.bubble:.0%} of the step is bubble")
    if plan.exchange >= WORTH_TELLING:
        told.append(
            f"{each} a replica: {plan.exchange:.0%} of the step waits for other replicas' gradients"
        )
    return told


def _odd_batches(here: Setting, given: ScheduleLine, later: int | None) -> list[str]:
    """The recipe's ramp-up has batches between this stage's and the next that do not divide."""
    ramp_up, whole = here.recipe.training.ramp_up, here.recipe.training.global_batch
    if ramp_up is None or not isinstance(whole, int):
        return []
    unit = given.layout.dp(given.nodes * here.per_node) * given.layout.micro_batch
    upper = later or given.batch
    odd = [b for _, b in ramp_up.sizes(whole) if given.batch < b < upper and b % unit]
    if not odd:
        return []
    named = f"batch {odd[0]}" if len(odd) == 1 else f"batches {odd[0]} to {odd[-1]}"
    return [f"{named} of the recipe's ramp-up would not divide by {unit}"]


def _later(batches: Sequence[int], batch: int) -> int | None:
    at = batches.index(batch) + 1
    return batches[at] if at < len(batches) else None
