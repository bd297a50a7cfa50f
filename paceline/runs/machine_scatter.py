"""What the history of kept runs says of how far runs like those of a comparison lie apart."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from paceline.compare.scatter import RunScatter
from paceline.compare.sides import Pair
from paceline.compare.significance import MIN_REPEATS
from paceline.core.errors import PacelineError
from paceline.files.run_folder import read_record, run_folders
from paceline.runs.bundles.writing import BUNDLE_FILE
from paceline.runs.history import recipe_history


def machine_scatter(root: Path, sides: Pair) -> RunScatter | None:
    """What the history under `root` says of runs like these, where a verdict needs it.

    That is with fewer than three repeats a side, or all of one side before all of the other. The
    candidate's own runs are left out, however they are named, and so are imported bundles, which
    tell of another machine; the series is one of either side's configuration.
    """
    if not all(side.used for side in sides.each):
        return None
    if min(sides.sizes) >= MIN_REPEATS and not sides.apart:
        return None
    judged = {Path(member.place).resolve() for member in sides.candidate.used if member.place}
    places = [m.place for side in sides.each for m in side.used if m.place and m.facts.recipe]
    keys = {read_record(Path(place)).key for place in places} - {None}
    recipes = {member.facts.recipe for side in sides.each for member in side.used}
    folders = [
        folder
        for folder in run_folders(root)
        if folder.resolve() not in judged and _was_made_here(folder) and _is_one_of(folder, keys)
    ]
    series = [
        series
        for recipe in sorted(filter(None, recipes))
        for series in (recipe_history(recipe, folders).series if folders else ())
        if series.scatter
    ]
    known = max(series, key=lambda s: s.n_runs, default=None)
    return known.scatter if known else None


def _was_made_here(folder: Path) -> bool:
    return not (folder / BUNDLE_FILE).exists()


def _is_one_of(folder: Path, keys: set[str | None]) -> bool:
    with suppress(PacelineError):
        return read_record(folder).key in keys
    return False
