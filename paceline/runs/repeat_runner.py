"""Runs what is missing of a series of repeats, and says what the groups tell."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.compare.comparability import compare_settings
from paceline.compare.judgement import Comparison
from paceline.compare.over_time.repeats import GroupResult, SeriesResult, group_figures, has_figure
from paceline.core.hardware import Cluster
from paceline.core.hosts import compress
from paceline.core.result import Result
from paceline.core.run import RunSettings
from paceline.files.run_folder import Repeat, groups, read_record
from paceline.runs.comparison import Gate, compare_runs
from paceline.runs.plan import as_of_now
from paceline.runs.repeat_plan import Series, SeriesSide, Turn
from paceline.runs.tasks.runner import Observer, TaskQueue, TaskRun, TaskRunner
from paceline.runs.tasks.slot import JobSlot, TaskOutcome, plan_on

RepeatObserver = Observer[Turn, TaskOutcome]
"""Who is told of each repeat, and how it ended."""


@dataclass
class RepeatRunner(TaskRunner[Turn, TaskOutcome]):
    """Repeats of the sides of a series that go on."""

    series: Series = field(kw_only=True)
    probe: bool = field(kw_only=True)
    outcomes: dict[str, list[TaskOutcome]] = field(init=False)
    """By group, those of earlier calls among them."""

    def __post_init__(self) -> None:
        self.outcomes = {side.group: [*side.done] for side in self.series.sides}

    def run_of(self, task: Turn, slot: JobSlot) -> TaskRun:
        sides, alone = self.series.sides, len(self.slots) == 1
        repeat = Repeat(
            number=task.number,
            num_repeats=task.num_repeats,
            groups=tuple(side.group for side in sides),
            partner=next((side.plan.spec for side in sides if side is not task.side), None),
            sequential=self.series.sequential,
        )
        plan = plan_on(as_of_now(task.side.plan, beside_others=not alone), slot)
        return TaskRun(plan, task.side.group, repeat, probe=self.probe and alone)

    def keep(self, task: Turn, outcome: TaskOutcome, moved: bool) -> TaskOutcome:
        self.outcomes[task.side.group].append(outcome)
        return outcome

    def cancelled(self, task: Turn, result: Result | None) -> None:
        if result is not None:
            self.outcomes[task.side.group].append(result)

    def cluster(self, task: Turn) -> Cluster:
        return task.side.plan.spec.cluster

    def key(self, task: Turn) -> tuple[str, int]:
        return task.letter, task.number

    def group_result(self, side: SeriesSide) -> GroupResult:
        """What a side has now."""
        outcomes, spec = self.outcomes[side.group], side.plan.spec
        results = tuple(outcome for outcome in outcomes if isinstance(outcome, Result))
        ok = sum(map(has_figure, results))
        return GroupResult(
            group=side.group,
            recipe=spec.recipe,
            changes=side.changes,
            key=spec.key,
            num_repeats=self.series.num_repeats,
            ok=ok,
            failed=len(outcomes) - ok,
            figures=group_figures(results),
            runs=results,
            faults=tuple(str(outcome) for outcome in outcomes if not isinstance(outcome, Result)),
        )


class Lanes(TaskQueue[Turn]):
    """The repeats that are left for each slot; both of a pair stay on the same."""

    def __init__(self, series: Series) -> None:
        self._turns = {slot: [*series.turns(slot.number)] for slot in series.slots}

    def take(self, slot: JobSlot) -> Turn | None:
        return self._turns[slot].pop(0) if self._turns[slot] else None

    def put_back(self, slot: JobSlot, task: Turn) -> None:
        self._turns[slot].insert(0, task)

    def share_out(self, whole: Sequence[JobSlot]) -> bool:
        left = [turn for slot, turns in self._turns.items() if slot not in whole for turn in turns]
        self._turns = {slot: self._turns[slot] for slot in whole}
        for place, number in enumerate(dict.fromkeys(turn.number for turn in left)):
            lane = self._turns[whole[place % len(whole)]]
            lane += [turn for turn in left if turn.number == number]
        return any(self._turns.values())


def run_series(
    series: Series,
    root: Path,
    command: list[str],
    observer: RepeatObserver,
    *,
    tag: str | None = None,
    probe: bool = True,
    runs_dir: Path | None = None,
    lanes: Callable[[RepeatRunner], TaskQueue[Turn]] = lambda runner: Lanes(runner.series),
) -> SeriesResult:
    """Run what is missing, one after the other on each slot; all groups as they are then.

    A repeat that fails is counted and the series goes on; a UserError ends it. KeyboardInterrupt
    ends the running repeats cleanly and then the series, which is returned as far as it came; so do
    the end of an allocation and the loss of all slots. What is left of a slot that lost a host runs
    on the others. `runs_dir` is named in the commands that the result holds; `lanes` may run less
    than all.
    """
    runner = RepeatRunner(
        observer, root, command, tag or series.tag, series.slots, series=series, probe=probe
    )
    interrupted = runner.run_tasks(lanes(runner))
    results = tuple(map(runner.group_result, series.sides))
    folder_option = f" --runs-dir {shlex.quote(str(runs_dir))}" if runs_dir else ""
    compare = _comparison(root, results, series.sides)
    slot_options = _slot_options(series, runner.losses.whole)
    resume = f"paceline run --resume {results[0].group}{slot_options}{folder_option}"
    return SeriesResult(
        groups=results,
        interrupted=interrupted,
        compare=f"{compare}{folder_option}" if compare else None,
        verdict=_verdict(root, results, series.sides),
        resume=resume if any(group.missing for group in results) else None,
    )


def _slot_options(series: Series, whole: Sequence[JobSlot]) -> str:
    """The options that go on with the series on the slots that are whole, else on all."""
    if len(series.slots) == 1:
        return ""
    slots, cluster = whole or series.slots, series.sides[0].plan.spec.cluster
    hosts = [host for slot in slots for host in slot.hosts]
    named = hosts and not cluster.allocation
    return f" --max-parallel {len(slots)}" + (f" --hosts {compress(hosts)}" if named else "")


def _comparison(
    root: Path, results: Sequence[GroupResult], sides: Sequence[SeriesSide]
) -> str | None:
    """`paceline compare` of the two groups, or of this one with the recipe's last good one.

    Settings in which they differ are accepted by name.
    """
    ours = RunSettings.of(sides[-1].plan.spec)
    if len(sides) == 2:
        return _compare(
            results[0].group, RunSettings.of(sides[0].plan.spec), results[1].group, ours
        )
    for name, folders in reversed(groups(root).items()):
        good = [r.settings for folder in folders if (r := read_record(folder)).status == "ok"]
        if name != results[0].group and good and good[-1].recipe == results[0].recipe:
            return _compare(name, good[-1], results[0].group, ours)
    return None


def _compare(first: str, theirs: RunSettings, second: str, ours: RunSettings) -> str:
    allowed = "".join(f" --allow {key}" for key in compare_settings([theirs], [ours]).keys)
    return f"paceline compare {first} {second}{allowed}"


def _verdict(
    root: Path, results: Sequence[GroupResult], sides: Sequence[SeriesSide]
) -> Comparison | None:
    """What the comparison of two complete groups says."""
    if len(results) != 2 or any(group.missing for group in results):
        return None
    first, second = (RunSettings.of(side.plan.spec) for side in sides)
    gate = Gate(allowed=tuple(compare_settings([first], [second]).keys))
    return compare_runs(root, results[0].group, results[1].group, gate)
