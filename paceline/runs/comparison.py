"""Comparison of two sides, given by name: runs, repeats, tags, result files or published rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.compare.comparability import COMPARED_SETTINGS, FIGURE_SETTINGS
from paceline.compare.few_runs import RunOrder
from paceline.compare.judge import judge
from paceline.compare.judgement import Comparison
from paceline.compare.published import (
    in_convention_of,
    nearest_row,
    published_side,
    rows_with_step_time,
)
from paceline.compare.sides import ComparisonSide, Pair
from paceline.compare.significance import MARGIN, MIN_REPEATS, RunVariation
from paceline.core.errors import PacelineError, UserError, unknown_name
from paceline.core.metrics import METRICS
from paceline.files import references
from paceline.files.run_folder import read_record, run_folders
from paceline.logs.facts import UserSettings
from paceline.runs.comparison_inputs import NO_SETTINGS, find_side
from paceline.runs.history import recipe_history
from paceline.runs.machine_variation import find_machine, was_made_here

BEST_REFERENCE = "reference"
"""Name for the published row that is most similar to the run."""


@dataclass(frozen=True)
class ComparisonOptions:
    """Margin, allowed differences and metrics of a comparison, and settings of its logs."""

    margin: float = MARGIN
    allowed: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    settings: UserSettings = NO_SETTINGS
    """Settings that logs do not state."""

    def __post_init__(self) -> None:
        for key in self.allowed:
            _check_choice("--allow", key, {**COMPARED_SETTINGS, **FIGURE_SETTINGS})
        for name in self.metrics:
            _check_choice("--metric", name, METRICS)


def compare_runs(root: Path, first: str, second: str, options: ComparisonOptions) -> Comparison:
    """Compare the runs named `second` with those named `first`.

    Raises UserError when a name matches no run; `find_side` lists what is accepted.
    """
    baseline, candidate = (find_side(root, name, options.settings) for name in (first, second))
    return _judge(baseline, candidate, options, machine_scatter(root, Pair(baseline, candidate)))


def compare_with_reference(
    root: Path, name: str, reference: str, options: ComparisonOptions
) -> Comparison:
    """Compare the runs named `name` with a published row, or the most similar row of a table.

    Raises UserError when a name is unknown or no row has a step time.
    """
    side = find_side(root, name, options.settings)
    rows = rows_with_step_time(_rows(reference, side))
    if not rows:
        raise UserError(f"--against {reference}", "has no row with a step time")
    facts = [member.facts for member in side.valid_runs or side.members]
    nearest = nearest_row(rows, facts, options.allowed)
    row, side = published_side(nearest), in_convention_of(nearest, side)
    comparison = _judge(row, side, options, machine_scatter(root, Pair(row, side)))
    if "mfu" in row.members[0].metrics and any(side.metric("mfu")):
        note = f"MFU is counted in {nearest.convention}, the FLOPs convention of {nearest.id}"
        comparison = comparison.model_copy(update={"notes": (*comparison.notes, note)})
    if reference != BEST_REFERENCE or _rows_of_recipe(side):
        return comparison
    note = "no published row is known for the recipe; the most similar row was used"
    return comparison.model_copy(update={"notes": (*comparison.notes, note)})


def parse_margin(text: str, option: str = "--margin") -> float:
    """Return `1%` or `0.01` as a fraction; raise UserError for anything else."""
    number, percent, suffix = text.strip().partition("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if suffix.strip() or not 0 <= value < 0.5:
        raise UserError(
            f"{option} {text}", "is not a margin", allowed="0 to 50%, written 1% or 0.01"
        )
    return value


def _judge(
    baseline: ComparisonSide,
    candidate: ComparisonSide,
    options: ComparisonOptions,
    variation: RunVariation | None,
) -> Comparison:
    return judge(
        baseline,
        candidate,
        margin=options.margin,
        allowed=options.allowed,
        metrics=options.metrics,
        variation=variation,
        machine=find_machine(Pair(baseline, candidate)),
    )


def _rows(reference: str, side: ComparisonSide) -> Sequence[references.Row]:
    if reference != BEST_REFERENCE:
        return references.rows_of_recipe(reference) or references.find_rows(reference)
    return _rows_of_recipe(side) or references.rows()


def _rows_of_recipe(side: ComparisonSide) -> list[references.Row]:
    recipes = {member.facts.recipe for member in side.members if member.facts.recipe}
    return [row for recipe in sorted(recipes) for row in references.rows_of_recipe(recipe)]


def _check_choice(option: str, word: str, choices: Collection[str]) -> None:
    if word not in choices:
        raise unknown_name(f"{option} {word}", "is unknown", word, choices)


def machine_scatter(root: Path, sides: Pair) -> RunVariation | None:
    """Return the run-to-run variation in the history under `root` if the verdict needs it.

    The verdict needs it with fewer than three repeats per side, or when the sides did not
    alternate. The series has the configuration of either side. The candidate's runs are excluded,
    and so are imported bundles, which come from another machine.
    """
    if not all(side.valid_runs for side in sides.each):
        return None
    order = RunOrder(sides)
    if min(sides.sizes) >= MIN_REPEATS and not order.confounding and not order.blocks:
        return None
    candidate_folders = {
        Path(member.place).resolve() for member in sides.candidate.valid_runs if member.place
    }
    places = [m.place for side in sides.each for m in side.valid_runs if m.place and m.facts.recipe]
    keys = {read_record(Path(place)).key for place in places} - {None}
    recipes = {member.facts.recipe for side in sides.each for member in side.valid_runs}
    folders = [
        folder
        for folder in run_folders(root)
        if folder.resolve() not in candidate_folders
        and was_made_here(folder)
        and _is_one_of(folder, keys)
    ]
    series = [
        series
        for recipe in sorted(filter(None, recipes))
        for series in (recipe_history(recipe, folders).series if folders else ())
        if series.variation
    ]
    largest = max(series, key=lambda s: s.n_runs, default=None)
    return largest.variation if largest else None


def _is_one_of(folder: Path, keys: set[str | None]) -> bool:
    with suppress(PacelineError):
        return read_record(folder).key in keys
    return False
