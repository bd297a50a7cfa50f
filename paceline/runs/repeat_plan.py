"""Repeats: one configuration several times over, or two in turn, as groups that can be compared.

One run says how fast one start of a program was. What the machine does is only seen over several,
and whether two configurations differ only when both meet the same conditions.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from paceline.compare.over_time.repeats import has_figure
from paceline.compare.over_time.settings import distinguishing, flat_settings
from paceline.core.errors import UserError
from paceline.core.result import Result
from paceline.files.run_folder import RunRecord, current_status, groups, read_record, run_folders
from paceline.machines.placement import Request, Where
from paceline.machines.probe.inventory import inventory
from paceline.runs.outcome import evaluate
from paceline.runs.plan import Plan, make_plan, plan_again, requested_recipe
from paceline.runs.tasks.division import divide, slots_for
from paceline.runs.tasks.slot import JobSlot

ENOUGH_FOR_SAME = 5
"""Repeats a side with which two equal configurations are found to be the same in 9 of 10 cases."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_COMMA = re.compile(r",(?![^\[{]*[\]}])")
"""Between overrides, not inside a list: `lr=1e-3,betas=[0.9, 0.95]`."""


@dataclass(frozen=True)
class SeriesSide:
    """One configuration of a series, and what its group has already."""

    group: str
    plan: Plan
    done: tuple[Result, ...] = ()
    missing: tuple[int, ...] = ()
    """Numbers of the repeats that are still to run."""
    changes: tuple[str, ...] = ()
    """Settings in which it differs from the other side."""


@dataclass(frozen=True)
class Turn:
    """One repeat of one side, in its place in the series."""

    side: SeriesSide
    letter: str
    """A or B; empty when there is one side."""
    number: int
    num_repeats: int


@dataclass(frozen=True)
class Series:
    """One group of repeats, or two that run in turn."""

    sides: tuple[SeriesSide, ...]
    num_repeats: int
    """Repeats a side."""
    tag: str | None = None
    """What the runs of a series that is gone on with are tagged."""
    slots: tuple[JobSlot, ...] = (JobSlot(1),)
    """Where repeats run, one at a time on each; both of a pair on the same."""
    notices: tuple[str, ...] = ()
    sequential: bool = False
    """Whether pairs are looked at while they are made, so that no further one may be needed."""

    def turns(self, slot: int = 1) -> Iterator[Turn]:
        """The repeats of a slot that are missing, in order: A B, B A, A B, ...

        A machine that warms up or fills up during the series would make whoever always comes
        second look slower. Turning every other pair round cancels a linear change over an even
        number of pairs, and leaves 1/n of what A B A B ... would over an odd number n. Neither side
        always follows the other, so that what a run leaves behind (caches, heat) is shared too.
        """
        pairs = list(zip(self.sides, "AB" if len(self.sides) > 1 else ("",), strict=False))
        for place, number in enumerate(range(slot, self.num_repeats + 1, len(self.slots))):
            for side, letter in reversed(pairs) if place % 2 else pairs:
                if number in side.missing:
                    yield Turn(side, letter, number, self.num_repeats)


def side_request(base: Request, text: str) -> Request:
    """The request that a side of `--interleave` stands for: `base` with the changes in `text`.

    `text` is a list separated by commas: `key=value` overrides, and at most one
    `recipe`, `recipe:variant` or `:variant`; empty it is `base` itself.
    """
    request = base
    for item in filter(None, map(str.strip, _COMMA.split(text))):
        if "=" in item:
            request = replace(request, overrides=(*request.overrides, item))
            continue
        recipe, colon, variant = item.rpartition(":") if ":" in item else (item, "", "")
        if colon and not variant:
            raise UserError(
                f"--interleave {text!r}",
                f"{item!r} names no variant",
                allowed="KEY=VALUE, RECIPE, RECIPE:VARIANT, :VARIANT",
            )
        request = replace(request, recipe=recipe or request.recipe, variant=variant or None)
    if not (request.recipe or request.command):
        raise UserError(
            f"--interleave {text!r}",
            "names no recipe",
            remedy="name one on both sides, or before --interleave",
        )
    return request


def new_series(
    root: Path,
    requests: Sequence[Request],
    num_repeats: int,
    name: str | None,
    nodes_per_trial: int | None = None,
    max_parallel: int | None = None,
) -> Series:
    """The series that measures each request `num_repeats` times, in one group each.

    A group of that name which has the same configuration is gone on with. Raises UserError when a
    request cannot run here or the name is taken. The last two share out what there is.
    """
    if name is not None:
        _check_name(root, name)
    first = requests[0]
    recipe = requested_recipe(first)
    division = divide(first, recipe, inventory(), nodes_per_trial, max_parallel)
    plans = [
        make_plan(replace(request, where=division.request.where), division.inventory)
        for request in requests
    ]
    ends = [""] if len(plans) == 1 else ["-a", "-b"]
    taken = groups(root)
    names: list[str] = []
    for plan, end in zip(plans, ends, strict=True):
        names.append(name + end if name else _free_name(plan, end, taken))
    sides = [
        _side(n, plan, taken.get(n, []), num_repeats) for n, plan in zip(names, plans, strict=True)
    ]
    slots = division.slots[:num_repeats]
    return Series(_with_changes(sides), num_repeats, slots=slots, notices=division.notices)


