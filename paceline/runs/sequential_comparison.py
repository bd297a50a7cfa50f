"""Sequential comparison (`compare --sequential`): pairs of runs until it is decided."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from paceline.compare.comparability import compare_settings
from paceline.compare.judgement import (
    SideSummary,
    percent_change,
    verdict_label,
    verdict_tone,
)
from paceline.compare.over_time.repeats import SeriesResult, has_figure
from paceline.compare.sequential.interim_analysis import Design, analysis_points
from paceline.compare.sequential.judgement import InterimAnalysis, SequentialComparison, judge_pairs
from paceline.compare.sides import ComparedRun, ComparisonSide, Pair
from paceline.compare.significance import MARGIN
from paceline.core.errors import UserError
from paceline.core.result import Result
from paceline.core.units import percent, pluralize
from paceline.files.run_folder import Repeat, find_runs, groups, read_record
from paceline.machines.placement import Request
from paceline.report.document import Column, Document, Notes, Table, Verdict
from paceline.runs.comparison import ComparisonOptions
from paceline.runs.comparison_inputs import find_side
from paceline.runs.repeat_plan import (
    ScheduledRepeat,
    Series,
    SeriesSide,
    new_series,
    resumed_series,
    side_request,
)
from paceline.runs.repeat_runner import RepeatObserver, RepeatRunner, SlotQueues, run_series
from paceline.runs.tasks.slot import JobSlot

DEFAULT_MAX_PAIRS = 16
"""Maximum number of pairs, over which the error probability is spent."""
MAX_FAILURES = 2
"""Number of consecutive failed runs of one side that ends the series."""
Names = tuple[str, str]
Members = tuple[ComparedRun, ...]
AnalysisWatcher = Callable[[SequentialComparison], None]
"""Callback for each interim analysis."""


@dataclass(frozen=True)
class SequentialRequest:
    """Sides and options of a sequential comparison."""

    root: Path
    first: str
    second: str
    options: ComparisonOptions
    max_pairs: int | None = None
    """Maximum number of pairs; by default that of the existing runs, or DEFAULT_MAX_PAIRS."""
    group: str | None = None
    runs_dir: Path | None = None

    def __post_init__(self) -> None:
        if len(self.options.metrics) > 1:
            raise UserError(
                "--sequential",
                "uses one metric",
                allowed="one --metric",
                remedy="choose the one that matters",
            )


def sequential_series(request: SequentialRequest) -> Series | None:
    """Return the series that runs the pairs; None if these runs cannot be made here.

    Two groups that alternated are resumed. Recipes (with changes, as in `run --interleave`) start a
    new series. Raises UserError for names that are neither runs nor recipes, and for a maximum
    number of pairs that differs from that of the first interim analysis.
    """
    root, names = request.root, (request.first, request.second)
    are_runs = [_names_runs(root, name) for name in names]
    if not any(are_runs):
        requests = [side_request(Request("", runs_dir=request.runs_dir), name) for name in names]
        max_pairs = request.max_pairs or DEFAULT_MAX_PAIRS
        return replace(new_series(root, requests, max_pairs, request.group), sequential=True)
    if not all(are_runs):
        raise UserError(
            f"side {names[are_runs[0]]!r}",
            "matches no run, but the other side does",
            allowed="two groups of runs, or two recipes with their changes",
        )
    if request.group:
        raise UserError(
            "--group", "applies only to a new series", remedy="leave it out to resume groups"
        )
    if not _alternated(root, names):
        return None
    return _with_whole_pairs(resumed_series(root, names[0], _max_pairs(request, names)))


def _with_whole_pairs(series: Series) -> Series:
    """Return the series with both runs of a pair missing if one is: they must be consecutive."""
    missing = tuple(sorted({number for side in series.sides for number in side.missing}))
    sides = tuple(replace(side, missing=missing) for side in series.sides)
    return replace(series, sides=sides, sequential=True)


def judge_existing_pairs(
    request: SequentialRequest, names: Names | None = None
) -> SequentialComparison:
    """Return the verdict on the existing pairs; `names` are the groups of a series."""
    names = names or (request.first, request.second)
    sides = [find_side(request.root, name) for name in names]
    in_series = _alternated(request.root, names)
    pairs, unpaired_names = (_by_number if in_series else _by_time)(*sides)
    pair = Pair(
        *(replace(side, members=of_side) for side, of_side in zip(sides, pairs, strict=True))
    )
    allowed = request.options.allowed
    if in_series:
        # Settings of a series differ on purpose.
        allowed += compare_settings(*([m.facts for m in side.members] for side in sides)).keys
    return judge_pairs(
        pair,
        Design(_max_pairs(request, names), request.options.margin),
        allowed=allowed,
        metrics=request.options.metrics,
        interleaved=_in_turns(pair),
        unpaired_runs=unpaired_names,
    )


def with_instructions(comparison: SequentialComparison) -> SequentialComparison:
    """Return the comparison with instructions for the user if the runs cannot be made here."""
    if comparison.end_reason != "continue":
        return comparison
    due = next(look for look in analysis_points(comparison.max_pairs) if look > comparison.pairs)
    more = due - comparison.pairs
    text = (
        f"run {more} more {'pair' if more == 1 else 'pairs'} alternately (A B, then B A), add them "
        f"to both sides, and compare again with --max-pairs {comparison.max_pairs}"
    )
    return comparison.model_copy(update={"next_action": text})


def _names_runs(root: Path, name: str) -> bool:
    try:
        return bool(find_runs(root, name)) if name.strip() else False
    except UserError:
        return name.endswith(".json") or ("," in name and _names_runs(root, name.split(",")[0]))


def _alternated(root: Path, names: Names) -> bool:
    """Return True if both are groups of one series."""
    folders = groups(root)
    if names[0] == names[1] or not all(name in folders for name in names):
        return False
    return all({*names} == {*repeat.groups} for repeat in _repeats(root, names))


def _repeats(root: Path, names: Names) -> list[Repeat]:
    folders = groups(root)
    records = [read_record(folder) for name in names for folder in folders.get(name, [])]
    return [record.repeat for record in records if record.repeat]


def _max_pairs(request: SequentialRequest, names: Names) -> int:
    """Return the maximum number of pairs; raise UserError if it differs from the original one."""
    earlier = {repeat.num_repeats for repeat in _repeats(request.root, names) if repeat.sequential}
    if earlier and request.max_pairs not in (None, *earlier):
        raise UserError(
            f"--max-pairs {request.max_pairs}",
            f"was set to {min(earlier)} before the first interim analysis",
            remedy="leave it out, or start a new series: more analyses cause more false alarms",
        )
    return min(earlier, default=request.max_pairs or DEFAULT_MAX_PAIRS)


def _by_number(
    first: ComparisonSide, second: ComparisonSide
) -> tuple[tuple[Members, Members], tuple[str, ...]]:
    """Pair the latest good runs of both sides with the same repeat number, in the order of time."""
    of_first, of_second = (
        {_number(member): member for member in side.valid_runs} for side in (first, second)
    )
    both = [(of_first[n], of_second[n]) for n in of_first.keys() & of_second.keys()]
    both.sort(key=lambda pair: max(member.created or "" for member in pair))
    pairs = tuple(a for a, _ in both), tuple(b for _, b in both)
    return pairs, _unpaired_names((first, second), pairs)


def _by_time(
    first: ComparisonSide, second: ComparisonSide
) -> tuple[tuple[Members, Members], tuple[str, ...]]:
    """Pair the good runs of both sides in the order of time."""
    by_time = [sorted(side.valid_runs, key=lambda m: m.created or "") for side in (first, second)]
    n = min(map(len, by_time))
    pairs = tuple(by_time[0][:n]), tuple(by_time[1][:n])
    return pairs, _unpaired_names((first, second), pairs)


def _unpaired_names(
    sides: tuple[ComparisonSide, ComparisonSide], pairs: tuple[Members, Members]
) -> tuple[str, ...]:
    paired_ids = {member.identity for column in pairs for member in column}
    return tuple(m.name for side in sides for m in side.members if m.identity not in paired_ids)


def _number(member: ComparedRun) -> int:
    repeat = read_record(Path(member.place)).repeat
    return repeat.number if repeat else 0


def _in_turns(sides: Pair) -> bool:
    """Return True if both runs of each pair were made before the next pair."""
    times = [
        [first.created or "", second.created or ""]
        for first, second in zip(sides.baseline.members, sides.candidate.members, strict=True)
    ]
    return all(max(a) < min(b) for a, b in pairwise(times)) and all(map(all, times))


class PairQueues(SlotQueues):
    """Repeats of a series until the finished pairs decide the comparison."""

    def __init__(
        self, runner: RepeatRunner, look: Callable[[], SequentialComparison], watch: AnalysisWatcher
    ) -> None:
        super().__init__(runner.series)
        self._runner, self._look, self._watch = runner, look, watch
        self._pair_number: int | None = None

    def take(self, slot: JobSlot) -> ScheduledRepeat | None:
        repeat = super().take(slot)
        if repeat is None or repeat.number == self._pair_number:
            return repeat
        if self._is_decided():
            self._turns = {at: [] for at in self._turns}
            return None
        self._pair_number = repeat.number
        return repeat

    def _is_decided(self) -> bool:
        """Return True if a side keeps failing, or the pairs so far end the comparison."""
        if any(map(self._fails, self._runner.series.sides)):
            return True
        if self._pair_number is None and not any(
            side.results for side in self._runner.series.sides
        ):
            return False
        comparison = self._look()
        if comparison.end_reason != "continue" or comparison.pairs in analysis_points(
            comparison.max_pairs
        ):
            self._watch(comparison)
        return comparison.end_reason != "continue"

    def _fails(self, side: SeriesSide) -> bool:
        recent = self._runner.outcomes[side.group][len(side.results) :][-MAX_FAILURES:]
        figures = [isinstance(run, Result) and has_figure(run) for run in recent]
        return len(figures) == MAX_FAILURES and not any(figures)


def run_until_decided(
    request: SequentialRequest,
    series: Series,
    command: list[str],
    observer: RepeatObserver,
    watch: AnalysisWatcher,
    *,
    probe: bool = True,
) -> SequentialComparison:
    """Run pairs until they decide, another pair would not help, or the user interrupts.

    All runs are kept, and the result says how to resume. Raises UserError as run_series does.
    """
    names = (series.sides[0].group, series.sides[1].group)
    if request.second == names[0]:
        names = (names[1], names[0])

    def look() -> SequentialComparison:
        return judge_existing_pairs(request, names)

    series_result = run_series(
        series,
        request.root,
        command,
        observer,
        probe=probe,
        make_queue=lambda runner: PairQueues(runner, look, watch),
    )
    comparison = _failed(request, names, series_result) or look()
    if comparison.end_reason != "continue":
        return comparison
    return comparison.model_copy(
        update={
            "end_reason": "interrupted" if series_result.interrupted else "failed",
            "next_action": resume_command(request, names),
        }
    )


def _failed(
    request: SequentialRequest, names: Names, series_result: SeriesResult
) -> SequentialComparison | None:
    """Return the result if a side has no good run, else None.

    A comparison that was interrupted before its first good run is undecided, not invalid.
    """
    lacking = [group for group in series_result.groups if not group.ok]
    if not lacking:
        return None
    reasons = [*lacking[0].faults, *(run.reason for run in lacking[0].runs if run.reason)]
    why = reasons[-1] if reasons else "interrupted before its first run had ended"
    summaries = {
        g.group: SideSummary(name=g.group, kind="runs", runs=tuple(run.run for run in g.runs))
        for g in series_result.groups
    }
    was_interrupted = series_result.interrupted and all(
        run.status == "cancelled" for run in lacking[0].runs
    )
    return SequentialComparison(
        verdict="undecided" if was_interrupted else "invalid",
        end_reason="continue",
        confidence="low",
        sentence=f"Not judged: {lacking[0].group} has no good run ({why}).",
        pairs=0,
        max_pairs=_max_pairs(request, names),
        margin=request.options.margin,
        baseline=summaries[names[0]],
        candidate=summaries[names[1]],
    )


def resume_command(request: SequentialRequest, names: Names) -> str:
    """Return the command that runs further pairs of two groups."""
    comparison_options = request.options
    options = (
        [f" --margin {comparison_options.margin:g}"] if comparison_options.margin != MARGIN else []
    )
    options += [f" --metric {name}" for name in comparison_options.metrics]
    if request.runs_dir:
        options.append(f" --runs-dir {shlex.quote(str(request.runs_dir))}")
    return f"paceline compare {names[0]} {names[1]} --sequential{''.join(options)}"


WHY_ENDED = {
    "interrupted": "interrupted: finished runs are kept",
    "failed": "no further pair could be run: one side keeps failing, or hosts are lost",
}


def sequential_document(comparison: SequentialComparison) -> Document:
    """Return the verdict, all interim analyses, their warnings, and how to resume."""
    return Document(
        kind="sequential comparison",
        title=f"{comparison.candidate.short_name} against {comparison.baseline.short_name}",
        setup=(
            f"{pluralize(comparison.pairs, 'pair')} of up to {comparison.max_pairs}",
            f"margin {percent(comparison.margin, 2)}",
            f"false-alarm rate over all analyses up to {percent(comparison.error, 0)}",
        ),
        verdict=Verdict(
            verdict_label(comparison.verdict, low_confidence=comparison.confidence == "low"),
            verdict_tone(comparison.verdict),
        ),
        answer=(comparison.sentence,),
        sections=(
            Notes(title="Warnings", lines=comparison.warnings, tone="alert"),
            Table(
                title="Interim analyses",
                columns=(
                    Column("pairs", "pairs", justify="right"),
                    Column("ratio", "change", percent_change, "right"),
                    Column("interval", "interval"),
                    Column("verdict", "verdict"),
                ),
                rows=[
                    {
                        **look.model_dump(),
                        "interval": f"{percent_change(look.low)} to {percent_change(look.high)}",
                    }
                    for look in comparison.analyses
                ],
            ),
            Notes(title="Possible causes", lines=comparison.causes),
        ),
        notes=tuple(_notes(comparison)),
        data=comparison,
    )


def look_text(look: InterimAnalysis) -> str:
    """Return `after 5 pairs +2.01% (+0.90% to +3.13%): slower`."""
    return (
        f"after {pluralize(look.pairs, 'pair')} {percent_change(look.ratio)} "
        f"({percent_change(look.low)} to {percent_change(look.high)}): {look.verdict}"
    )


def _notes(comparison: SequentialComparison) -> Iterator[str]:
    if comparison.why_low:
        yield f"low confidence: {'; '.join(comparison.why_low)}"
    for difference in comparison.differences:
        yield f"{difference.key}: {difference.baseline} against {difference.candidate}"
    if comparison.unpaired_runs:
        yield f"not paired: {', '.join(comparison.unpaired_runs)}"
    if comparison.end_reason in WHY_ENDED:
        yield WHY_ENDED[comparison.end_reason]
    if comparison.next_action:
        yield f"to continue: {comparison.next_action}"
