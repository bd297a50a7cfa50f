"""`paceline runs rm`: delete runs."""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import RunsDir
from paceline.cli.terminal import echo
from paceline.core.errors import SystemFaultError, UserError
from paceline.core.units import binary, pluralize
from paceline.files.index import Index
from paceline.files.run_folder import current_status, find_runs, read_record, runs_root


def rm(
    runs: Annotated[
        list[str],
        typer.Argument(help="Runs: folders, unique prefixes, tags, groups or `last`."),
    ],
    runs_dir: RunsDir = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
) -> None:
    """Delete runs: their folders, and their entries in the index.

    A run that is still running is not deleted, and neither is a folder outside the runs folder.

    Example: paceline runs rm last --yes
    """
    root = runs_root(runs_dir)
    folders = list(dict.fromkeys(folder for name in runs for folder in find_runs(root, name)))
    for folder in folders:
        _refuse_outside(folder, root)
        _refuse_running(folder)
    sizes = {folder: _size(folder) for folder in folders}
    overview = "\n".join(f"{folder.name}  {binary(size)}" for folder, size in sizes.items())
    if not yes:
        if not sys.stdin.isatty():
            raise UserError("--yes", "is missing, and there is no terminal to ask on")
        echo(overview, err=True)
        if not typer.confirm(f"Delete {pluralize(len(folders), 'run')}?", err=True):
            raise UserError("runs rm", "was not confirmed; nothing was deleted")
    for folder in folders:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise SystemFaultError(str(folder), f"cannot be deleted: {error.strerror}") from error
    with suppress(
        SystemFaultError
    ):  # An index that cannot be opened is rebuilt without these runs.
        Index.open(root).forget([folder.name for folder in folders])
    freed_size = binary(sum(sizes.values()))
    echo(f"deleted {pluralize(len(folders), 'run')}, freed {freed_size}")


def _refuse_outside(folder: Path, root: Path) -> None:
    if folder.is_symlink() or folder.resolve().parent != root.resolve():
        raise UserError(
            str(folder),
            f"is not a folder in {root}",
            remedy="set the folder of its runs with --runs-dir",
        )


def _refuse_running(folder: Path) -> None:
    """Raise UserError if the run has not ended; an unreadable record does not protect a folder."""
    try:
        status = current_status(read_record(folder))
    except UserError:
        return
    if status in ("queued", "running"):
        raise UserError(f"run {folder.name}", f"is {status}", remedy="stop it first")


def _size(folder: Path) -> int:
    """Return the size of all files in bytes; links count as links."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
