"""`paceline run --repeat` and `--interleave`: run groups of repeats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from paceline.cli.host_options import MaxParallel, NodesPerTrial
from paceline.cli.options import Panel, ReportFormat
from paceline.cli.output import emit
from paceline.cli.printing import ExecutionOptions, plan_content, print_notices, print_plan
from paceline.cli.progress import progress_display, run_headline
from paceline.cli.terminal import echo
from paceline.compare.over_time.repeats import SeriesResult
from paceline.core.errors import UserError
from paceline.core.result import Result
from paceline.core.units import pluralize
from paceline.files.run_folder import runs_root
from paceline.machines.placement import HostPlacement, Request
from paceline.runs.flow import Watcher, command_line
from paceline.runs.plan import Plan
from paceline.runs.repeat_plan import (
    ENOUGH_FOR_SAME,
    ScheduledRepeat,
    Series,
    new_series,
    resumed_series,
    side_request,
)
from paceline.runs.repeat_runner import run_series
from paceline.runs.repeats_report import changes_text, run_text, series_document
from paceline.runs.tasks.slot import JobSlot, TaskOutcome, lost_text

UNFINISHED_STATUSES = frozenset({"incomplete", "cancelled"})
"""Statuses of runs that ended before they had a figure."""


@dataclass(frozen=True)
class RepeatOptions:
    """Options for groups of runs."""

    panel: ClassVar[Panel] = Panel.limits
    repeat: Annotated[
        str | None,
        typer.Option(
            metavar="N|same",
            help="Number of repeats, stored as one group for `paceline compare`. `same` "
            "means 5, the minimum for the verdict `same`.",
        ),
    ] = None
    interleave: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B",
            help="Run two configurations alternately (A B, B A, ...), each --repeat times "
            "(default 5). A and B are comma-separated changes to RECIPE: KEY=VALUE, "
            ':VARIANT or another RECIPE; "" is RECIPE unchanged.',
            rich_help_panel=Panel.search,
        ),
    ] = None
    group: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Group name. If the group exists, only its missing repeats of --repeat (default"
            " 5) are run.",
        ),
    ] = None
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="GROUP",
            help="Resume an interrupted group, or extend it with --repeat. Takes no RECIPE.",
        ),
    ] = None
    nodes_per_trial: NodesPerTrial = None
    max_parallel: MaxParallel = None

    @property
    def are_requested(self) -> bool:
        """True if a group of runs is requested."""
        return any(x is not None for x in (self.repeat, self.interleave, self.group, self.resume))


def repeat_runs(
    request: Request, options: RepeatOptions, how: ExecutionOptions, dry_run: bool
) -> int:
    """Run groups of repeats, print them, and return the exit code."""
    root = runs_root(how.runs_dir)
    series = _series(request, options, how)
    announce(series)
    if dry_run:
        _print_plans(series, how.output_format)
        return 0
    result = run_series(
        series,
        root,
        command_line(),
        RepeatDisplay(len(series.slots)),
        tag=how.tag,
        probe=how.probe,
        runs_dir=how.runs_dir,
    )
    emit(series_document(result), how.output_format)
    return exit_code(result)


def exit_code(result: SeriesResult) -> int:
    """Return 0 if every group is complete, 4 if figures are missing, 2 if all runs failed."""
    if not any(group.missing for group in result.groups) and not result.interrupted:
        return 0
    if result.interrupted or any(group.ok for group in result.groups):
        return 4
    statuses = {run.status for group in result.groups for run in group.runs}
    faults = any(group.faults for group in result.groups)
    return 4 if statuses <= UNFINISHED_STATUSES and not faults else 2


def _series(request: Request, options: RepeatOptions, how: ExecutionOptions) -> Series:
    root, repeats = runs_root(how.runs_dir), _parse_repeats(options.repeat)
    if options.resume is not None:
        where = HostPlacement(hosts=request.where.hosts, allocation=request.where.allocation)
        foreign = options.interleave or options.group or options.nodes_per_trial or how.tag
        if request != Request("", where=where) or foreign:
            raise UserError(
                f"--resume {options.resume}",
                "takes its settings from the group",
                allowed="--repeat, --hosts, --allocation, --max-parallel, --no-probe, "
                "--runs-dir, --format, --dry-run",
                remedy="leave out the rest",
            )
        return resumed_series(root, options.resume, repeats, where, options.max_parallel)
    requests = [request]
    if options.interleave:
        requests = [side_request(request, text) for text in options.interleave]
    if not (request.recipe or request.command or options.interleave):
        raise UserError("RECIPE", "is missing", remedy="`paceline run --help` shows what it takes")
    return new_series(
        root,
        requests,
        repeats or ENOUGH_FOR_SAME,
        options.group,
        options.nodes_per_trial,
        options.max_parallel,
    )


def _parse_repeats(repeat: str | None) -> int | None:
    if repeat is None:
        return None
    if repeat == "same":
        return ENOUGH_FOR_SAME
    if not repeat.isdecimal() or not 1 <= int(repeat[:9]) <= MAX_REPEATS:
        raise UserError(
            f"--repeat {repeat}",
            "is not a number of repeats",
            allowed=f"1 to {MAX_REPEATS}, or `same` for {ENOUGH_FOR_SAME}",
        )
    return int(repeat)


MAX_REPEATS = 1000


def announce(series: Series) -> None:
    """Print to standard error what will run."""
    for number, side in enumerate(series.sides):
        letter = f"{'AB'[number]}  " if len(series.sides) > 1 else ""
        differences = f" · {changes_text(side.changes)}" if side.changes else ""
        echo(f"{letter}{run_headline(side.plan.spec)}{differences}", err=True)
        have = series.num_repeats - len(side.missing)
        already = f", of which {have} exist" if have else ""
        repeats = pluralize(series.num_repeats, "repeat")
        echo(f"{letter}group {side.group}: {repeats}{already}", err=True)
    for notice in series.notices:
        echo(f"note: {notice}", err=True)
    print_notices(*(side.plan for side in series.sides))
    if len({side.plan.spec.key for side in series.sides}) < len(series.sides):
        echo("note: A and B are the same configuration; this tests the method itself", err=True)


class RepeatDisplay:
    """Progress of repeats; concurrent ones print only a line at start and end."""

    def __init__(self, at_once: int = 1) -> None:
        self.at_once = at_once

    @contextmanager
    def running(self, task: ScheduledRepeat, plan: Plan) -> Iterator[Watcher]:
        if self.at_once > 1:
            echo(f"{_title(task)} starts", err=True)
            yield lambda progress: None
            return
        with progress_display(plan.spec, _title(task)) as watch:
            yield watch

    def task_ended(self, task: ScheduledRepeat, outcome: TaskOutcome) -> None:
        text = run_text(outcome) if isinstance(outcome, Result) else f"no run: {outcome}"
        echo(f"{_title(task)}: {text}" if self.at_once > 1 else f"  {text}", err=True)

    def slot_lost(self, slot: JobSlot, why: str, for_good: bool) -> None:
        echo(lost_text(slot, why, for_good), err=True)


def _title(turn: ScheduledRepeat) -> str:
    return f"{turn.letter}  ".lstrip() + f"repeat {turn.number} of {turn.num_repeats}"


def _print_plans(series: Series, form: ReportFormat) -> None:
    """Print the order of the repeats, and the plan of each configuration."""
    lanes = [
        [f"{t.letter}{t.number}" for t in series.schedule(slot.number)] for slot in series.slots
    ]
    turns = [turn for lane in lanes for turn in lane]
    if form is ReportFormat.json:
        content = {"order": turns, "groups": {s.group: plan_content(s.plan) for s in series.sides}}
        echo(json.dumps(content, indent=2))
        return
    for slot, lane in zip(series.slots, lanes, strict=True):
        on = f"on {slot.name}, " if len(lanes) > 1 else ""
        echo(f"{on}in this order: {' '.join(lane) or 'no repeat is missing'}", err=True)
    for side in series.sides:
        print_plan(side.plan, form)
