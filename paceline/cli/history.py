"""`paceline runs history`: detect when a recipe became slower or faster."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.options import Html, RunsDir
from paceline.cli.output import TableOptions, WhereOption, emit, select_rows
from paceline.cli.runs import computed_result
from paceline.cli.terminal import echo
from paceline.core.errors import UserError
from paceline.core.units import pluralize
from paceline.files.index import COLUMNS, listing
from paceline.files.run_folder import runs_root
from paceline.runs.comparison import parse_margin
from paceline.runs.history import find_recipe_name, recipe_history
from paceline.runs.history_report import history_document


def history(
    recipe: Annotated[str, typer.Argument(help="Recipe (name or file) whose runs are shown.")],
    metric: Annotated[
        str,
        typer.Option(help="Metric to show, by its name in JSON.", metavar="NAME"),
    ] = "step_time_s",
    margin: Annotated[
        str, typer.Option(help="Changes below this margin are not reported: 1% or 0.01.")
    ] = "1%",
    where: WhereOption = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="DATE", help="Show only runs from this date or time on (UTC), e.g. 2026-11-20."
        ),
    ] = None,
    fail: Annotated[
        bool, typer.Option("--fail-on-findings", help="Exit with 3 if the metric became worse.")
    ] = False,
    html: Html = None,
    runs_dir: RunsDir = None,
    *,
    output: TableOptions,
) -> None:
    """Show all runs of a recipe over time, detect step changes, and list what changed with them.

    Only runs with the same content key on the same kind of machine are compared; several such
    series are shown separately. A change is reported if it is at least 1% (--margin), has two runs
    on either side, and is unlikely to be chance: at most 1 in 100 stable series with normal
    variation shows a false change.

    Examples:

      paceline runs history tiny-llama

      paceline runs history llama31-8b --metric mfu --where device=H100-SXM --since 2026-11-01

      paceline runs history tiny-llama --fail-on-findings        for a nightly job
    """
    limit = parse_margin(margin)
    name, folders = _folders(recipe, where, since, runs_dir)
    timeline = recipe_history(name, folders, metric, limit)
    emit(history_document(timeline), output.output_format, page=html)
    if not timeline.series:
        raise typer.Exit(4)
    raise typer.Exit(3 if fail and timeline.slowdowns else 0)


def _folders(
    recipe: str, where: list[str] | None, since: str | None, runs_dir: Path | None
) -> tuple[str, list[Path]]:
    """Return the recipe's name and the folders of its selected runs."""
    root, begin = runs_root(runs_dir), _parse_date(since)
    runs = listing(root, computed_result)
    for problem in runs.left_out:
        echo(f"left out: {problem}", err=True)
    for contradiction in runs.contradictions:
        echo(f"note: {contradiction}", err=True)
    name = find_recipe_name(recipe, [row["recipe"] for row in runs.rows if row["recipe"]])
    of_recipe = [row for row in runs.rows if row["recipe"] == name]
    rows: list[Any] = [
        row for row in select_rows(of_recipe, where, COLUMNS) if _is_since(row, begin)
    ]
    if not rows:
        raise UserError(
            f"recipe {name!r}",
            f"none of its {pluralize(len(of_recipe), 'run')} is selected",
            remedy="widen --where or --since",
        )
    return name, [root / row["run"] for row in rows]


def _parse_date(since: str | None) -> Any:
    if since is None:
        return None
    try:
        date = datetime.fromisoformat(since)
    except ValueError as error:
        raise UserError(
            f"--since {since}", "is not a date", allowed="2026-11-20 or 2026-11-20T14:00"
        ) from error
    return date if date.tzinfo else date.replace(tzinfo=UTC)


def _is_since(row: Any, begin: Any) -> bool:
    if begin is None:
        return True
    try:
        created_at = datetime.fromisoformat(row["created"])
    except ValueError:
        return False
    return (created_at if created_at.tzinfo else created_at.replace(tzinfo=UTC)) >= begin
