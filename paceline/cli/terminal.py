"""Output to the terminal, without control characters and secrets."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import typer

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.secrets import clean


def echo(text: Any = "", *, nl: bool = True, err: bool = False) -> None:
    """Write a text to standard output, or to standard error."""
    typer.echo(clean(str(text)), nl=nl, err=err)


def prepare_streams() -> None:
    """Make the streams accept every character; raise SystemFaultError for a closed output.

    A character that the encoding lacks (Latin-1, ASCII) is written as its escape, so that a name
    cannot prevent a report.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    if sys.stdout is None:
        raise SystemFaultError(
            "standard output", "is closed", remedy="redirect it to a file or a pipe"
        )
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: PTH123, SIM115


def check_folder() -> None:
    """Raise UserError if the working folder no longer exists."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise UserError(
            "working folder", "no longer exists", remedy="change to an existing folder"
        ) from error
