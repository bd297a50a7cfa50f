"""`paceline runs list`, `show`, `report` and `index`: stored runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import Json, ReportForm, ReportFormat, RunName, RunsDir
from paceline.cli.output import (
    TableForm,
    TableFormat,
    WhereOption,
    emit,
    emit_json,
    emit_table,
    render,
    select_rows,
)
from paceline.cli.terminal import echo
from paceline.core.errors import UserError
from paceline.core.result import Result
from paceline.core.run_report import RunReport
from paceline.core.units import percent, significant
from paceline.estimate.measured_step import with_expected_step_time
from paceline.files.documents import write_output, write_text
from paceline.files.index import COLUMNS, Index, listing
from paceline.files.locks import exclusive
from paceline.files.run_folder import REPORT_FILE, find_run, runs_root
from paceline.report.document import Column
from paceline.report.run_document import run_document
from paceline.runs.outcome import evaluate


def list_runs(
    runs_dir: RunsDir = None,
    where: WhereOption = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """List runs, oldest first, with their status and key figures.

    A run whose controller was killed is shown as `incomplete`, with the steps and figures that it
    has. Unreadable folders are reported on standard error. `--where group=NAME` lists the repeats
    of one group.

    Example: paceline runs list --where status=ok --where recipe=tiny-llama --format csv
    """
    root = runs_root(runs_dir)
    run_list = listing(root, computed_result)
    rows = select_rows(run_list.rows, where, COLUMNS, "tell")
    if run_list.fault:
        echo(f"note: all folders were read again: {run_list.fault}", err=True)
    for problem in run_list.left_out:
        echo(f"left out: {problem}", err=True)
    for contradiction in run_list.contradictions:
        echo(f"note: {contradiction}", err=True)
    form = TableFormat.json if as_json else form
    if not (run_list.rows or run_list.left_out) and form is TableFormat.text:
        echo(f"no runs in {root}; start one with `paceline run tiny-llama`", err=True)
        return
    emit_table(rows, _listed_columns(form, any(row["group"] for row in rows)), form)


def computed_result(folder: Path) -> Result:
    """Return the result of a run, computed from its raw files."""
    return evaluate(folder).result


def _listed_columns(form: TableFormat, grouped: bool) -> list[Column]:
    columns = [
        Column("run", "run"),
        Column("status", "status"),
        Column("tokens_per_s", "tokens/s", lambda v: f"{v:,.0f}", "right"),
        Column("step_time_s", "step s", lambda v: significant(v, 4), "right"),
        Column("mfu", "MFU", percent, "right"),
        Column("achievable_fraction", "of achievable", percent, "right"),
        Column("steps", "steps", str, "right"),
    ]
    if form is not TableFormat.csv:
        return [*columns, Column("group", "group")] if grouped else columns
    names = ("created", "recipe", "tag", "group", "device", "devices", "layout", "dtype", "key")
    return [*columns, *(Column(name, name) for name in names)]


def show(
    run: RunName = "last",
    runs_dir: RunsDir = None,
    form: ReportForm = ReportFormat.text,
    as_json: Json = False,
) -> None:
    """Show one run: status, figures, and where its files are.

    The figures are recomputed from the raw files, so this works during a run and after it was
    killed.

    Example: paceline runs show last --json
    """
    report = evaluate(find_run(runs_root(runs_dir), run))
    form = ReportFormat.json if as_json else form
    if form is ReportFormat.html:
        report = with_expected_step_time(report)
    emit(run_document(report), form)


def report(
    run: RunName = "last",
    runs_dir: RunsDir = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Output file; default: report.html in the run folder."),
    ] = None,
    form: ReportForm = ReportFormat.html,
    charts: Annotated[
        str | None,
        typer.Option(
            help="Also save all charts in these formats: svg, png or svg,png.", metavar="FORMATS"
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the paths of the written files as JSON: {report, charts}."
        ),
    ] = False,
    card: Annotated[
        Path | None,
        typer.Option(
            help="Also write a share card with the main figures: a PNG of 1200x630 pixels.",
            metavar="FILE.png",
        ),
    ] = None,
) -> None:
    """Write the report of a run to a file, and its charts as images.

    The HTML report is one file that opens without a network. `--output -` prints it instead.

    Example: paceline runs report last --charts svg,png
    """
    printed = str(output) == "-" or (output is None and form is ReportFormat.text)
    if printed and as_json:
        raise UserError(
            "--json",
            "lists written files, but this report is printed",
            remedy="name a file with --output",
        )
    folder = find_run(runs_root(runs_dir), run)
    content = evaluate(folder)
    if charts or form is ReportFormat.html:
        content = with_expected_step_time(content)
    pictures = [str(path) for path in _saved_charts(content, folder, charts)] if charts else []
    if card:
        from paceline.report.card import save_card  # vl-convert takes long to import.

        pictures.append(str(save_card(content, card)))
    if not as_json:
        for picture in pictures:
            echo(picture, err=printed)
    if printed:
        emit(run_document(content), form)
        return
    path = output or folder / (REPORT_FILE if form is ReportFormat.html else f"report.{form}")
    if output:
        write_output(path, render(run_document(content), form))
    else:  # A file in the run folder names the folder without its place.
        write_text(path, render(run_document(replace(content, folder="")), form))
    if as_json:
        emit_json({"report": str(path), "charts": pictures})
    else:
        echo(str(path))


def _saved_charts(content: RunReport, folder: Path, charts: str) -> list[Path]:
    # Altair below it takes as long to import as the rest of the verb.
    from paceline.report.charts import save_charts

    formats = [name.strip().lower() for name in charts.split(",") if name.strip()]
    wrong = [name for name in formats if name not in ("svg", "png")]
    if wrong:
        raise UserError(f"--charts {charts}", f"{wrong[0]} is not a format", allowed="svg, png")
    target = folder / "charts"
    if target.is_symlink():
        raise UserError(str(target), "is a link", remedy="remove it")
    return save_charts(content, target, formats)


def index(
    runs_dir: RunsDir = None, form: TableForm = TableFormat.text, as_json: Json = False
) -> None:
    """Rebuild the index of runs from all run folders.

    Example: paceline runs index --runs-dir /shared/runs
    """
    root = runs_root(runs_dir)
    with exclusive(root, "index", wait=True):
        count, unreadable = Index.open(root, rebuild=True).rebuild(computed_result)
    for problem in unreadable:
        echo(f"left out: {problem}", err=True)
    row = {"root": str(root), "runs": count, "unreadable": len(unreadable)}
    columns = [
        Column("root", "runs in"),
        Column("runs", "indexed"),
        Column("unreadable", "left out"),
    ]
    document = {"runs": count, "unreadable": unreadable}
    emit_table([row], columns, TableFormat.json if as_json else form, document=document)