def resumed_series(
    root: Path,
    name: str,
    num_repeats: int | None,
    where: Where | None = None,
    max_parallel: int | None = None,
) -> Series:
    """The series that the group `name` belongs to, with what is missing up to `num_repeats`.

    None is the number that was asked for at first. `where` may name other hosts or an allocation.
    Raises UserError when there is no such group.
    """
    folders = groups(root)
    if name not in folders:
        raise UserError(
            f"group {name!r}",
            f"is not in {root}",
            allowed=", ".join(list(folders)[-5:]) or None,
            remedy="`paceline run RECIPE --repeat 5` makes one",
        )
    records = [read_record(folder) for folder in folders[name]]
    repeats = [record.repeat for record in records if record.repeat]
    spec = records[-1].spec
    if not repeats or spec is None:
        raise UserError(f"group {name!r}", "was not made by `paceline run --repeat`")
    num_repeats = num_repeats or max(repeat.num_repeats for repeat in repeats)
    specs = {group: spec if group == name else repeats[-1].partner for group in repeats[-1].groups}
    sides = [
        _side(group, plan_again(spec), folders.get(group, []), num_repeats)
        for group, spec in specs.items()
        if spec
    ]
    slots = slots_for(spec, where or Where(), max_parallel)
    return Series(_with_changes(sides), num_repeats, records[-1].tag, slots)


def _side(group: str, plan: Plan, folders: Sequence[Path], num_repeats: int) -> SeriesSide:
    """A side with what its group has; raises UserError when the group measures something else."""
    records = [read_record(folder) for folder in folders]
    for record in records:
        _check_member(group, plan, record)
    done = [evaluate(folder).result for folder in folders]
    numbers = {
        record.repeat.number
        for record, result in zip(records, done, strict=True)
        if record.repeat and has_figure(result)
    }
    free = [number for number in range(1, num_repeats + 1) if number not in numbers]
    num_missing = max(0, num_repeats - sum(map(has_figure, done)))
    return SeriesSide(group, plan, tuple(done), tuple(free[:num_missing]))


def _check_member(group: str, plan: Plan, record: RunRecord) -> None:
    if record.key != plan.spec.key:
        settings = [flat_settings(spec) for spec in (record.spec, plan.spec) if spec]
        theirs, ours = distinguishing(settings) if len(settings) == 2 else ({}, {})
        differing = ", ".join(
            f"{name} {theirs.get(name)} there, {ours.get(name)} here" for name in theirs | ours
        )
        raise UserError(
            f"group {group!r}",
            f"measures another configuration: {differing}",
            remedy="give the group another name with --group",
        )
    if current_status(record) in ("queued", "running") and record.controller:
        process = f"process {record.controller.pid} on {record.controller.host}"
        raise UserError(
            f"group {group!r}",
            f"is being measured by {process}",
            remedy="wait until it has ended",
        )


def _check_name(root: Path, name: str) -> None:
    if not _NAME.fullmatch(name) or name == "last":
        raise UserError(
            f"--group {name}",
            "cannot name a group",
            allowed="letters, digits, . _ and -, but not `last`",
        )
    for folder in run_folders(root):
        if folder.name == name:
            raise UserError(f"--group {name}", "is the name of a run")


def _free_name(plan: Plan, end: str, taken: Collection[str]) -> str:
    """`<recipe>-<variant>-<key>-r<number>`, the first number that no group has."""
    spec = plan.spec
    parts = [
        re.sub(r"[^A-Za-z0-9._]+", "-", part or "").strip("-.")
        for part in (spec.recipe, spec.variant, spec.key)
    ]
    base = "-".join(filter(None, parts))
    numbers = (f"{base}-r{number}" for number in count(1))
    return next(n for n in numbers if not {n, f"{n}-a", f"{n}-b"} & set(taken)) + end


def _with_changes(sides: Sequence[SeriesSide]) -> tuple[SeriesSide, ...]:
    """The sides with the settings in which they differ."""
    if len(sides) == 1:
        return tuple(sides)
    differing = distinguishing([flat_settings(side.plan.spec) for side in sides])
    return tuple(
        replace(side, changes=tuple(f"{name}={value}" for name, value in settings.items()))
        for side, settings in zip(sides, differing, strict=True)
    )
