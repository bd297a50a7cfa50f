"""A schedule made by hand held against the time model: what cannot run, what is slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from paceline.core.errors import UserError
from paceline.core.layout_checks import layout_problems
from paceline.core.units import gib, step_seconds
from paceline.core.value import Value
from paceline.estimate.estimates import P_OOM_EVEN
from paceline.layouts.rampup.plan import (
    RampOptions,
    RampPlan,
    StagePlan,
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
    setting: Setting, options: RampOptions, schedule: Sequence[ScheduleLine], plan: RampPlan
) -> CheckedSchedule:
    """Every line judged; efficiencies are against the last stage of `plan`.

    Raises UserError for batches that make no stages.
    """
    batches = tuple(line.batch for line in schedule)
    try:
        ramp_stages = stages_of(setting, replace(options, batches=batches, every_batch=False))
    except UserError as error:
        raise UserError("the schedule", f"has batches that {error.what}") from error
    by_batch = {stage.batch: stage for stage in ramp_stages}
    last = plan.stages[-1]
    stages = [
        _checked(setting, options, line, by_batch[line.batch], _later(batches, line.batch), last)
        for line in schedule
    ]
    return CheckedSchedule(
        stages=tuple(stages),
        device_hours=total([stage.plan.device_hours if stage.plan else None for stage in stages]),
        days=total([stage.plan.days if stage.plan else None for stage in stages]),
    )


def _checked(
    setting: Setting,
    options: RampOptions,
    line: ScheduleLine,
    stage: RampStage,
    later: int | None,
    last: StagePlan,
) -> CheckedStage:
    layout, devices = line.layout, line.nodes * setting.per_node
    run = replace(setting.spec.parallel, layout=layout, world_size=devices, global_batch=line.batch)
    faults = layout_problems(run)
    plan = None if faults else _plan(setting, line, stage, last)
    best = _best(setting, options, line, stage, last)
    slower = plan.step_time_s / best.step_time_s if plan and best else None
    reasons = [*faults, *(_reasons(plan) if plan else [])]
    if plan:
        refused = problems(setting, layout, line.batch, line.nodes)
        reasons += [f"Paceline's trainer refuses it: {why.partition(',')[0]}" for why in refused]
        reasons += _odd_batches(setting, line, later)
    if best and slower and slower > SLOW:
        reasons.append(
            f"{best.label}, micro-batch {best.layout.micro_batch}, "
            f"recompute {best.layout.recompute} takes {step_seconds(best.step_time_s)} s on the "
            "same nodes"
        )
    return CheckedStage(
        batch=line.batch,
        nodes=line.nodes,
        label=plan.label if plan else "",
        micro_batch=layout.micro_batch,
        verdict=_verdict(plan, slower),
        reasons=tuple(reasons),
        plan=plan,
        best=best,
        slower=slower,
    )


def _plan(setting: Setting, line: ScheduleLine, stage: RampStage, last: StagePlan) -> StagePlan:
    estimates = timed(setting, [line.layout], stage, line.nodes).followed()
    return stage_plan(setting, stage, estimates).against(last)


def _best(
    setting: Setting, options: RampOptions, line: ScheduleLine, stage: RampStage, last: StagePlan
) -> StagePlan | None:
    layouts = runnable(setting, stage, line.nodes, space_of(setting, options))
    if not layouts:
        return None
    fastest = timed(setting, layouts, stage, line.nodes).fastest()
    return stage_plan(setting, stage, fastest).against(last) if fastest else None


def _verdict(plan: StagePlan | None, slower: float | None) -> Verdict:
    if plan is None:
        return "cannot run"
    if plan.p_oom > P_OOM_EVEN:
        return "out of memory"
    return "slow" if slower is not None and slower > SLOW else "good"


def _reasons(plan: StagePlan) -> list[str]:
    """What the step loses most to."""
    num, pp = plan.micro_batches, plan.layout.pp
    reasons: list[str] = []
    if plan.p_oom > P_OOM_EVEN:
        reasons.append(f"needs {gib(plan.memory_bytes)} a device")
    each = "one micro-batch" if num == 1 else f"{num} micro-batches"
    if plan.bubble >= WORTH_TELLING:
        reasons.append(f"{each} for {pp} pipeline stages: {plan.bubble:.0%} of the step is bubble")
    if plan.exchange >= WORTH_TELLING:
        reasons.append(
            f"{each} a replica: {plan.exchange:.0%} of the step waits for other replicas' gradients"
        )
    return reasons


def _odd_batches(setting: Setting, line: ScheduleLine, later: int | None) -> list[str]:
    """The recipe's ramp-up has batches between this stage's and the next that do not divide."""
    ramp_up, whole = setting.recipe.training.ramp_up, setting.recipe.training.global_batch
    if ramp_up is None or not isinstance(whole, int):
        return []
    unit = line.layout.dp(line.nodes * setting.per_node) * line.layout.micro_batch
    upper = later or line.batch
    odd = [b for _, b in ramp_up.sizes(whole) if line.batch < b < upper and b % unit]
    if not odd:
        return []
    named = f"batch {odd[0]}" if len(odd) == 1 else f"batches {odd[0]} to {odd[-1]}"
    return [f"{named} of the recipe's ramp-up would not divide by {unit}"]


def _later(batches: Sequence[int], batch: int) -> int | None:
    at = batches.index(batch) + 1
    return batches[at] if at < len(batches) else None
