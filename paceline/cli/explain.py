"""`paceline explain`: why a run is as slow as it is."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.options import ChartsFolder, Html, Json, RunName, RunsDir
from paceline.cli.output import (
    OutputColumn,
    TableForm,
    TableFormat,
    emit_table,
    write_charts,
    write_page,
)
from paceline.cli.terminal import echo
from paceline.explain.answer import explain as explained
from paceline.explain.explanation import Explanation
from paceline.explain.text import evidence_text, explanation_lines, headline
from paceline.files.run_folder import find_run, runs_root


def explain(
    run: RunName,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|reference|estimate",
            help="What it should take: another run, the nearest published row, or the estimate. "
            "Without it a run is held against itself: the time in which its ranks could not work.",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|FILE",
            help="A profile of the same training: a profiled run, or its profile.json. Without it "
            "the run's own, if it has one.",
        ),
    ] = None,
    html: Html = None,
    charts: ChartsFolder = None,
    runs_dir: RunsDir = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Say why a run is slow: causes by their share of the lost time, with evidence and remedies.

    Joins steps, waits, telemetry, settings, surroundings, estimate and the verdicts of scaling
    campaigns. What no cause explains is called so, and a run that is as fast as its baseline gets
    no cause (docs/explain.md).

    Examples:

      paceline explain last

      paceline explain last --against baseline --html why.html

      paceline explain 2026-11 --against estimate --json
    """
    root = runs_root(runs_dir)
    answer = explained(find_run(root, run), against, root, profile)
    form = TableFormat.json if as_json else form
    if form is TableFormat.json:
        echo(answer.model_dump_json(indent=2))
    elif form is TableFormat.text:
        for line in explanation_lines(answer):
            echo(line)
    else:
        _print_table(answer, form)
    # Altair below it takes as long to import as the rest of the verb.
    if html:
        from paceline.explain.page import explanation_html

        write_page(html, explanation_html(answer))
    if charts:
        from paceline.explain.charts import explanation_charts
        from paceline.report.theme import EXPORT

        write_charts(charts, explanation_charts(answer, EXPORT))


def _print_table(answer: Explanation, form: TableFormat) -> None:
    echo(headline(answer), err=True)
    rows = [
        {
            **cause.model_dump(include={"cause", "share", "seconds", "remedy"}),
            "evidence": "; ".join(map(evidence_text, cause.evidence)),
        }
        for cause in answer.causes
    ]
    names = ("cause", "share", "seconds", "evidence", "remedy")
    emit_table(rows, [OutputColumn(name, name) for name in names], form)
