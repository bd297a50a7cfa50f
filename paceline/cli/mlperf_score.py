"""`paceline mlperf score` and `check`: score logs and check them against the rules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import Json
from paceline.cli.output import TableForm, TableFormat, emit_json, emit_table
from paceline.cli.terminal import echo
from paceline.core.errors import EXIT_GATE_FAILED, EXIT_INCOMPLETE, EXIT_OK
from paceline.core.text import one_line
from paceline.core.units import significant
from paceline.mlperf.check.findings import check_lines, check_rows
from paceline.mlperf.score.run_set import score as score_runs
from paceline.mlperf.score.score import Score
from paceline.mlperf.score.text import score_lines, score_row
from paceline.mlperf.submission.package_check import check as check_place
from paceline.report.document import Column

EXIT_CODES = {
    "ok": EXIT_OK,
    "incomplete": EXIT_INCOMPLETE,
    "no-reference": EXIT_INCOMPLETE,
    "invalid": EXIT_GATE_FAILED,
}


def score(
    place: Annotated[
        Path, typer.Argument(help="Folder with the logs of one set of runs.", metavar="DIR")
    ],
    ruleset: Annotated[
        str | None,
        typer.Option(
            help="MLPerf Training round whose rules apply; default: the round in the logs, else "
            "in the path (v5.1), else 5.1.0.",
            show_default=False,
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Number of accelerators if the logs do not state it.")
    ] = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Score a set of MLPerf runs: run times, olympic mean, convergence test and scaling.

    Reads result_*.txt of a submission, <datestamp>_<i>.log of a launch script, or any .log, .txt
    and .out files with :::MLLOG lines, plain or gzipped. Nothing is written or deleted.

    Examples:

      paceline mlperf score results/gb300_n18/llama31_8b

      paceline mlperf score LOGDIR --ruleset 5.1.0 --json

    The score is in minutes; lower is better. Exit codes: 0 with a score, also if the rules drop a
    failed run; 3 if the rules do not allow a score; 4 if runs or reference points are missing.
    """
    result = score_runs(place, ruleset, gpus)
    _emit(result, TableFormat.json if as_json else form)
    if EXIT_CODES[result.status]:
        raise typer.Exit(EXIT_CODES[result.status])


def _emit(result: Score, form: TableFormat) -> None:
    if form is TableFormat.json:
        emit_json(result.model_dump(mode="json"))
        return
    rows = [score_row(result, run) for run in result.runs]
    if form is TableFormat.csv:
        emit_table(rows, [Column(name, name) for name in rows[0]], form)
        return
    echo("\n".join(score_lines(result)) + "\n")
    emit_table(rows, _columns(), form)


def _columns() -> list[Column]:
    return [
        Column("file", "run", one_line),
        Column("status", "status"),
        Column("part", "part"),
        Column("minutes", "minutes", "{:.4f}".format, "right"),
        Column("samples_to_target", "samples", "{:,}".format, "right"),
        Column("median_samples_per_s", "samples/s", lambda v: significant(v, 5), "right"),
        Column("initialization_minutes", "init min", "{:.3f}".format, "right"),
        Column("global_batch", "batch", "{:,}".format, "right"),
        Column("seeds", "seeds"),
        Column("reason", "reason", one_line, wraps=True),
    ]


def check(
    place: Annotated[
        Path,
        typer.Argument(
            help="Log, folder with the logs of runs, system description or submission folder.",
            metavar="PATH",
        ),
    ],
    ruleset: Annotated[
        str | None,
        typer.Option(
            help="MLPerf Training round whose rules apply; default: the round in the logs, else "
            "in the path (v5.1), else 5.1.0.",
            show_default=False,
        ),
    ] = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Run the official MLPerf checkers on logs, a system description or a submission.

    Each message is shown with the line of the file that it is about.

    A folder with systems/ and results/ is a submission: its descriptions, number of runs, seeds
    and convergence are checked too. The checkers run on copies in separate processes; your files
    are not changed. They are part of mlperf-logging: pip install 'paceline\\[mlperf]'.

    Examples:

      paceline mlperf check result_0.txt

      paceline mlperf check LOGDIR --ruleset 5.1.0 --json

      paceline mlperf check submission/MyOrganization

    Exit codes: 0 all logs pass; 3 one fails; 4 the checker crashed on one.
    """
    result = check_place(place, ruleset)
    form = TableFormat.json if as_json else form
    if form is TableFormat.json:
        emit_json(result.model_dump(mode="json"))
    elif form is TableFormat.text:
        echo("\n".join(check_lines(result)))
    else:
        names = ("file", "status", "level", "line", "key", "message")
        emit_table(check_rows(result), [Column(name, name) for name in names], form)
    if result.status != "passed":
        raise typer.Exit(EXIT_GATE_FAILED if result.status == "failed" else EXIT_INCOMPLETE)
