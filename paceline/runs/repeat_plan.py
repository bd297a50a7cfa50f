"""Plans of repeats: one configuration several times, or two that alternate, stored as groups.

One run measures one start of a program. The machine's variation is only visible over several runs.
Two configurations can only be compared if both ran under the same conditions.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from paceline.compare.over_time.repeats import distinguishing, flat_settings, has_figure
from paceline.core.errors import UserError
from paceline.core.result import Result
from paceline.files.run_folder import RunRecord, current_status, groups, read_record, run_folders
from paceline.machines.placement import HostPlacement, Request
from paceline.machines.probe.inventory import inventory
from paceline.runs.outcome import evaluate
from paceline.runs.plan import Plan, make_plan, replan, requested_recipe
from paceline.runs.tasks.host_partitioning import partition_hosts, slots_for
from paceline.runs.tasks.slot import JobSlot

ENOUGH_FOR_SAME = 5
"""Number of repeats per side that show equal configurations to be the same in 9 of 10 cases."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_COMMA = re.compile(r",(?![^\[{]*[\]}])")
"""Comma between overrides, not inside a list: `lr=1e-3,betas=[0.9, 0.95]`."""


@dataclass(frozen=True)
class SeriesSide:
    """Configuration of a series, and the existing runs of its group."""

    group: str
    plan: Plan
    results: tuple[Result, ...] = ()
    missing: tuple[int, ...] = ()
    """Numbers of the repeats that are still missing."""
    changes: tuple[str, ...] = ()
    """Settings that differ from the other side's."""


@dataclass(frozen=True)
class ScheduledRepeat:
    """Repeat of one side of a series."""

    side: SeriesSide
    letter: str
    """A or B; empty if there is one side."""
    number: int
    num_repeats: int


@dataclass(frozen=True)
class Series:
    """One group of repeats, or two that alternate."""

    sides: tuple[SeriesSide, ...]
    num_repeats: int
    """Number of repeats per side."""
    tag: str | None = None
    """Tag of the runs of a resumed series."""
    slots: tuple[JobSlot, ...] = (JobSlot(1),)
    """Slots, each of which runs one repeat at a time; both runs of a pair use the same slot."""
    notices: tuple[str, ...] = ()
    sequential: bool = False
    """True if pairs are judged while the series runs, which may end it early."""

    def schedule(self, slot: int = 1) -> Iterator[ScheduledRepeat]:
        """Yield the missing repeats of a slot in order: A B, B A, A B, ...

        If the machine gets slower during the series, the side that always runs second would look
        slower. Reversing every other pair cancels a linear drift over an even number of pairs. Over
        an odd number n, it leaves 1/n of the bias of A B A B ... It also balances the effects
        that a run has on the next one (caches, heat).
        """
        pairs = list(zip(self.sides, "AB" if len(self.sides) > 1 else ("",), strict=False))
        for place, number in enumerate(range(slot, self.num_repeats + 1, len(self.slots))):
            for side, letter in reversed(pairs) if place % 2 else pairs:
                if number in side.missing:
                    yield ScheduledRepeat(side, letter, number, self.num_repeats)


