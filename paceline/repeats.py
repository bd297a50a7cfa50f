"""Repeats: one configuration several times over, or two in turn, as groups that can be compared.

One run says how fast one start of a program was. What the machine does is only seen over several,
and whether two configurations differ only when both meet the same conditions.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Protocol

from paceline import flow
from paceline.core.compare.comparability import likeness
from paceline.core.compare.judgement import Comparison
from paceline.core.facts import Facts, facts_of
from paceline.core.over_time.grouped import GroupResult, SeriesResult, group_figures, has_figure
from paceline.core.over_time.settings import distinguishing, flat_settings
from paceline.core.result import Result
from paceline.errors import SystemFaultError, UserError
from paceline.gate import Gate, compare_runs
from paceline.outcome import evaluate
from paceline.placement import Request
from paceline.plan import Plan, busy_notice, make_plan, plan_again
from paceline.probe.inventory import inventory
from paceline.rundir import (
    Repeat,
    RunRecord,
    current_status,
    groups,
    read_record,
    run_folders,
)

ENOUGH_FOR_SAME = 5
"""Repeats a side with which two equal configurations are found to be the same in 9 of 10 cases."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_COMMA = re.compile(r",(?![^\[{]*[\]}])")
"""Between overrides, not inside a list: `lr=1e-3,betas=[0.9, 0.95]`."""


@dataclass(frozen=True)
class Side:
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

    side: Side
    letter: str
    """A or B; empty when there is one side."""
    number: int
    wanted: int


@dataclass(frozen=True)
class Series:
    """One group of repeats, or two that run in turn."""

    sides: tuple[Side, ...]
    wanted: int
    """Repeats a side."""
    tag: str | None = None
    """What the runs of a series that is gone on with are tagged."""

    def turns(self) -> Iterator[Turn]:
        """The repeats that are missing, in order: A B, B A, A B, ...

        A machine that warms up or fills up during the series would make whoever always comes
        second look slower. Turning every other pair round cancels a linear change over an even
        number of pairs, and leaves 1/n of what A B A B ... would over an odd number n. Neither side
        always follows the other, so that what a run leaves behind (caches, heat) is shared too.
        """
        pairs = list(zip(self.sides, "AB" if len(self.sides) > 1 else ("",), strict=False))
        for number in range(1, self.wanted + 1):
            for side, letter in pairs if number % 2 else reversed(pairs):
                if number in side.missing:
                    yield Turn(side, letter, number, self.wanted)


class Observer(Protocol):
    """Who is told how a series goes on."""

    def running(self, turn: Turn) -> AbstractContextManager[flow.Watcher]:
        """A watcher for one repeat, while it runs."""
        ...

    def ended(self, turn: Turn, outcome: Result | SystemFaultError) -> None:
        """One repeat has ended, as a result or as a fault of the machine."""
        ...


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
            raise UserError(f"--interleave {text!r}", f"{item!r} names no variant",
                            allowed="KEY=VALUE, RECIPE, RECIPE:VARIANT, :VARIANT")  # fmt: skip
        request = replace(request, recipe=recipe or request.recipe, variant=variant or None)
    if not request.recipe:
        raise UserError(f"--interleave {text!r}", "names no recipe",
                        remedy="name one on both sides, or before --interleave")  # fmt: skip
    return request


def new_series(root: Path, requests: Sequence[Request], wanted: int, name: str | None) -> Series:
    """The series that measures each request `wanted` times, in one group each.

    A group of that name which has the same configuration is gone on with. Raises UserError when a
    request cannot run here or the name is taken.
    """
    if name is not None:
        _check_name(root, name)
    plans = [make_plan(request) for request in requests]
    ends = [""] if len(plans) == 1 else ["-a", "-b"]
    taken = groups(root)
    names: list[str] = []
    for plan, end in zip(plans, ends, strict=True):
        names.append(name + end if name else _free_name(plan, end, taken))
    sides = [_side(n, plan, taken.get(n, []), wanted) for n, plan in zip(names, plans, strict=True)]
    return Series(_told_apart(sides), wanted)


