"""`compare --sequential`: pairs of runs made one after the other until they decide."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from paceline.compare.comparability import compare_settings
from paceline.compare.judgement import SideSummary
from paceline.compare.over_time.repeats import SeriesResult, has_figure
from paceline.compare.sequential.interim_analysis import Design
from paceline.compare.sequential.judgement import SequentialComparison, judge_pairs
from paceline.compare.sequential.spending import looks_up_to
from paceline.compare.sides import ComparedRun, ComparisonSide, Pair
from paceline.compare.significance import MARGIN
from paceline.core.errors import UserError
from paceline.core.result import Result
from paceline.files.run_folder import Repeat, find_runs, groups, read_record
from paceline.machines.placement import Request
from paceline.runs.comparison import Gate, side_of
from paceline.runs.repeat_plan import (
    Series,
    SeriesSide,
    Turn,
    new_series,
    resumed_series,
    side_request,
)
from paceline.runs.repeat_runner import Lanes, RepeatObserver, RepeatRunner, run_series
from paceline.runs.tasks.slot import JobSlot

MOST_PAIRS = 16
"""Pairs over which the error is spent unless the user says otherwise."""
FAILURES = 2
"""Runs of one side in a row without a figure, after which no more are made."""
Names = tuple[str, str]
Members = tuple[ComparedRun, ...]
LookWatcher = Callable[[SequentialComparison], None]
"""Who is told of each look."""


@dataclass(frozen=True)
class PairsQuestion:
    """What is compared, and what was settled before the first look."""

    root: Path
    first: str
    second: str
    gate: Gate
    most_pairs: int | None = None
    """None is that of the runs that there are, else MOST_PAIRS."""
    group: str | None = None
    runs_dir: Path | None = None

    def __post_init__(self) -> None:
        if len(self.gate.metrics) > 1:
            raise UserError(
                "--sequential",
                "judges by one metric",
                allowed="one --metric",
                remedy="name the one that matters",
            )


def series_of(question: PairsQuestion) -> Series | None:
    """The series that makes the pairs; None when these runs cannot be made here.

    Two groups that ran in turn go on; recipes (with changes, as in `run --interleave`) begin a new
    series. Raises UserError for names that are neither runs nor recipes, and for another number of
    pairs than the one over which the error is being spent.
    """
    root, names = question.root, (question.first, question.second)
    are_runs = [_names_runs(root, name) for name in names]
    if not any(are_runs):
        requests = [side_request(Request("", runs_dir=question.runs_dir), name) for name in names]
        most = question.most_pairs or MOST_PAIRS
        return replace(new_series(root, requests, most, question.group), sequential=True)
    if not all(are_runs):
        raise UserError(
            f"side {names[are_runs[0]]!r}",
            "names no run, and the other side does",
            allowed="two groups of runs, or two recipes with their changes",
        )
    if question.group:
        raise UserError("--group", "names a new series", remedy="leave it out to go on with runs")
    if not _ran_in_turn(root, names):
        return None
    return _in_whole_pairs(resumed_series(root, names[0], _planned(question, names)))


def _in_whole_pairs(series: Series) -> Series:
    """The series with both runs of a pair missing where one is: they must follow each other."""
    missing = tuple(sorted({number for side in series.sides for number in side.missing}))
    sides = tuple(replace(side, missing=missing) for side in series.sides)
    return replace(series, sides=sides, sequential=True)


def judged_so_far(question: PairsQuestion, names: Names | None = None) -> SequentialComparison:
    """The verdict on the pairs that there are; `names` are the groups of a series."""
    names = names or (question.first, question.second)
    sides = [side_of(question.root, name) for name in names]
    in_series = _ran_in_turn(question.root, names)
    pairs, unpaired = (_by_number if in_series else _by_time)(*sides)
    ordered = Pair(
        *(replace(side, members=of_side) for side, of_side in zip(sides, pairs, strict=True))
    )
    allowed = question.gate.allowed
    if in_series:
        # Settings of a series differ because they are meant to.
        allowed += compare_settings(*([m.facts for m in side.members] for side in sides)).keys
    return judge_pairs(
        ordered,
        Design(_planned(question, names), question.gate.margin),
        allowed=allowed,
        metrics=question.gate.metrics,
        in_turns=_in_turns(ordered),
        unpaired=unpaired,
    )


def asked(answer: SequentialComparison) -> SequentialComparison:
    """The answer with what the user is to do, where the runs cannot be made here."""
    if answer.ended != "goes on":
        return answer
    due = next(look for look in looks_up_to(answer.most_pairs) if look > answer.pairs)
    more = due - answer.pairs
    text = (
        f"run {more} more {'pair' if more == 1 else 'pairs'} in turns (A B, then B A), add them to "
        f"both sides, and ask again with --max-pairs {answer.most_pairs}"
    )
    return answer.model_copy(update={"go_on": text})


def _names_runs(root: Path, name: str) -> bool:
    try:
        return bool(find_runs(root, name)) if name.strip() else False
    except UserError:
        return name.endswith(".json") or ("," in name and _names_runs(root, name.split(",")[0]))


def _ran_in_turn(root: Path, names: Names) -> bool:
    """Whether both are groups of one series."""
    folders = groups(root)
    if names[0] == names[1] or not all(name in folders for name in names):
        return False
    return all({*names} == {*repeat.groups} for repeat in _repeats(root, names))


def _repeats(root: Path, names: Names) -> list[Repeat]:
    folders = groups(root)
    records = [read_record(folder) for name in names for folder in folders.get(name, [])]
    return [record.repeat for record in records if record.repeat]


def _planned(question: PairsQuestion, names: Names) -> int:
    """The pairs over which the error is spent; raises UserError when that was settled otherwise."""
    settled = {repeat.num_repeats for repeat in _repeats(question.root, names) if repeat.sequential}
    if settled and question.most_pairs not in (None, *settled):
        raise UserError(
            f"--max-pairs {question.most_pairs}",
            f"was settled at {min(settled)} before the first look",
            remedy="leave it out, or begin a new series: more looks would be more false alarms",
        )
    return min(settled, default=question.most_pairs or MOST_PAIRS)


def _by_number(
    first: ComparisonSide, second: ComparisonSide
) -> tuple[tuple[Members, Members], tuple[str, ...]]:
    """The good runs of both sides that have the same number in their series, the last of each.

    In the order in which the pairs were made.
    """
    of_first, of_second = (
        {_number(member): member for member in side.valid_runs} for side in (first, second)
    )
    both = [(of_first[n], of_second[n]) for n in of_first.keys() & of_second.keys()]
    both.sort(key=lambda pair: max(member.created or "" for member in pair))
    pairs = tuple(a for a, _ in both), tuple(b for _, b in both)
    return pairs, _unpaired((first, second), pairs)


def _by_time(
    first: ComparisonSide, second: ComparisonSide
) -> tuple[tuple[Members, Members], tuple[str, ...]]:
    """The good runs of both sides in the order in which they were made."""
    ordered = [sorted(side.valid_runs, key=lambda m: m.created or "") for side in (first, second)]
    n = min(map(len, ordered))
    pairs = tuple(ordered[0][:n]), tuple(ordered[1][:n])
    return pairs, _unpaired((first, second), pairs)


def _unpaired(
    sides: tuple[ComparisonSide, ComparisonSide], pairs: tuple[Members, Members]
) -> tuple[str, ...]:
    paired = {member.identity for column in pairs for member in column}
    return tuple(m.name for side in sides for m in side.members if m.identity not in paired)


def _number(member: ComparedRun) -> int:
    repeat = read_record(Path(member.place)).repeat
    return repeat.number if repeat else 0


def _in_turns(sides: Pair) -> bool:
    """Whether both runs of each pair were made before any of the next."""
    times = [
        [first.created or "", second.created or ""]
        for first, second in zip(sides.baseline.members, sides.candidate.members, strict=True)
    ]
    return all(max(a) < min(b) for a, b in pairwise(times)) and all(map(all, times))


class PairLanes(Lanes):
    """The turns of a series, as long as the pairs that were made do not decide."""

    def __init__(
        self, runner: RepeatRunner, look: Callable[[], SequentialComparison], watch: LookWatcher
    ) -> None:
        super().__init__(runner.series)
        self._runner, self._look, self._watch = runner, look, watch
        self._begun: int | None = None

    def take(self, slot: JobSlot) -> Turn | None:
        turn = super().take(slot)
        if turn is None or turn.number == self._begun:
            return turn
        if self._enough():
            self._turns = {at: [] for at in self._turns}
            return None
        self._begun = turn.number
        return turn

    def _enough(self) -> bool:
        """Whether a side only fails, or the pairs so far end the comparison."""
        if any(map(self._fails, self._runner.series.sides)):
            return True
        if self._begun is None and not any(side.done for side in self._runner.series.sides):
            return False
        answer = self._look()
        if answer.ended != "goes on" or answer.pairs in looks_up_to(answer.most_pairs):
            self._watch(answer)
        return answer.ended != "goes on"

    def _fails(self, side: SeriesSide) -> bool:
        made = self._runner.outcomes[side.group][len(side.done) :][-FAILURES:]
        figures = [isinstance(run, Result) and has_figure(run) for run in made]
        return len(figures) == FAILURES and not any(figures)


def run_until_decided(
    question: PairsQuestion,
    series: Series,
    command: list[str],
    observer: RepeatObserver,
    watch: LookWatcher,
    *,
    probe: bool = True,
) -> SequentialComparison:
    """Make pairs until they decide, a further one would not help, or the user breaks it off.

    Every run is kept, and the answer says how to go on. Raises UserError as run_series does.
    """
    names = (series.sides[0].group, series.sides[1].group)
    if question.second == names[0]:
        names = (names[1], names[0])

    def look() -> SequentialComparison:
        return judged_so_far(question, names)

    made = run_series(
        series,
        question.root,
        command,
        observer,
        probe=probe,
        lanes=lambda runner: PairLanes(runner, look, watch),
    )
    answer = _failed(question, names, made) or look()
    if answer.ended != "goes on":
        return answer
    return answer.model_copy(
        update={
            "ended": "interrupted" if made.interrupted else "failed",
            "go_on": go_on_command(question, names),
        }
    )


def _failed(
    question: PairsQuestion, names: Names, made: SeriesResult
) -> SequentialComparison | None:
    """The answer where a side has no figure at all.

    Nothing is invalid of one that was broken off before its first figure: it is undecided.
    """
    lacking = [group for group in made.groups if not group.ok]
    if not lacking:
        return None
    reasons = [*lacking[0].faults, *(run.reason for run in lacking[0].runs if run.reason)]
    why = reasons[-1] if reasons else "broken off before its first run had ended"
    summaries = {
        g.group: SideSummary(name=g.group, kind="runs", runs=tuple(run.run for run in g.runs))
        for g in made.groups
    }
    stopped = made.interrupted and all(run.status == "cancelled" for run in lacking[0].runs)
    return SequentialComparison(
        verdict="undecided" if stopped else "invalid",
        ended="goes on",
        confidence="low",
        sentence=f"Not judged: {lacking[0].group} has no figure ({why}).",
        pairs=0,
        most_pairs=_planned(question, names),
        margin=question.gate.margin,
        baseline=summaries[names[0]],
        candidate=summaries[names[1]],
    )


def go_on_command(question: PairsQuestion, names: Names) -> str:
    """The command that makes further pairs of two groups."""
    gate = question.gate
    options = [f" --margin {gate.margin:g}"] if gate.margin != MARGIN else []
    options += [f" --metric {name}" for name in gate.metrics]
    if question.runs_dir:
        options.append(f" --runs-dir {shlex.quote(str(question.runs_dir))}")
    return f"paceline compare {names[0]} {names[1]} --sequential{''.join(options)}"
