"""`paceline mlperf score` and `check`: score logs and check them against the rules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import Json
from paceline.cli.output import TableForm, TableFormat, emit
from paceline.core.errors import EXIT_GATE_FAILED, EXIT_INCOMPLETE, EXIT_OK
from paceline.mlperf.report import check_document, score_document
from paceline.mlperf.score.run_set import score as score_runs
from paceline.mlperf.submission.package_check import check as check_place

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
            help="MLPerf Training round; default: as in the logs, else in their path "
            "(v5.1), else 5.1.0.",
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
    emit(score_document(result), TableFormat.json if as_json else form)
    if EXIT_CODES[result.status]:
        raise typer.Exit(EXIT_CODES[result.status])


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
            help="MLPerf Training round; default: as in the logs, else in their path "
            "(v5.1), else 5.1.0.",
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
    emit(check_document(result), TableFormat.json if as_json else form)
    if result.status != "passed":
        raise typer.Exit(EXIT_GATE_FAILED if result.status == "failed" else EXIT_INCOMPLETE)
