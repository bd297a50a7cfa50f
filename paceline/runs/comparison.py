"""Comparison of two sides, given by name: runs, repeats, tags, result files or published rows."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.compare.comparability import COMPARED_SETTINGS, FIGURE_SETTINGS
from paceline.compare.judge import judge
from paceline.compare.judgement import Comparison
from paceline.compare.over_time.environment import environment_items
from paceline.compare.published import nearest_row, published_side, rows_with_step_time
from paceline.compare.run_variation import RunVariation
from paceline.compare.sides import ComparedRun, ComparisonSide, Pair
from paceline.compare.significance import MARGIN, MIN_REPEATS
from paceline.core.errors import PacelineError, UserError, did_you_mean
from paceline.core.metrics import METRICS
from paceline.core.problem import invalid_input
from paceline.core.result import Result
from paceline.core.run import RunSettings
from paceline.core.run_report import RunReport
from paceline.core.stats import printed_step_s
from paceline.files import references
from paceline.files.documents import parse_json, read_text
from paceline.files.run_folder import RUN_FILE, find_runs, read_record, run_folders
from paceline.logs.parsed_log import ParsedLog
from paceline.report.run_description import window_mask
from paceline.runs.bundles.writing import BUNDLE_FILE
from paceline.runs.history import recipe_history
from paceline.runs.logged_run import RUN_STATUS
from paceline.runs.outcome import evaluate

BEST_REFERENCE = "reference"
"""Name for the published row that is most similar to the run."""


@dataclass(frozen=True)
class ComparisonOptions:
    """Margin, allowed differences and metrics of a comparison."""

    margin: float = MARGIN
    allowed: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key in self.allowed:
            _check_choice("--allow", key, {**COMPARED_SETTINGS, **FIGURE_SETTINGS})
        for name in self.metrics:
            _check_choice("--metric", name, METRICS)


def compare_runs(root: Path, first: str, second: str, options: ComparisonOptions) -> Comparison:
    """Compare the runs named `second` with those named `first`.

    Raises UserError when a name matches no run.
    """
    baseline, candidate = find_side(root, first), find_side(root, second)
    return _judge(baseline, candidate, options, machine_scatter(root, Pair(baseline, candidate)))


def compare_with_reference(
    root: Path, name: str, reference: str, options: ComparisonOptions
) -> Comparison:
    """Compare the runs named `name` with a published row, or the most similar row of a table.

    Raises UserError when a name is unknown or no row has a step time.
    """
    side = find_side(root, name)
    rows = rows_with_step_time(_rows(reference, side))
    if not rows:
        raise UserError(f"--against {reference}", "has no row with a step time")
    facts = [member.facts for member in side.valid_runs or side.members]
    row = published_side(nearest_row(rows, facts, options.allowed))
    comparison = _judge(row, side, options, machine_scatter(root, Pair(row, side)))
    if reference != BEST_REFERENCE or _rows_of_recipe(side):
        return comparison
    note = "no published row is known for the recipe; the most similar row was used"
    return comparison.model_copy(update={"notes": (*comparison.notes, note)})


def find_side(root: Path, name: str) -> ComparisonSide:
    """Return the runs of a run name, group, tag or result file, or of a comma-separated list.

    Raises UserError when there is none.
    """
    parts = [part.strip() for part in name.split(",") if part.strip()]
    parts = [name] if _is_result_file(name) else parts
    members: list[ComparedRun] = []
    for part in parts or [name]:
        if _is_result_file(part):
            members += _members_in(Path(part))
        else:
            members += [member_of_run(evaluate(folder)) for folder in find_runs(root, part)]
    if not members:
        raise UserError(f"side {name!r}", "matches no run")
    unique = tuple({member.identity: member for member in members}.values())
    # File names that are not valid UTF-8 cannot be printed.
    printable_name = name.encode(errors="replace").decode()
    return ComparisonSide(unique[0].name if len(unique) == 1 else printable_name, unique)


def _is_result_file(name: str) -> bool:
    # Path.is_file raises if a list of runs is longer than the limit for file names.
    return name.endswith(".json") and os.path.isfile(name)  # noqa: PTH113


def parse_margin(text: str) -> float:
    """Return `1%` or `0.01` as a fraction; raise UserError for anything else."""
    number, percent, suffix = text.strip().partition("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if suffix.strip() or not 0 <= value < 0.5:
        raise UserError(
            f"--margin {text}", "is not a margin", allowed="0 to 50%, written 1% or 0.01"
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
    )


def member_of_run(report: RunReport) -> ComparedRun:
    """Return the settings and metrics of a run that a comparison needs."""
    result = report.result
    times = report.steps["step_time_s"][window_mask(report)]
    return ComparedRun(
        name=result.run,
        place=report.folder,
        status=result.status,
        facts=_settled_facts(report.facts, result),
        metrics=result.metrics,
        reason=result.reason,
        window=result.window,
        printed_step_s=printed_step_s(times),
        created=result.created,
        environment=environment_items(report.inventory, result.versions),
    )


def _settled_facts(facts: RunSettings, result: Result | ParsedLog) -> RunSettings:
    """Return the settings with the window's batch and sequence length, which a ramp-up varies."""
    window = result.window
    if window is None:
        return facts
    batch, seq_len = window.global_batch, window.seq_len
    return facts.model_copy(
        update={"global_batch": batch or facts.global_batch, "seq_len": seq_len or facts.seq_len}
    )


