"""Check a hand-made schedule with the time model: which stages cannot run or are slow."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from paceline.core.errors import UserError, unreadable
from paceline.core.layout import AXIS_FIELDS, Layout
from paceline.core.layout_checks import layout_problems
from paceline.core.problem import invalid_input
from paceline.core.units import gib, pluralize, step_seconds
from paceline.core.value import Value
from paceline.estimate.estimates import MAX_P_OOM_TO_FIT
from paceline.files.documents import read_text
from paceline.layouts.rampup.plan import (
    RampOptions,
    RampPlan,
    StagePlan,
    planned_stages,
    search_space,
    stage_plan,
    total_if_known,
)
from paceline.layouts.rampup.timing import (
    RampContext,
    RampStage,
    layout_refusals,
    runnable_layouts,
    stage_estimates,
)

COLUMN_ALIASES = {
    "nnodes": "nodes",
    "num_nodes": "nodes",
    "bs": "batch",
    "gbs": "batch",
    "global_batch": "batch",
    "mbs": "micro_batch",
    "zero": "zero_stage",
}
"""Aliases of columns, in lower case with underscores."""
REQUIRED_COLUMNS = ("nodes", "batch")
LAYOUT_COLUMNS = ("micro_batch", *AXIS_FIELDS, "zero_stage", "recompute")


@dataclass(frozen=True)
class ScheduleLine:
    """One line of a schedule."""

    nodes: int
    batch: int
    layout: Layout


def read_schedule(path: Path, layout: Layout) -> list[ScheduleLine]:
    """Read a schedule, sorted by batch; axes without a column are taken from `layout`.

    Raises UserError with the line for an invalid schedule, and for a repeated batch.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(str(path), error) from error
    schedule = [_line(where, row, layout) for where, row in _rows(str(path), lines)]
    if not schedule:
        raise UserError(str(path), "contains no schedule line", allowed="nodes,batch,micro_batch")
    batches = [line.batch for line in schedule]
    twice = next((batch for batch in batches if batches.count(batch) > 1), None)
    if twice is not None:
        raise UserError(str(path), f"lists batch {twice} twice", remedy="use one line per batch")
    return sorted(schedule, key=lambda line: line.batch)


