"""Runs what is missing of a series of repeats, and says what the groups tell."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock
from typing import Protocol

from paceline import flow
from paceline.core.compare.comparability import likeness
from paceline.core.compare.judgement import Comparison
from paceline.core.facts import Facts, facts_of
from paceline.core.hosts import compress
from paceline.core.over_time.grouped import GroupResult, SeriesResult, group_figures, has_figure
from paceline.core.result import Result
from paceline.errors import SystemFaultError
from paceline.gate import Gate, compare_runs
from paceline.parts.part import Part, plan_on
from paceline.parts.working import allocation_fault, is_lost, side_by_side
from paceline.plan import as_of_now
from paceline.repeats import Series, Side, Turn
from paceline.rundir import Repeat, groups, read_record


class Observer(Protocol):
    """Who is told how a series goes on, from a thread a part."""

    def running(self, turn: Turn) -> AbstractContextManager[flow.Watcher]:
        """A watcher for one repeat, while it runs."""
        ...

    def ended(self, turn: Turn, outcome: Result | SystemFaultError) -> None:
        """One repeat has ended, as a result or as a fault of the machine."""
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
    ends the running repeats cleanly and then the series, which is returned as far as it came; the
    end of an allocation and a lost host end it likewise (the host, on its part).
    `runs_dir` is named in the commands that the result holds.
    """
    outcomes = {side.group: _Outcome(side, list(side.done)) for side in series.sides}
    stop, lock = Event(), Lock()

    def work(part: Part) -> None:
        for turn in series.turns(part.number):
            if stop.is_set():
                return
            outcome = outcomes[turn.side.group]
            how = (tag or series.tag, probe and len(series.parts) == 1)
            try:
                ended = _run_once(series, turn, part, root, command, observer, *how, stop)
            except flow.CancelledRunError as cancelled:
                outcome.results.append(cancelled.report.result)
                if stop.is_set():
                    return
                raise KeyboardInterrupt from None
            with lock:
                outcome.add(ended)
                observer.ended(turn, ended)
            if not (isinstance(ended, Result) and has_figure(ended)):
                if allocation_fault(turn.side.plan.spec.cluster):
                    stop.set()
                if is_lost(part, ended, root):
                    return

    interrupted = False
    try:
        if len(series.parts) == 1:
            work(series.parts[0])
        else:
            interrupted = side_by_side(series.parts, stop, work)
    except KeyboardInterrupt:
        interrupted = True
    told = tuple(outcomes[side.group].told(series.wanted) for side in series.sides)
    place = f" --runs-dir {shlex.quote(str(runs_dir))}" if runs_dir else ""
    compare = _comparison(root, told, series.sides)
    going_on = f"paceline run --resume {told[0].group}{_parts_text(series)}{place}"
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
    part: Part,
    root: Path,
    command: list[str],
    observer: Observer,
    tag: str | None,
    probe: bool,
    stop: Event,
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
                plan_on(as_of_now(turn.side.plan, len(series.parts) > 1), part), root, command, watch,
                tag=tag, probe=probe, group=turn.side.group, repeat=repeat, stopped=stop.is_set,
            )  # fmt: skip
    except flow.UnwrittenReportError as fault:
        result = fault.report.result
        return result.model_copy(update={"warnings": (*result.warnings, str(fault))})
    except SystemFaultError as fault:
        return fault
    return report.result


def _parts_text(series: Series) -> str:
    """The options that go on with the series on as many parts."""
    if len(series.parts) == 1:
        return ""
    cluster = series.sides[0].plan.spec.cluster
    hosts = [host for part in series.parts for host in part.hosts]
    named = hosts and not (cluster.launcher == "slurm" and cluster.slurm.allocation)
    return f" --max-parallel {len(series.parts)}" + (f" --hosts {compress(hosts)}" if named else "")


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
