"""`paceline compare`: slower, faster, the same, or undecided."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import Json, RunsDir
from paceline.cli.output import OutputColumn, TableFormat, emit_table, write_page
from paceline.cli.terminal import echo
from paceline.compare.judgement import Comparison
from paceline.core.errors import UserError
from paceline.files.run_folder import runs_root
from paceline.runs.comparison import Gate, compare_runs, compare_with_reference, parse_margin
from paceline.runs.comparison_junit import junit_xml
from paceline.runs.comparison_text import (
    HEAD,
    comparison_md,
    finding_lines,
    headline,
    metric_cells,
    shown,
    summary_lines,
)

VERDICT_EXIT = {"same": 0, "faster": 0, "better": 0, "undecided": 4}
"""Exit code by verdict; every other verdict fails the gate (3)."""


class CompareFormat(StrEnum):
    """Forms in which a comparison is printed."""

    text = "text"
    json = "json"
    csv = "csv"
    md = "md"
    junit = "junit"


def compare(
    first: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="The baseline: a run, a group of repeats, a tag, a result file, or several by "
            "commas. With --against it is what is judged.",
        ),
    ],
    second: Annotated[
        str | None, typer.Argument(metavar="B", help="What is judged, named in the same ways.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="REFERENCE",
            help="Judge A against a published row, table or source; `reference` takes the row "
            "nearest to the run.",
        ),
    ] = None,
    margin: Annotated[
        str, typer.Option(help="Smaller differences do not matter: 1% or 0.01.")
    ] = "1%",
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="A setting that may differ, e.g. dtype. Repeatable."),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Metric that the verdict depends on. Repeatable; default step_time_s.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the page with its charts.")
    ] = None,
    runs_dir: RunsDir = None,
    form: Annotated[
        CompareFormat,
        typer.Option("--format", help="md suits a pull request, junit a CI server."),
    ] = CompareFormat.text,
    as_json: Json = False,
) -> None:
    """Say whether B is slower than A, faster, the same, or whether that is undecided.

    From three repeats a side on it is a test over repeats (Welch's t on the runs' medians); fewer
    are undecided unless the history of the configuration tells how far its runs lie apart. Ratios
    are B over A, so of a step time above 1 is slower; with --against they are A over the reference.

    Exit code 0: same or faster. 3: slower, not comparable or invalid. 4: undecided, and it says how
    many more repeats it takes.

    Examples:

      paceline compare before after --margin 1%

      paceline compare last --against reference

      paceline compare old-driver new-driver --format junit > compare.xml
    """
    if (second is None) == (against is None):
        raise UserError("compare", "takes either B or --against", remedy="name the other side once")
    root = runs_root(runs_dir)
    gate = Gate(parse_margin(margin), tuple(allow or ()), tuple(metric or ()))
    if against is not None:
        comparison = compare_with_reference(root, first, against, gate)
    else:
        comparison = compare_runs(root, first, second or "", gate)
    _print(comparison, CompareFormat.json if as_json else form)
    if html:
        # Altair below it takes as long to import as the rest of the verb.
        from paceline.runs.comparison_page import comparison_html

        write_page(html, comparison_html(comparison))
    raise typer.Exit(VERDICT_EXIT.get(comparison.verdict, 3))


def _print(comparison: Comparison, form: CompareFormat) -> None:
    if form is CompareFormat.json:
        echo(comparison.model_dump_json(indent=2))
    elif form is CompareFormat.junit:
        echo('<?xml version="1.0" encoding="UTF-8"?>')
        echo(junit_xml(comparison), nl=False)
    elif form is CompareFormat.md:
        echo(comparison_md(comparison), nl=False)
    elif form is CompareFormat.csv:
        echo(headline(comparison), err=True)
        _print_metrics(comparison, form)
    else:
        echo(headline(comparison))
        for line in summary_lines(comparison):
            echo(f"  {line}")
        if comparison.metrics:
            echo()
            _print_metrics(comparison, form)
            echo("* the verdict depends on it")
        for line in finding_lines(comparison):
            echo(f"  {line}")


def _print_metrics(comparison: Comparison, form: CompareFormat) -> None:
    if form is CompareFormat.csv:
        names = (
            "metric",
            "unit",
            "primary",
            "baseline",
            "candidate",
            "n_baseline",
            "n_candidate",
            "ratio",
            "low",
            "high",
            "p",
            "p_corrected",
            "verdict",
            "note",
        )
        rows = [
            {
                **metric.model_dump(),
                "baseline": metric.baseline.value,
                "candidate": metric.candidate.value,
                "n_baseline": metric.baseline.n,
                "n_candidate": metric.candidate.n,
            }
            for metric in comparison.metrics
        ]
        emit_table(rows, [OutputColumn(name, name) for name in names], TableFormat.csv)
        return
    table = [dict(zip(HEAD, metric_cells(metric), strict=True)) for metric in shown(comparison)]
    columns = [
        OutputColumn(name, name, justify="left" if name in ("metric", "verdict") else "right")
        for name in HEAD
    ]
    emit_table(table, columns, TableFormat.text)
