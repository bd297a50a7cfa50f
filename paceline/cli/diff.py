"""`paceline runs diff`: list the differences between two runs."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import Json, RunsDir
from paceline.cli.output import TableForm, TableFormat, emit_table
from paceline.cli.terminal import echo
from paceline.core.errors import EXIT_GATE_FAILED
from paceline.core.run_report import RunReport
from paceline.files.archive import is_archive
from paceline.files.run_folder import find_run, runs_root
from paceline.report.document import Column
from paceline.runs.bundles.verification import open_bundle
from paceline.runs.difference import RunDiff, run_diff
from paceline.runs.outcome import evaluate

MAX_SHOWN = 8
"""Items that one run alone recorded that the text names."""
LONGEST_CELL = 60


def diff(
    first: Annotated[
        str, typer.Argument(metavar="A", help="Run (folder, prefix or tag) or bundle file.")
    ],
    second: Annotated[
        str, typer.Argument(metavar="B", help="Second run or bundle, given in the same way.")
    ],
    fail_on_findings: Annotated[
        bool, typer.Option(help="Exit with 3 if anything differs.")
    ] = False,
    runs_dir: RunsDir = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """List the differences between two runs, the most important first.

    First come differences in the work (model, batch, layout, data type), then settings, inputs (by
    digest, not by path), the program, and the machine: container, driver, CUDA, torch, clocks,
    power limits, environment variables. `paceline compare` tests whether the speed differs.

    Examples:

      paceline runs diff baseline last

      paceline runs diff vendor.bundle.tar.gz last --json
    """
    with ExitStack() as stack:
        reports = [_report(stack, name, runs_root(runs_dir)) for name in (first, second)]
        difference = run_diff(reports[0], reports[1])
    form = TableFormat.json if as_json else form
    rows = [part.model_dump() for part in difference.differences]
    if rows or form is not TableFormat.text:
        columns = [
            Column("kind", "kind"),
            Column("item", "item"),
            Column("a", "A", _cell),
            Column("b", "B", _cell),
        ]
        emit_table(rows, columns, form, document=difference.model_dump(mode="json"))
    if form is TableFormat.text:
        _print_summary(difference)
    raise typer.Exit(EXIT_GATE_FAILED if rows and fail_on_findings else 0)


def _report(stack: ExitStack, name: str, root: Path) -> RunReport:
    path = Path(name)
    if is_archive(path):
        return evaluate(stack.enter_context(open_bundle(path)).folder)
    return evaluate(find_run(root, name))


def _cell(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= LONGEST_CELL else f"{flat[: LONGEST_CELL - 3]}..."


def _print_summary(difference: RunDiff) -> None:
    if not difference.differences:
        echo("no differences in what both runs recorded")
    once = difference.recorded_once
    if once:
        more = f" and {len(once) - MAX_SHOWN} more" if len(once) > MAX_SHOWN else ""
        echo(f"recorded for one run only: {', '.join(once[:MAX_SHOWN])}{more}", err=True)