def resumed_series(root: Path, name: str, wanted: int | None) -> Series:
    """The series that the group `name` belongs to, with what is missing up to `wanted`.

    None is the number that was asked for at first. Raises UserError when there is no such group.
    """
    found = groups(root)
    if name not in found:
        raise UserError(f"group {name!r}", f"is not in {root}",
                        allowed=", ".join(list(found)[-5:]) or None,
                        remedy="`paceline run RECIPE --repeat 5` makes one")  # fmt: skip
    records = [read_record(folder) for folder in found[name]]
    repeats = [record.repeat for record in records if record.repeat]
    spec = records[-1].spec
    if not repeats or spec is None:
        raise UserError(f"group {name!r}", "was not made by `paceline run --repeat`")
    wanted = wanted or max(repeat.wanted for repeat in repeats)
    specs = {group: spec if group == name else repeats[-1].partner for group in repeats[-1].groups}
    sides = [
        _side(group, plan_again(spec), found.get(group, []), wanted)
        for group, spec in specs.items()
        if spec
    ]
    return Series(_told_apart(sides), wanted, records[-1].tag)


@dataclass
class _Outcome:
    """What one side has so far."""

    side: Side
    results: list[Result]
    faults: list[str] = field(default_factory=list[str])

    def add(self, ended: Result | SystemFaultError) -> None:
        if isinstance(ended, Result):
            self.results.append(ended)
        else:
            self.faults.append(str(ended))

    def told(self, wanted: int) -> GroupResult:
        spec = self.side.plan.spec
        ok = sum(map(has_figure, self.results))
        return GroupResult(
            group=self.side.group,
            recipe=spec.recipe,
            changes=self.side.changes,
            key=spec.key,
            wanted=wanted,
            ok=ok,
            failed=len(self.results) - ok + len(self.faults),
            figures=group_figures(self.results),
            runs=tuple(self.results),
            faults=tuple(self.faults),
        )


def run_series(
    series: Series,
    root: Path,
    command: list[str],
    observer: Observer,
    *,
    tag: str | None = None,
    probe: bool = True,
    runs_dir: Path | None = None,
) -> SeriesResult:
    """Run what is missing, one after the other, and return all groups with what they have.

    A repeat that fails is counted and the series goes on; a UserError ends it. KeyboardInterrupt
    ends the running repeat cleanly and then the series, which is returned as far as it came.
    `runs_dir` is named in the commands that the result holds.
    """
    outcomes = {side.group: _Outcome(side, list(side.done)) for side in series.sides}
    interrupted = False
    try:
        for turn in series.turns():
            outcome = outcomes[turn.side.group]
            try:
                ended = _run_once(series, turn, root, command, observer, tag or series.tag, probe)
            except flow.CancelledRunError as cancelled:
                outcome.results.append(cancelled.report.result)
                raise KeyboardInterrupt from None
            outcome.add(ended)
            observer.ended(turn, ended)
    except KeyboardInterrupt:
        interrupted = True
    told = tuple(outcomes[side.group].told(series.wanted) for side in series.sides)
    place = f" --runs-dir {shlex.quote(str(runs_dir))}" if runs_dir else ""
    compare = _comparison(root, told, series.sides)
    going_on = f"paceline run --resume {told[0].group}{place}"
    return SeriesResult(
        groups=told,
        interrupted=interrupted,
        compare=f"{compare}{place}" if compare else None,
        verdict=_verdict(root, told, series.sides),
        resume=going_on if any(group.missing for group in told) else None,
    )


def _run_once(
    series: Series,
    turn: Turn,
    root: Path,
    command: list[str],
    observer: Observer,
    tag: str | None,
    probe: bool,
) -> Result | SystemFaultError:
    repeat = Repeat(
        number=turn.number,
        wanted=turn.wanted,
        groups=tuple(side.group for side in series.sides),
        partner=next((s.plan.spec for s in series.sides if s is not turn.side), None),
    )
    try:
        with observer.running(turn) as watch:
            report = flow.run(
                _as_of_now(turn.side.plan), root, command, watch,
                tag=tag, probe=probe, group=turn.side.group, repeat=repeat,
            )  # fmt: skip
    except flow.UnwrittenReportError as fault:
        result = fault.report.result
        return result.model_copy(update={"warnings": (*result.warnings, str(fault))})
    except SystemFaultError as fault:
        return fault
    return report.result


