"""A schedule made by hand held against the time model: what cannot run, what is slow."""

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
from paceline.core.problem import refusal
from paceline.core.units import counted, gib, step_seconds
from paceline.core.value import Value
from paceline.estimate.estimates import MAX_P_OOM_TO_FIT
from paceline.layouts.rampup.plan import (
    RampOptions,
    RampPlan,
    StagePlan,
    space_of,
    stage_plan,
    stages_of,
    total,
)
from paceline.layouts.rampup.timing import RampStage, Setting, problems, runnable, timed

NAMES = {
    "nnodes": "nodes",
    "num_nodes": "nodes",
    "bs": "batch",
    "gbs": "batch",
    "global_batch": "batch",
    "mbs": "micro_batch",
    "zero": "zero_stage",
}
"""Other names of columns, in lower case, words joined by _."""
NEEDED = ("nodes", "batch")
AXES = ("micro_batch", *AXIS_FIELDS, "zero_stage", "recompute")


@dataclass(frozen=True)
class ScheduleLine:
    """One line of a schedule."""

    nodes: int
    batch: int
    layout: Layout


def read_schedule(path: Path, layout: Layout) -> list[ScheduleLine]:
    """The lines by rising batch; axes without a column are those of `layout`.

    Raises UserError for what is no schedule, with the line, and for a batch that comes twice.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(str(path), error) from error
    schedule = [_line(where, row, layout) for where, row in _rows(str(path), lines)]
    if not schedule:
        raise UserError(str(path), "holds no line of a schedule", allowed="nodes,batch,micro_batch")
    batches = [line.batch for line in schedule]
    twice = next((batch for batch in batches if batches.count(batch) > 1), None)
    if twice is not None:
        raise UserError(str(path), f"has batch {twice} twice", remedy="one line for each batch")
    return sorted(schedule, key=lambda line: line.batch)


def _rows(path: str, lines: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Where each line stands, and its cells by column."""
    names: list[str] | None = None
    for number, cells in enumerate(map(_cells, lines), start=1):
        where = f"{path}:{number}"
        if not any(cells) or all(set(cell) <= set("-: ") for cell in cells):
            continue
        if names is None:
            names = [_name(cell) for cell in cells]
            twice = [name for name in (*NEEDED, *AXES) if names.count(name) > 1]
            if twice:
                raise UserError(where, f"has {twice[0]} in two columns")
            missing = [name for name in NEEDED if name not in names]
            if missing:
                raise UserError(
                    where,
                    f"has no column {', '.join(missing)}",
                    allowed=", ".join((*NEEDED, *AXES)),
                )
            continue
        if len(cells) != len(names):
            raise UserError(
                where, f"has {counted(len(cells), 'cell')} under {counted(len(names), 'column')}"
            )
        yield where, dict(zip(names, cells, strict=True))


def _name(title: str) -> str:
    """A column's name; `Micro-batch` is micro_batch."""
    name = title.lower().replace("-", "_").replace(" ", "_")
    return NAMES.get(name, name)


def _cells(line: str) -> list[str]:
    text = line.strip()
    if text.startswith("|"):
        return [cell.strip() for cell in text.strip("|").split("|")]
    return [cell.strip() for cell in next(csv.reader([text]), [])]


def _line(where: str, row: Mapping[str, str], layout: Layout) -> ScheduleLine:
    changes: dict[str, Any] = {name: row[name] for name in AXES if row.get(name)}
    try:
        nodes, batch = int(row["nodes"]), int(row["batch"])
        if nodes < 1 or batch < 1:
            raise ValueError
        axes = {k: v if k == "recompute" else int(v) for k, v in changes.items()}
        return ScheduleLine(nodes, batch, Layout.model_validate({**layout.model_dump(), **axes}))
    except ValidationError as error:
        raise refusal(where, error) from error
    except ValueError as error:
        raise UserError(where, "holds something else than numbers from 1 on") from error


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
    if plan.p_oom > MAX_P_OOM_TO_FIT:
        return "out of memory"
    return "slow" if slower is not None and slower > SLOW else "good"


def _reasons(plan: StagePlan) -> list[str]:
    """What the step loses most to."""
    num, pp = plan.micro_batches, plan.layout.pp
    reasons: list[str] = []
    if plan.p_oom > MAX_P_OOM_TO_FIT:
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
