"""`paceline db`: the index of runs."""

from __future__ import annotations

import typer

from paceline.cli.list import computed_result
from paceline.cli.options import Json, RunsDir
from paceline.cli.output import Column, TableForm, TableFormat, emit_table

app = typer.Typer(help="The index of runs, which can be deleted and rebuilt.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """The index of runs: a copy for quick listing. The run folders are the truth."""


@app.command()
def rebuild(
    runs_dir: RunsDir = None, form: TableForm = TableFormat.text, as_json: Json = False
) -> None:
    """Read every run folder again and make the index anew.

    Example: paceline db rebuild --runs-dir /shared/runs
    """
    from paceline.files.index import Index
    from paceline.files.run_folder import runs_root

    root = runs_root(runs_dir)
    count, unreadable = Index.open(root, anew=True).rebuild(computed_result)
    for problem in unreadable:
        typer.echo(f"left out: {problem}", err=True)
    row = {"root": str(root), "runs": count, "unreadable": len(unreadable)}
    columns = [
        Column("root", "runs in"),
        Column("runs", "indexed"),
        Column("unreadable", "left out"),
    ]
    document = {"runs": count, "unreadable": unreadable}
    emit_table([row], columns, TableFormat.json if as_json else form, document=document)
