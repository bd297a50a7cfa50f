"""`paceline list`: all runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli.options import Json, RunsDir
from paceline.cli.output import Column, TableForm, TableFormat, Where, emit_table, select_rows

if TYPE_CHECKING:
    from paceline.core.result import Result


def list_runs(
    runs_dir: RunsDir = None,
    where: Where = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """List runs, oldest first, with their status and headline figures.

    A run whose controller was killed shows as `incomplete`, with the steps and figures it has.
    Folders that cannot be read are named on standard error. `--where group=NAME` lists the repeats
    of one group.

    Example: paceline list --where status=ok --where recipe=tiny-llama --format csv
    """
    from paceline.files.index import COLUMNS, listing
    from paceline.files.run_folder import runs_root

    root = runs_root(runs_dir)
    found = listing(root, computed_result)
    rows = select_rows(found.rows, where, COLUMNS)
    if found.fault:
        typer.echo(f"note: every folder was read again: {found.fault}", err=True)
    for problem in found.left_out:
        typer.echo(f"left out: {problem}", err=True)
    form = TableFormat.json if as_json else form
    if not (found.rows or found.left_out) and form is TableFormat.text:
        typer.echo(f"no runs in {root}; start one with `paceline run tiny-llama`", err=True)
        return
    emit_table(rows, _columns(form, any(row["group"] for row in rows)), form)


def computed_result(folder: Path) -> Result:
    """The result of a run, computed from its raw files."""
    from paceline.runs.outcome import evaluate

    return evaluate(folder).result


def _columns(form: TableFormat, grouped: bool) -> list[Column]:
    from paceline.core.units import percent, significant

    shown = [
        Column("run", "run"),
        Column("status", "status"),
        Column("tokens_per_s", "tokens/s", lambda v: f"{v:,.0f}", "right"),
        Column("step_time_s", "step s", lambda v: significant(v, 4), "right"),
        Column("mfu", "MFU", percent, "right"),
        Column("of_achievable", "of achievable", percent, "right"),
        Column("steps", "steps", str, "right"),
    ]
    if form is not TableFormat.csv:
        return [*shown, Column("group", "group")] if grouped else shown
    names = ("created", "recipe", "tag", "group", "device", "devices", "layout", "dtype", "key")
    return [*shown, *(Column(name, name) for name in names)]
