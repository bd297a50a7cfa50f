"""`paceline report`: write a run's report to files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import ReportFormat, RunName, RunsDir


def report(
    run: RunName = "last",
    runs_dir: RunsDir = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="File to write; default report.html in the run folder."
        ),
    ] = None,
    form: Annotated[ReportFormat, typer.Option("--format")] = ReportFormat.html,
    charts: Annotated[
        str | None,
        typer.Option(help="Also save every chart: svg, png or svg,png.", metavar="FORMATS"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the written files as JSON: {report, charts}.")
    ] = False,
) -> None:
    """Write the report of one run as a file, and its charts as pictures.

    The HTML is one file that opens without a network. `--output -` prints it instead.

    Example: paceline report last --charts svg,png
    """
    from paceline.cli.output import emit_json
    from paceline.cli.printing import print_report, rendered
    from paceline.core.errors import UserError
    from paceline.files.run_folder import REPORT_FILE, find_run, runs_root, write_text
    from paceline.runs.outcome import evaluate

    printed = str(output) == "-" or (output is None and form is ReportFormat.text)
    if printed and as_json:
        raise UserError("--json", "tells which files were written, and this report is printed",
                        remedy="name a file with --output")  # fmt: skip
    folder = find_run(runs_root(runs_dir), run)
    content = evaluate(folder)
    if charts or form is ReportFormat.html:
        from paceline.estimate.explanation import explained

        content = explained(content)
    pictures = [str(path) for path in _saved_charts(content, folder, charts)] if charts else []
    if not as_json:
        for picture in pictures:
            typer.echo(picture, err=printed)
    if printed:
        print_report(content, form)
        return
    path = output or folder / (REPORT_FILE if form is ReportFormat.html else f"report.{form}")
    write_text(path, _as_text(content) if form is ReportFormat.text else rendered(content, form))
    if as_json:
        emit_json({"report": str(path), "charts": pictures})
    else:
        typer.echo(str(path))


def _saved_charts(content: object, folder: Path, charts: str) -> list[Path]:
    from paceline.core.errors import UserError
    from paceline.report.charts import save_charts
    from paceline.report.page import RunReport

    assert isinstance(content, RunReport)
    formats = [name.strip().lower() for name in charts.split(",") if name.strip()]
    wrong = [name for name in formats if name not in ("svg", "png")]
    if wrong:
        raise UserError(f"--charts {charts}", f"{wrong[0]} is not a format", allowed="svg, png")
    return save_charts(content, folder / "charts", formats)


def _as_text(content: object) -> str:
    from io import StringIO

    from rich.console import Console

    from paceline.report.page import RunReport
    from paceline.report.text import render_text

    assert isinstance(content, RunReport)
    buffer = StringIO()
    render_text(content, Console(file=buffer, width=100))
    return buffer.getvalue()
