"""A run's report on standard output, in the form that was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from paceline.cli.options import ReportFormat

if TYPE_CHECKING:
    from paceline.report.page import RunReport


def print_report(report: RunReport, form: ReportFormat, header: bool = True) -> None:
    """Print one run as text, JSON (the Result alone), CSV, Markdown or HTML.

    `header` False leaves out the text's first line, which the progress display has shown.
    """
    if form is ReportFormat.text:
        from rich.console import Console

        from paceline.report.text import render_text

        render_text(report, Console(), header=header)
        return
    typer.echo(rendered(report, form), nl=False)


def rendered(report: RunReport, form: ReportFormat) -> str:
    """The report in a form other than text."""
    if form is ReportFormat.json:
        return report.result.model_dump_json(indent=2) + "\n"
    if form is ReportFormat.html:
        from paceline.report.html import render_html

        return render_html(report)
    from paceline.report.tables import metrics_csv, metrics_md

    text = metrics_csv(report.result) if form is ReportFormat.csv else metrics_md(report.result)
    return text if text.endswith("\n") else text + "\n"