def _as_of_now(plan: Plan) -> Plan:
    """The plan with what the machine is and does at this moment."""
    found = inventory()
    lasting = [n for n in plan.notices if n not in busy_notice(plan.inventory)]
    return replace(plan, inventory=found, notices=(*lasting, *busy_notice(found)))


def _side(group: str, plan: Plan, folders: Sequence[Path], wanted: int) -> Side:
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
    free = [number for number in range(1, wanted + 1) if number not in numbers]
    num_missing = max(0, wanted - sum(map(has_figure, done)))
    return Side(group, plan, tuple(done), tuple(free[:num_missing]))


def _check_member(group: str, plan: Plan, record: RunRecord) -> None:
    if record.key != plan.spec.key:
        settings = [flat_settings(spec) for spec in (record.spec, plan.spec) if spec]
        theirs, ours = distinguishing(settings) if len(settings) == 2 else ({}, {})
        differing = ", ".join(f"{name} {theirs.get(name)} there, {ours.get(name)} here"
                              for name in theirs | ours)  # fmt: skip
        raise UserError(f"group {group!r}", f"measures another configuration: {differing}",
                        remedy="give the group another name with --group")  # fmt: skip
    if current_status(record) in ("queued", "running") and record.controller:
        raise UserError(f"group {group!r}", f"is being measured by process {record.controller.pid} "
                        f"on {record.controller.host}", remedy="wait until it has ended")  # fmt: skip


def _check_name(root: Path, name: str) -> None:
    if not _NAME.fullmatch(name) or name == "last":
        raise UserError(f"--group {name}", "cannot name a group",
                        allowed="letters, digits, . _ and -, but not `last`")  # fmt: skip
    for folder in run_folders(root):
        if folder.name == name:
            raise UserError(f"--group {name}", "is the name of a run")


def _free_name(plan: Plan, end: str, taken: Collection[str]) -> str:
    """`<recipe>-<variant>-<key>-r<number>`, the first number that no group has."""
    spec = plan.spec
    named = [re.sub(r"[^A-Za-z0-9._]+", "-", part or "").strip("-.") for part in
             (spec.recipe, spec.variant, spec.key)]  # fmt: skip
    base = "-".join(filter(None, named))
    numbers = (f"{base}-r{number}" for number in count(1))
    return next(n for n in numbers if not {n, f"{n}-a", f"{n}-b"} & set(taken)) + end


def _told_apart(sides: Sequence[Side]) -> tuple[Side, ...]:
    """The sides with the settings in which they differ."""
    if len(sides) == 1:
        return tuple(sides)
    differing = distinguishing([flat_settings(side.plan.spec) for side in sides])
    return tuple(
        replace(side, changes=tuple(f"{name}={value}" for name, value in own.items()))
        for side, own in zip(sides, differing, strict=True)
    )


def _comparison(root: Path, told: Sequence[GroupResult], sides: Sequence[Side]) -> str | None:
    """`paceline compare` of the two groups, or of this one with the last good one of the same recipe.

    Settings in which they differ are accepted by name.
    """
    ours = facts_of(sides[-1].plan.spec)
    if len(sides) == 2:
        return _compare(told[0].group, facts_of(sides[0].plan.spec), told[1].group, ours)
    for name, folders in reversed(groups(root).items()):
        good = [r.known for folder in folders if (r := read_record(folder)).status == "ok"]
        if name != told[0].group and good and good[-1].recipe == told[0].recipe:
            return _compare(name, good[-1], told[0].group, ours)
    return None


def _compare(first: str, theirs: Facts, second: str, ours: Facts) -> str:
    allowed = "".join(f" --allow {key}" for key in likeness([theirs], [ours]).keys)
    return f"paceline compare {first} {second}{allowed}"


def _verdict(root: Path, told: Sequence[GroupResult], sides: Sequence[Side]) -> Comparison | None:
    """What the comparison of two complete groups says."""
    if len(told) != 2 or any(group.missing for group in told):
        return None
    first, second = (facts_of(side.plan.spec) for side in sides)
    gate = Gate(allowed=tuple(likeness([first], [second]).keys))
    return compare_runs(root, told[0].group, told[1].group, gate)
