"""`paceline runs goodput`: show how the wall time of a training was spent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import ChartsFolder, Html, RunsDir
from paceline.cli.output import TableOptions, emit
from paceline.core.errors import UserError
from paceline.files.run_folder import RUN_FILE, find_runs, runs_root
from paceline.runs.goodput.attempt import Attempt, attempts_of_log, attempts_of_run
from paceline.runs.goodput.ledger import ledger_of, one_training
from paceline.runs.goodput.report import goodput_document


def goodput(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|LOG...",
            help="Attempts of one training: runs, or logs in chronological order.",
        ),
    ],
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Steps of the whole training; default: as configured in the runs."
        ),
    ] = None,
    html: Html = None,
    charts: ChartsFolder = None,
    runs_dir: RunsDir = None,
    *,
    output: TableOptions,
) -> None:
    """Show how the wall time of a training was spent over its restarts, and the days left.

    Categories: productive steps, slow steps, checkpoints, steps lost to a restart, compilation,
    initialisation, queue, evaluation, gaps between attempts. A log that contains restarts counts
    as several attempts. In logs, the time outside steps is unknown (docs/reference/diagnosis.md).

    Examples:

      paceline runs goodput first second third --html goodput.html

      paceline runs goodput pretrain.log --steps 500000 --json
    """
    root = runs_root(runs_dir)
    attempts = one_training([_attempts(path) for path in _places(root, names)])
    ledger = ledger_of(attempts, steps)
    emit(goodput_document(ledger), output.output_format, page=html, charts=charts)


def _places(root: Path, names: list[str]) -> list[Path]:
    """Return the logs and run folders of the names; raise UserError for duplicates."""
    places: dict[Path, Path] = {}
    for name in names:
        path = Path(name)
        direct = path.is_file() or (path / RUN_FILE).is_file()
        for place in [path] if direct else find_runs(root, name):
            if place.resolve() in places:
                raise UserError(
                    f"goodput {name}",
                    f"lists {place.name} twice",
                    allowed="each attempt once",
                    remedy="remove it; its time would count twice",
                )
            places[place.resolve()] = place
    return [*places.values()]


def _attempts(path: Path) -> list[Attempt]:
    return attempts_of_log(path) if path.is_file() else attempts_of_run(path)
