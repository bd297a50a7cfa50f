"""Runs what is missing of a series of repeats, and says what the groups tell."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Lock
from typing import Protocol

from paceline.compare.comparability import likeness
from paceline.compare.judgement import Comparison
from paceline.compare.over_time.repeats import GroupResult, SeriesResult, group_figures, has_figure
from paceline.core.errors import SystemFaultError
from paceline.core.facts import Facts, facts_of
from paceline.core.hosts import compress
from paceline.core.result import Result
from paceline.files.run_folder import Repeat, groups, read_record
from paceline.runs import flow
from paceline.runs.comparison import Gate, compare_runs
from paceline.runs.places.losses import Losses, is_lost, why_ended
from paceline.runs.places.part import Part, plan_on
from paceline.runs.places.work import allocation_fault
from paceline.runs.plan import as_of_now
from paceline.runs.repeats import Series, Side, Turn


class Observer(Protocol):
    """Who is told how a series goes on, from a thread a part."""

    def running(self, turn: Turn) -> AbstractContextManager[flow.Watcher]:
        """A watcher for one repeat, while it runs."""
        ...

    def ended(self, turn: Turn, outcome: Result | SystemFaultError) -> None:
        """One repeat has ended, as a result or as a fault of the machine."""
        ...

    def lost(self, part: Part, why: str, for_good: bool) -> None:
        """A host of this part is lost: nothing more runs on it, or the same repeat once more."""
        ...


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
    """Run what is missing, one after the other on each part, and return all groups as they are then.

    A repeat that fails is counted and the series goes on; a UserError ends it. KeyboardInterrupt
    ends the running repeats cleanly and then the series, which is returned as far as it came; so do
    the end of an allocation and the loss of all parts. What is left of a part that lost a host runs on
    the others. `runs_dir` is named in the commands that the result holds.
    """
    doing = _Doing(series, root, command, observer, tag or series.tag, probe)
    interrupted = doing.run()
    told = tuple(doing.outcomes[side.group].told(series.wanted) for side in series.sides)
    place = f" --runs-dir {shlex.quote(str(runs_dir))}" if runs_dir else ""
    compare = _comparison(root, told, series.sides)
    going_on = (
        f"paceline run --resume {told[0].group}{_parts_text(series, doing.losses.whole)}{place}"
    )
    return SeriesResult(
        groups=told,
        interrupted=interrupted,
        compare=f"{compare}{place}" if compare else None,
        verdict=_verdict(root, told, series.sides),
        resume=going_on if any(group.missing for group in told) else None,
    )


@dataclass
class _Doing:
    """A series that goes on."""

    series: Series
    root: Path
    command: list[str]
    observer: Observer
    tag: str | None
    probe: bool
    outcomes: dict[str, _Outcome] = field(init=False)
    losses: Losses = field(init=False)
    _lanes: dict[int, list[Turn]] = field(init=False)
    """What is left for each part, by its number."""
    _stop: Event = field(default_factory=Event)
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        parts = self.series.parts
        self.outcomes = {side.group: _Outcome(side, list(side.done)) for side in self.series.sides}
        self.losses = Losses(parts)
        self._lanes = {part.number: [*self.series.turns(part.number)] for part in parts}

    def run(self) -> bool:
        """Run what is missing; whether the user has broken it off."""
        try:
            return self.losses.share(self._shared_out, self._stop, self._work)
        except KeyboardInterrupt:
            return True

    def _shared_out(self, whole: Sequence[Part]) -> bool:
        """Give what lost parts have left to the others, a pair to one of them; whether there is anything."""
        keep = {part.number for part in whole}
        left = [t for number, lane in self._lanes.items() if number not in keep for t in lane]
        self._lanes = {number: self._lanes[number] for number in keep}
        for place, number in enumerate(dict.fromkeys(turn.number for turn in left)):
            lane = self._lanes[whole[place % len(whole)].number]
            lane += [turn for turn in left if turn.number == number]
        return any(self._lanes.values())

    def _work(self, part: Part) -> None:
        """One repeat after the other, until nothing is left for the part or a host of it is lost."""
        lane = self._lanes[part.number]
        while lane and not self._stop.is_set() and part not in self.losses.lost:
            turn = lane.pop(0)
            try:
                ended = self._run_once(turn, part)
            except flow.CancelledRunError as cancelled:
                self.outcomes[turn.side.group].results.append(cancelled.report.result)
                if self._stop.is_set():
                    return
                raise KeyboardInterrupt from None
            with self._lock:
                self.outcomes[turn.side.group].add(ended)
                self.observer.ended(turn, ended)
            if not (isinstance(ended, Result) and has_figure(ended)):
                self._look_at_hosts(turn, part, ended)

    def _look_at_hosts(self, turn: Turn, part: Part, ended: Result | SystemFaultError) -> None:
        """Whether the allocation or a host of the part is lost; what that broke off is tried once more."""
        cluster = turn.side.plan.spec.cluster
        if allocation_fault(cluster):
            self._stop.set()
        elif is_lost(part, cluster, ended, self.root):
            if self.losses.note(part, (turn.letter, turn.number), why_ended(ended)):
                self._lanes[part.number].insert(0, turn)
            on = replace(part, hosts=part.hosts or cluster.hosts)
            self.observer.lost(on, why_ended(ended), part in self.losses.lost)

    def _run_once(self, turn: Turn, part: Part) -> Result | SystemFaultError:
        sides, alone = self.series.sides, len(self.series.parts) == 1
        repeat = Repeat(
            number=turn.number,
            wanted=turn.wanted,
            groups=tuple(side.group for side in sides),
            partner=next((s.plan.spec for s in sides if s is not turn.side), None),
        )
        try:
            with self.observer.running(turn) as watch:
                report = flow.run(
                    plan_on(as_of_now(turn.side.plan, not alone), part), self.root, self.command,
                    watch, tag=self.tag, probe=self.probe and alone, group=turn.side.group,
                    repeat=repeat, stopped=self._stop.is_set,
                )  # fmt: skip
        except flow.UnwrittenReportError as fault:
            result = fault.report.result
            return result.model_copy(update={"warnings": (*result.warnings, str(fault))})
        except SystemFaultError as fault:
            return fault
        return report.result


def _parts_text(series: Series, whole: Sequence[Part]) -> str:
    """The options that go on with the series on the parts that are whole, else on all."""
    if len(series.parts) == 1:
        return ""
    parts, cluster = whole or series.parts, series.sides[0].plan.spec.cluster
    hosts = [host for part in parts for host in part.hosts]
    named = hosts and not (cluster.launcher == "slurm" and cluster.slurm.allocation)
    return f" --max-parallel {len(parts)}" + (f" --hosts {compress(hosts)}" if named else "")


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
