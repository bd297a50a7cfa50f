"""`paceline goodput`: what the wall time of a training went to, over its restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import ChartsFolder, Html, Json, RunsDir
from paceline.cli.output import (
    OutputColumn,
    TableForm,
    TableFormat,
    emit_table,
    print_sentences,
    write_charts,
    write_page,
)
from paceline.cli.terminal import echo
from paceline.core.errors import UserError
from paceline.core.units import all_done, counted, days, percent, seconds, significant
from paceline.files.run_folder import RUN_FILE, find_runs, runs_root
from paceline.runs.goodput.attempt import Attempt, attempts_of_log, attempts_of_run
from paceline.runs.goodput.ledger import ACCOUNTS, GoodputLedger, ledger_of
from paceline.runs.goodput.training import one_training


def goodput(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|LOG...",
            help="The attempts of one training: runs by folder, prefix or tag, or logs of any "
            "framework in their order.",
        ),
    ],
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps of the whole training; default what the runs ask for."),
    ] = None,
    html: Html = None,
    charts: ChartsFolder = None,
    runs_dir: RunsDir = None,
    form: TableForm = TableFormat.text,
    as_json: Json = False,
) -> None:
    """Say what a training's wall time went to over its restarts, and the days to its end.

    Accounts: productive steps, slow ones, checkpoints, steps lost to a restart, compilation,
    initialisation, queue, evaluations, stops between attempts. A log with restarts inside counts
    as several attempts; of logs the time outside steps is not known (docs/goodput.md).

    Examples:

      paceline goodput first second third --html goodput.html

      paceline goodput pretrain.log --steps 500000 --json
    """
    root = runs_root(runs_dir)
    attempts = one_training([_attempts(path) for path in _places(root, names)])
    ledger = ledger_of(attempts, steps)
    form = TableFormat.json if as_json else form
    _print(ledger, form)
    # Altair below it takes as long to import as the rest of the verb.
    if html:
        from paceline.runs.goodput.page import goodput_html

        write_page(html, goodput_html(ledger))
    if charts:
        from paceline.report.theme import EXPORT
        from paceline.runs.goodput.page import goodput_charts

        write_charts(charts, goodput_charts(ledger, EXPORT))


def _print(ledger: GoodputLedger, form: TableFormat) -> None:
    if form is TableFormat.json:
        echo(ledger.model_dump_json(indent=2))
        return
    print_sentences(sentences(ledger), form)
    rows = [
        {
            "account": account,
            "seconds": ledger.seconds[account],
            "share": ledger.seconds[account] / ledger.wall_s,
            **{entry.name: entry.seconds.get(account) for entry in ledger.attempts},
        }
        for account in ACCOUNTS
    ]
    columns = [
        OutputColumn("account", "account", lambda name: str(name).replace("_", " ")),
        OutputColumn("seconds", "time", seconds, "right"),
        OutputColumn("share", "share", percent, "right"),
    ]
    emit_table(rows, columns, form)


def _places(root: Path, names: list[str]) -> list[Path]:
    """The logs and run folders that the names stand for; raises UserError for one named twice."""
    places: dict[Path, Path] = {}
    for name in names:
        path = Path(name)
        direct = path.is_file() or (path / RUN_FILE).is_file()
        for place in [path] if direct else find_runs(root, name):
            if place.resolve() in places:
                raise UserError(
                    f"goodput {name}",
                    f"names {place.name} a second time",
                    allowed="each attempt once",
                    remedy="leave it out: its time would count twice",
                )
            places[place.resolve()] = place
    return [*places.values()]


def _attempts(path: Path) -> list[Attempt]:
    return attempts_of_log(path) if path.is_file() else attempts_of_run(path)


def sentences(ledger: GoodputLedger) -> list[str]:
    """The answer for people: goodput, what is left, and notes."""
    count = counted(len(ledger.attempts), "attempt")
    redone = sum(entry.redone for entry in ledger.attempts)
    lines = [
        f"goodput {percent(ledger.goodput)} of {seconds(ledger.wall_s)} over {count}: "
        f"{counted(ledger.steps_kept, 'step')} kept, {redone:,} done again; "
        f"{significant(ledger.usual_step_s)} s a usual step (n = {ledger.n})"
    ]
    if ledger.steps_asked and ledger.days_left == 0:
        lines.append(all_done(ledger.steps_asked))
    elif ledger.days_left is not None and ledger.days_left_at_best is not None:
        lines.append(
            f"to step {ledger.steps_asked:,}: {days(ledger.days_left)} at the rate so far, "
            f"{days(ledger.days_left_at_best)} if nothing were lost"
        )
    return [*lines, *(f"note: {note}" for note in ledger.notes)]
