"""Runner of the missing repeats of a series, and summary of its groups."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from paceline.compare.comparability import compare_settings
from paceline.compare.judgement import Comparison
from paceline.compare.over_time.repeats import GroupResult, SeriesResult, group_figures, has_figure
from paceline.core.hardware import Cluster
from paceline.core.hosts import compress
from paceline.core.result import Result
from paceline.core.run import RunSettings
from paceline.files.locks import exclusive
from paceline.files.run_folder import Repeat, groups, read_record
from paceline.runs.comparison import ComparisonOptions, compare_runs
from paceline.runs.plan import refresh
from paceline.runs.repeat_plan import ScheduledRepeat, Series, SeriesSide
from paceline.runs.tasks.runner import Observer, TaskQueue, TaskRun, TaskRunner
from paceline.runs.tasks.slot import JobSlot, TaskOutcome, plan_on

RepeatObserver = Observer[ScheduledRepeat, TaskOutcome]
"""Observer of the start and end of each repeat."""


@dataclass
class RepeatRunner(TaskRunner[ScheduledRepeat, TaskOutcome]):
    """Runner of the repeats of a series."""

    series: Series = field(kw_only=True)
    probe: bool = field(kw_only=True)
    outcomes: dict[str, list[TaskOutcome]] = field(init=False)
    """Outcomes by group, including those of earlier calls."""

    def __post_init__(self) -> None:
        self.outcomes = {side.group: [*side.results] for side in self.series.sides}

    def run_of(self, task: ScheduledRepeat, slot: JobSlot) -> TaskRun:
        sides, alone = self.series.sides, len(self.slots) == 1
        repeat = Repeat(
            number=task.number,
            num_repeats=task.num_repeats,
            groups=tuple(side.group for side in sides),
            partner=next((side.plan.spec for side in sides if side is not task.side), None),
            sequential=self.series.sequential,
        )
        plan = plan_on(refresh(task.side.plan, concurrent=not alone), slot)
        return TaskRun(plan, task.side.group, repeat, probe=self.probe and alone)

    def keep(self, task: ScheduledRepeat, outcome: TaskOutcome, moved: bool) -> TaskOutcome:
        self.outcomes[task.side.group].append(outcome)
        return outcome

    def task_cancelled(self, task: ScheduledRepeat, result: Result | None) -> None:
        if result is not None:
            self.outcomes[task.side.group].append(result)

    def cluster(self, task: ScheduledRepeat) -> Cluster:
        return task.side.plan.spec.cluster

    def key(self, task: ScheduledRepeat) -> tuple[str, int]:
        return task.letter, task.number

    def group_result(self, side: SeriesSide) -> GroupResult:
        """Return a side's runs and figures so far."""
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


class SlotQueues(TaskQueue[ScheduledRepeat]):
    """Remaining repeats of each slot; both runs of a pair stay on the same slot."""

    def __init__(self, series: Series) -> None:
        self._turns = {slot: [*series.schedule(slot.number)] for slot in series.slots}

    def take(self, slot: JobSlot) -> ScheduledRepeat | None:
        return self._turns[slot].pop(0) if self._turns[slot] else None

    def put_back(self, slot: JobSlot, task: ScheduledRepeat) -> None:
        self._turns[slot].insert(0, task)

    def share_out(self, slots: Sequence[JobSlot]) -> bool:
        remaining = [
            repeat for slot, turns in self._turns.items() if slot not in slots for repeat in turns
        ]
        self._turns = {slot: self._turns[slot] for slot in slots}
        for place, number in enumerate(dict.fromkeys(repeat.number for repeat in remaining)):
            queue = self._turns[slots[place % len(slots)]]
            queue += [repeat for repeat in remaining if repeat.number == number]
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
    make_queue: Callable[[RepeatRunner], TaskQueue[ScheduledRepeat]] = lambda runner: SlotQueues(
        runner.series
    ),
) -> SeriesResult:
    """Run the missing repeats, one at a time on each slot, and return all groups.

    A failed repeat is counted and the series continues; a UserError ends it. KeyboardInterrupt ends
    the running repeats cleanly and then the series, which is returned as it is then. The end of an
    allocation and the loss of all slots do the same. Repeats of a slot that lost a host run on the
    other slots. `runs_dir` is part of the commands in the result. `make_queue` may return a queue
    that ends early.
    """
    runner = RepeatRunner(
        observer, root, command, tag or series.tag, series.slots, series=series, probe=probe
    )
    with ExitStack() as locks:
        for group in dict.fromkeys(side.group for side in series.sides):
            locks.enter_context(exclusive(root, f"group {group!r}"))
        interrupted = runner.run_tasks(make_queue(runner))
    results = tuple(map(runner.group_result, series.sides))
    folder_option = f" --runs-dir {shlex.quote(str(runs_dir))}" if runs_dir else ""
    compare = _comparison(root, results, series.sides)
    slot_options = _slot_options(series, runner.lost_slots.usable)
    resume = f"paceline run --resume {results[0].group}{slot_options}{folder_option}"
    return SeriesResult(
        groups=results,
        interrupted=interrupted,
        compare=f"{compare}{folder_option}" if compare else None,
        verdict=_verdict(root, results, series.sides),
        resume=resume if any(group.missing for group in results) else None,
    )


def _slot_options(series: Series, whole: Sequence[JobSlot]) -> str:
    """Return the options that resume the series on the intact slots, else on all."""
    if len(series.slots) == 1:
        return ""
    slots, cluster = whole or series.slots, series.sides[0].plan.spec.cluster
    hosts = [host for slot in slots for host in slot.hosts]
    has_hosts = hosts and not cluster.allocation
    return f" --max-parallel {len(slots)}" + (f" --hosts {compress(hosts)}" if has_hosts else "")


def _comparison(
    root: Path, results: Sequence[GroupResult], sides: Sequence[SeriesSide]
) -> str | None:
    """Return a `paceline compare` command for the two groups, or for this one and an earlier one.

    The earlier group is the recipe's latest with good runs. The command allows differing settings.
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
    """Return the comparison of two complete groups."""
    if len(results) != 2 or any(group.missing for group in results):
        return None
    first, second = (RunSettings.of(side.plan.spec) for side in sides)
    options = ComparisonOptions(allowed=tuple(compare_settings([first], [second]).keys))
    return compare_runs(root, results[0].group, results[1].group, options)
