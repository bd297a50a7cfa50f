"""`paceline mlperf compare`: scores beside published results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import Json
from paceline.cli.output import (
    OutputColumn,
    TableForm,
    TableFormat,
    emit_json,
    emit_table,
    print_sentences,
)
from paceline.cli.terminal import echo
from paceline.core.errors import EXIT_INCOMPLETE, UserError
from paceline.core.text import one_line
from paceline.files.documents import write_text
from paceline.mlperf.compare.comparison import ScoreComparison
from paceline.mlperf.compare.comparison import compare as compare_scores
from paceline.mlperf.compare.page import (
    answers,
    compared_html,
    compared_lines,
    compared_rows,
    time_to_train,
)
from paceline.report.charts import save_chart
from paceline.report.theme import EXPORT

FORMATS = (".svg", ".png", ".html")


def compare(
    places: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of runs, or scores that `mlperf score --json` printed.",
            metavar="DIR|SCORE.json...",
        ),
    ],
    published: Annotated[
        Path | None,
        typer.Option(help="CSV of published results; default those that come with Paceline."),
    ] = None,
    ruleset: Annotated[
        str | None,
        typer.Option(
            help="Rules of which round; default as in `mlperf score`.", show_default=False
        ),
    ] = None,
    gpus: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Accelerators, where the logs do not say; once for each DIR."),
    ] = None,
    accelerator: Annotated[
        str | None, typer.Option(help="The kind of accelerator, where the logs do not say.")
    ] = None,
    plot: Annotated[
        list[Path] | None,
        typer.Option(help="Write time to train over accelerators here: .svg, .png or .html."),
    ] = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Hold scores against published results on as many accelerators of the same kind.

    Two or more sets of runs of one benchmark give the efficiency of strong scaling as well, split
    into what the larger batch needs in samples and what throughput loses. Small siblings are
    refused.

    Examples:

      paceline mlperf compare results/box/llama31_8b --plot time-to-train.svg

      paceline mlperf compare eight sixteen --gpus 8 --gpus 16 --accelerator H100 --json

    Exit code 4 when no set of runs has a score.
    """
    for path in plot or []:
        if path.suffix not in FORMATS:
            raise UserError(f"--plot {path}", "is no form of a plot", allowed=", ".join(FORMATS))
    comparison = compare_scores(
        places, published, ruleset=ruleset, num_devices=gpus or [], accelerator=accelerator
    )
    _emit(comparison, TableFormat.json if as_json else form)
    for path in plot or []:
        _write(comparison, path)
    if all(score.score_minutes is None for score in comparison.own):
        raise typer.Exit(EXIT_INCOMPLETE)


def _write(comparison: ScoreComparison, path: Path) -> None:
    if path.suffix == ".html":
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, compared_html(comparison))
    else:
        save_chart(time_to_train(comparison, EXPORT), path)
    echo(f"written: {path}", err=True)


def _emit(comparison: ScoreComparison, form: TableFormat) -> None:
    if form is TableFormat.json:
        emit_json(comparison.model_dump(mode="json"))
        return
    columns = [
        OutputColumn("system", "system", one_line),
        OutputColumn("official", "official", lambda value: "yes" if value else "no"),
        OutputColumn("num_devices", "accelerators", "{:,}".format, "right"),
        OutputColumn("accelerator", "kind", one_line),
        OutputColumn("score_minutes", "minutes", "{:.4f}".format, "right"),
        OutputColumn("time_ratio", "ratio", "{:.3f}".format, "right"),
        OutputColumn("global_batch", "batch", "{:,}".format, "right"),
        OutputColumn("mean_samples_to_target", "samples", "{:,.0f}".format, "right"),
    ]
    if form is TableFormat.csv:
        columns += [OutputColumn(name, name) for name in ("benchmark", "ruleset", "label")]
    print_sentences(answers(comparison), form)
    emit_table(compared_rows(comparison), columns, form)
    if form in (TableFormat.text, TableFormat.md):
        echo("\n" + "\n".join(compared_lines(comparison)))