def _rows(path: str, lines: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the location and the cells by column of each line."""
    names: list[str] | None = None
    for number, cells in enumerate(map(_cells, lines), start=1):
        where = f"{path}:{number}"
        if not any(cells) or all(set(cell) <= set("-: ") for cell in cells):
            continue
        if names is None:
            names = [_name(cell) for cell in cells]
            twice = [name for name in (*REQUIRED_COLUMNS, *LAYOUT_COLUMNS) if names.count(name) > 1]
            if twice:
                raise UserError(where, f"has two columns {twice[0]}")
            missing = [name for name in REQUIRED_COLUMNS if name not in names]
            if missing:
                raise UserError(
                    where,
                    f"has no column {', '.join(missing)}",
                    allowed=", ".join((*REQUIRED_COLUMNS, *LAYOUT_COLUMNS)),
                )
            continue
        if len(cells) != len(names):
            raise UserError(
                where,
                f"has {pluralize(len(cells), 'cell')} under {pluralize(len(names), 'column')}",
            )
        yield where, dict(zip(names, cells, strict=True))


def _name(title: str) -> str:
    """Return a normalised column name: `Micro-batch` becomes micro_batch."""
    name = title.lower().replace("-", "_").replace(" ", "_")
    return COLUMN_ALIASES.get(name, name)


def _cells(line: str) -> list[str]:
    text = line.strip()
    if text.startswith("|"):
        return [cell.strip() for cell in text.strip("|").split("|")]
    return [cell.strip() for cell in next(csv.reader([text]), [])]


def _line(where: str, row: Mapping[str, str], layout: Layout) -> ScheduleLine:
    changes: dict[str, Any] = {name: row[name] for name in LAYOUT_COLUMNS if row.get(name)}
    try:
        nodes, batch = int(row["nodes"]), int(row["batch"])
        if nodes < 1 or batch < 1:
            raise ValueError
        axes = {k: v if k == "recompute" else int(v) for k, v in changes.items()}
        return ScheduleLine(nodes, batch, Layout.model_validate({**layout.model_dump(), **axes}))
    except ValidationError as error:
        raise invalid_input(where, error) from error
    except ValueError as error:
        raise UserError(where, "contains a value that is not a number from 1") from error


Verdict = Literal["cannot run", "out of memory", "slow", "good"]
MAX_SLOWDOWN = 1.1
"""Step time relative to the best layout on the same nodes, above which a stage is slow."""
MIN_REPORTED_SHARE = 0.1
"""Fraction of a step from which a cause is reported."""


class CheckedStage(Value):
    """One line of a schedule."""

    batch: int
    nodes: int
    label: str
    micro_batch: int
    verdict: Verdict
    reasons: tuple[str, ...]
    plan: StagePlan | None
    """Estimate of the stage; None if it cannot run."""
    best: StagePlan | None
    """The fastest layout that fits on the same nodes."""
    slowdown: float | None
    """Step time over that of `best`."""


class CheckedSchedule(Value):
    """The whole schedule; hours and days are None if a line cannot run."""

    stages: tuple[CheckedStage, ...]
    device_hours: float | None
    days: float | None


def check_schedule(
    setting: RampContext, options: RampOptions, schedule: Sequence[ScheduleLine], plan: RampPlan
) -> CheckedSchedule:
    """Check every line; efficiencies are relative to the last stage of `plan`.

    Raises UserError for batches that do not form stages.
    """
    batches = tuple(line.batch for line in schedule)
    try:
        ramp_stages = planned_stages(
            setting, replace(options, batches=batches, one_stage_per_batch=False)
        )
    except UserError as error:
        raise UserError("the schedule", f"has batches that {error.what}") from error
    by_batch = {stage.batch: stage for stage in ramp_stages}
    last = plan.stages[-1]
    stages = [
        _check_stage(
            setting, options, line, by_batch[line.batch], _next_batch(batches, line.batch), last
        )
        for line in schedule
    ]
    return CheckedSchedule(
        stages=tuple(stages),
        device_hours=total_if_known(
            [stage.plan.device_hours if stage.plan else None for stage in stages]
        ),
        days=total_if_known([stage.plan.days if stage.plan else None for stage in stages]),
    )


def _check_stage(
    setting: RampContext,
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
    slowdown = plan.step_time_s / best.step_time_s if plan and best else None
    reasons = [*faults, *(_reasons(plan) if plan else [])]
    if plan:
        unsupported_reasons = layout_refusals(setting, layout, line.batch, line.nodes)
        reasons += [
            f"not supported by the native trainer: {why.partition(',')[0]}"
            for why in unsupported_reasons
        ]
        reasons += _odd_batches(setting, line, later)
    if best and slowdown and slowdown > MAX_SLOWDOWN:
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
        verdict=_verdict(plan, slowdown),
        reasons=tuple(reasons),
        plan=plan,
        best=best,
        slowdown=slowdown,
    )


def _plan(setting: RampContext, line: ScheduleLine, stage: RampStage, last: StagePlan) -> StagePlan:
    estimates = stage_estimates(setting, [line.layout], stage, line.nodes).simulated()
    return stage_plan(setting, stage, estimates).relative_to(last)


def _best(
    setting: RampContext,
    options: RampOptions,
    line: ScheduleLine,
    stage: RampStage,
    last: StagePlan,
) -> StagePlan | None:
    layouts = runnable_layouts(setting, stage, line.nodes, search_space(setting, options))
    if not layouts:
        return None
    fastest = stage_estimates(setting, layouts, stage, line.nodes).fastest()
    return stage_plan(setting, stage, fastest).relative_to(last) if fastest else None


def _verdict(plan: StagePlan | None, slowdown: float | None) -> Verdict:
    if plan is None:
        return "cannot run"
    if plan.p_oom > MAX_P_OOM_TO_FIT:
        return "out of memory"
    return "slow" if slowdown is not None and slowdown > MAX_SLOWDOWN else "good"


def _reasons(plan: StagePlan) -> list[str]:
    """Return the largest losses of the step."""
    num, pp = plan.micro_batches, plan.layout.pp
    reasons: list[str] = []
    if plan.p_oom > MAX_P_OOM_TO_FIT:
        reasons.append(f"needs {gib(plan.memory_bytes)} per device")
    each = "one micro-batch" if num == 1 else f"{num} micro-batches"
    if plan.bubble_share >= MIN_REPORTED_SHARE:
        reasons.append(
            f"{each} for {pp} pipeline stages: {plan.bubble_share:.0%} of the step is bubble"
        )
    if plan.exchange_share >= MIN_REPORTED_SHARE:
        reasons.append(
            f"{each} per replica: {plan.exchange_share:.0%} of the step is exposed gradient "
            "communication"
        )
    return reasons


def _odd_batches(setting: RampContext, line: ScheduleLine, later: int | None) -> list[str]:
    """Report batches of the recipe's ramp-up within this stage that do not divide."""
    ramp_up, whole = setting.recipe.training.ramp_up, setting.recipe.training.global_batch
    if ramp_up is None or not isinstance(whole, int):
        return []
    unit = line.layout.dp(line.nodes * setting.per_node) * line.layout.micro_batch
    upper = later or line.batch
    odd = [b for _, b in ramp_up.sizes(whole) if line.batch < b < upper and b % unit]
    if not odd:
        return []
    batches_text = f"batch {odd[0]}" if len(odd) == 1 else f"batches {odd[0]} to {odd[-1]}"
    return [f"{batches_text} of the recipe's ramp-up: not divisible by {unit}"]


def _next_batch(batches: Sequence[int], batch: int) -> int | None:
    at = batches.index(batch) + 1
    return batches[at] if at < len(batches) else None
