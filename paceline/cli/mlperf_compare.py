"""`paceline mlperf compare`: compare scores with published results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import Json
from paceline.cli.output import TableForm, TableFormat, emit, emit_files
from paceline.cli.terminal import echo
from paceline.core.errors import EXIT_INCOMPLETE, UserError
from paceline.mlperf.compare.comparison import ScoreComparison
from paceline.mlperf.compare.comparison import compare as compare_scores
from paceline.mlperf.compare.report import scores_document, time_to_train

FORMATS = (".svg", ".png", ".html")


def compare(
    places: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of runs, or files with the JSON output of `mlperf score`.",
            metavar="DIR|SCORE.json...",
        ),
    ],
    published: Annotated[
        Path | None,
        typer.Option(help="CSV of published results; default: the included ones."),
    ] = None,
    ruleset: Annotated[
        str | None,
        typer.Option(
            help="MLPerf Training round; default: as in the logs, else in their path "
            "(v5.1), else 5.1.0.",
            show_default=False,
        ),
    ] = None,
    gpus: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Number of accelerators if the logs do not state it; once per DIR."
        ),
    ] = None,
    accelerator: Annotated[
        str | None, typer.Option(help="Type of accelerator if the logs do not state it.")
    ] = None,
    plot: Annotated[
        list[Path] | None,
        typer.Option(help="Plot the time to train over accelerators: .svg, .png or .html."),
    ] = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Compare scores with published results on the same number and type of accelerators.

    Two or more sets of runs of one benchmark also give the strong-scaling efficiency, split into
    the extra samples that the larger batch needs and the loss of throughput. Tiny variants are
    rejected.

    Examples:

      paceline mlperf compare results/box/llama31_8b --plot time-to-train.svg

      paceline mlperf compare eight sixteen --gpus 8 --gpus 16 --accelerator H100 --json

    Exit code 4 if no set of runs has a score.
    """
    for path in plot or []:
        if path.suffix not in FORMATS:
            raise UserError(
                f"--plot {path}", "is not a supported plot format", allowed=", ".join(FORMATS)
            )
    comparison = compare_scores(
        places, published, ruleset=ruleset, num_devices=gpus or [], accelerator=accelerator
    )
    emit(scores_document(comparison), TableFormat.json if as_json else form)
    for path in plot or []:
        _write(comparison, path)
    if all(score.score_minutes is None for score in comparison.scores):
        raise typer.Exit(EXIT_INCOMPLETE)


def _write(comparison: ScoreComparison, path: Path) -> None:
    """Write the page or the chart, depending on the suffix."""
    if path.suffix == ".html":
        emit_files(scores_document(comparison), page=path)
        return
    from paceline.report.charts import save_chart  # Altair takes long to import.
    from paceline.report.theme import EXPORT

    save_chart(time_to_train(comparison, EXPORT), path)
    echo(f"chart: {path}", err=True)