def side_request(base: Request, text: str) -> Request:
    """Return the request of a side of `--interleave`: `base` with the changes in `text`.

    `text` is a comma-separated list of `key=value` overrides and at most one `recipe`,
    `recipe:variant` or `:variant`. An empty text is `base` itself.
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
                f"{item!r} has no variant after the colon",
                allowed="KEY=VALUE, RECIPE, RECIPE:VARIANT, :VARIANT",
            )
        request = replace(request, recipe=recipe or request.recipe, variant=variant or None)
    if not (request.recipe or request.command):
        raise UserError(
            f"--interleave {text!r}",
            "has no recipe",
            remedy="give a recipe on both sides, or before --interleave",
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
    """Return a series that measures each request `num_repeats` times, in one group each.

    An existing group of that name with the same configuration is resumed. Raises UserError when a
    request cannot run here or the name is in use. `nodes_per_trial` and `max_parallel` partition
    the hosts.
    """
    if name is not None:
        _check_name(root, name)
    first = requests[0]
    recipe = requested_recipe(first)
    partitioning = partition_hosts(first, recipe, inventory(), nodes_per_trial, max_parallel)
    plans = [
        make_plan(replace(request, where=partitioning.request.where), partitioning.inventory)
        for request in requests
    ]
    suffixes = [""] if len(plans) == 1 else ["-a", "-b"]
    existing = groups(root)
    names: list[str] = []
    for plan, suffix in zip(plans, suffixes, strict=True):
        names.append(name + suffix if name else _free_name(plan, suffix, existing))
    sides = [
        _side(n, plan, existing.get(n, []), num_repeats)
        for n, plan in zip(names, plans, strict=True)
    ]
    slots = partitioning.slots[:num_repeats]
    return Series(_with_changes(sides), num_repeats, slots=slots, notices=partitioning.notices)


def resumed_series(
    root: Path,
    name: str,
    num_repeats: int | None,
    where: HostPlacement | None = None,
    max_parallel: int | None = None,
) -> Series:
    """Return the series of the group `name` with its missing repeats up to `num_repeats`.

    The default is the original number. `where` may have other hosts or an allocation.
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
        _side(group, replan(spec), folders.get(group, []), num_repeats)
        for group, spec in specs.items()
        if spec
    ]
    slots = slots_for(spec, where or HostPlacement(), max_parallel)
    return Series(_with_changes(sides), num_repeats, records[-1].tag, slots)


def _side(group: str, plan: Plan, folders: Sequence[Path], num_repeats: int) -> SeriesSide:
    """Return a side with its group's runs; raise UserError if its configuration differs."""
    records = [read_record(folder) for folder in folders]
    for record in records:
        _check_member(group, plan, record)
    results = [evaluate(folder).result for folder in folders]
    numbers = {
        record.repeat.number
        for record, result in zip(records, results, strict=True)
        if record.repeat and has_figure(result)
    }
    free = [number for number in range(1, num_repeats + 1) if number not in numbers]
    num_missing = max(0, num_repeats - sum(map(has_figure, results)))
    return SeriesSide(group, plan, tuple(results), tuple(free[:num_missing]))


def _check_member(group: str, plan: Plan, record: RunRecord) -> None:
    if record.key != plan.spec.key:
        settings = [flat_settings(spec) for spec in (record.spec, plan.spec) if spec]
        theirs, ours = distinguishing(settings) if len(settings) == 2 else ({}, {})
        differing = ", ".join(
            f"{name} {theirs.get(name)} there, {ours.get(name)} here" for name in theirs | ours
        )
        raise UserError(
            f"group {group!r}",
            f"has another configuration: {differing}",
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
            "is not a valid group name",
            allowed="letters, digits, . _ and -, but not `last`",
        )
    for folder in run_folders(root):
        if folder.name == name:
            raise UserError(f"--group {name}", "is the name of a run")


def _free_name(plan: Plan, suffix: str, existing: Collection[str]) -> str:
    """Return `<recipe>-<variant>-<key>-r<number>` with the first unused number."""
    spec = plan.spec
    parts = [
        re.sub(r"[^A-Za-z0-9._]+", "-", part or "").strip("-.")
        for part in (spec.recipe, spec.variant, spec.key)
    ]
    base = "-".join(filter(None, parts))
    numbers = (f"{base}-r{number}" for number in count(1))
    return next(n for n in numbers if not {n, f"{n}-a", f"{n}-b"} & set(existing)) + suffix


def _with_changes(sides: Sequence[SeriesSide]) -> tuple[SeriesSide, ...]:
    """Return the sides with their differing settings."""
    if len(sides) == 1:
        return tuple(sides)
    differing = distinguishing([flat_settings(side.plan.spec) for side in sides])
    return tuple(
        replace(side, changes=tuple(f"{name}={value}" for name, value in settings.items()))
        for side, settings in zip(sides, differing, strict=True)
    )