def _members_in(path: Path) -> list[ComparedRun]:
    """Return the runs of a JSON file: a result.json, or the output of `paceline parse --json`."""
    if path.name == "result.json" and (path.parent / RUN_FILE).is_file():
        return [member_of_run(evaluate(path.parent))]
    try:
        document = parse_json(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(str(path), f"cannot be read as JSON: {error}") from error
    entries: list[Any] = document if isinstance(document, list) else [document]
    try:
        return [_member_in(entry) for entry in entries]
    except ValidationError as error:
        raise UserError(
            str(path),
            f"is not a run's result: {invalid_input(str(path), error).what}",
            allowed="result.json, or the output of `paceline parse --json`",
        ) from error


def _member_in(entry: Any) -> ComparedRun:
    if isinstance(entry, dict) and "file" in entry:
        log = ParsedLog.model_validate(entry)
        status = RUN_STATUS.get(log.status, "failed")
        facts = _settled_facts(log.facts, log)
        return ComparedRun(
            log.file, status, facts, log.metrics, log.reason or log.status, log.window
        )
    result = Result.model_validate(entry)
    facts = _settled_facts(RunSettings(origin="imported"), result)
    return ComparedRun(
        result.run,
        result.status,
        facts,
        result.metrics,
        result.reason,
        result.window,
        created=result.created,
        environment=environment_items({}, result.versions),
    )


def _rows(reference: str, side: ComparisonSide) -> Sequence[references.Row]:
    if reference != BEST_REFERENCE:
        return references.find_rows(reference)
    return _rows_of_recipe(side) or references.rows()


def _rows_of_recipe(side: ComparisonSide) -> list[references.Row]:
    recipes = {member.facts.recipe for member in side.members if member.facts.recipe}
    return [row for recipe in sorted(recipes) for row in references.rows_of_recipe(recipe)]


def _check_choice(option: str, word: str, choices: Collection[str]) -> None:
    if word not in choices:
        raise UserError(
            f"{option} {word}",
            "is unknown",
            allowed=", ".join(choices),
            remedy=did_you_mean(word, choices) or None,
        )


def machine_scatter(root: Path, sides: Pair) -> RunVariation | None:
    """Return the run-to-run variation in the history under `root` if the verdict needs it.

    The verdict needs it with fewer than three repeats per side, or when the sides did not
    alternate. The series has the configuration of either side. The candidate's runs are excluded,
    and so are imported bundles, which come from another machine.
    """
    if not all(side.valid_runs for side in sides.each):
        return None
    if min(sides.sizes) >= MIN_REPEATS and not sides.not_interleaved:
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
        and _was_made_here(folder)
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


def _was_made_here(folder: Path) -> bool:
    return not (folder / BUNDLE_FILE).exists()


def _is_one_of(folder: Path, keys: set[str | None]) -> bool:
    with suppress(PacelineError):
        return read_record(folder).key in keys
    return False
