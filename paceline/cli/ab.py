"""`paceline ab`: compare two commands in turns."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.options import Json, Junit, Markdown, RunsDir
from paceline.cli.output import TableFormat, emit, render
from paceline.cli.terminal import echo
from paceline.compare.judgement import LIKELY
from paceline.files.documents import write_output
from paceline.files.run_folder import runs_root
from paceline.runs.command_pairs import (
    OutputFigure,
    PairsRequest,
    commands_document,
    compare_commands,
)
from paceline.runs.comparison import parse_margin
from paceline.runs.comparison_report import commands_junit_xml

EXIT_CODES = {
    **dict.fromkeys(("same", "faster", "better"), 0),
    **dict.fromkeys(("undecided", *LIKELY), 4),
}
"""Exit code by verdict, as for `compare`; all other verdicts exit with 3."""


def ab(
    a: Annotated[str, typer.Argument(metavar="A", help="Command that is the baseline, quoted.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Command to judge, quoted.")],
    metric: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            help="What decides: `seconds` (wall time), `json:PATH` (value of a JSON output, e.g. "
            "json:train.step_time), or a regular expression whose first group is the number. The "
            "last match counts.",
        ),
    ] = "seconds",
    higher_is_better: Annotated[
        bool,
        typer.Option("--higher-is-better", help="A higher value is better, e.g. tokens/s."),
    ] = False,
    must_match: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="Value that must be equal in A and B, e.g. the final loss. Repeatable.",
        ),
    ] = None,
    tolerance: Annotated[
        str, typer.Option(help="Largest relative difference of --must-match: 1% or 0.01.")
    ] = "1%",
    max_pairs: Annotated[int, typer.Option(min=3, max=1000, help="Maximum number of pairs.")] = 16,
    margin: Annotated[
        str, typer.Option(help="Differences below this margin do not count: 1% or 0.01.")
    ] = "1%",
    shell: Annotated[
        bool, typer.Option("--shell", help="Run the commands by `bash -c`, for pipes and &&.")
    ] = False,
    markdown: Markdown = None,
    junit: Junit = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Run two commands in turns until it is decided which one is better.

    The order is A B, B A, A B, and so on. After 3, 4, 5, 6, 8, 10, ... pairs a sequential test
    decides whether to stop. Equal commands are called different in at most 5% of comparisons, and
    likely different in 2% more.
    Outputs and results are kept in the folder `ab` of the runs. Ctrl-C ends the running command
    and its children.

    Exit codes, as for `compare`: 0 same, faster or better; 3 slower, worse, a failed command, or
    values that do not match; 4 undecided or likely.

    Examples:

      paceline ab "python train.py" "python train.py --compile" --metric 'step_time: ([0-9.]+)'

      paceline ab ./old.sh ./new.sh --metric json:tokens_per_s --higher-is-better --json
    """
    request = PairsRequest(
        commands=(a, b),
        metric=OutputFigure(metric),
        must_match=tuple(map(OutputFigure, must_match or ())),
        tolerance=parse_margin(tolerance, "--tolerance"),
        higher_is_better=higher_is_better,
        max_pairs=max_pairs,
        margin=parse_margin(margin),
        shell=shell,
    )
    result = compare_commands(
        request, runs_root(runs_dir), lambda line: echo(f"  {line}", err=True)
    )
    document = commands_document(result)
    if markdown is not None:
        write_output(markdown, render(document, TableFormat.md))
    if junit is not None:
        write_output(junit, commands_junit_xml(result))
    emit(document, TableFormat.json if as_json else TableFormat.text)
    raise typer.Exit(EXIT_CODES.get(result.verdict, 3))
