"""The one door to the terminal: no control character of a foreign text gets through, no secret."""

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
    """Write a text to standard output, or to standard error, for people or as data."""
    typer.echo(clean(str(text)), nl=nl, err=err)


def prepare_streams() -> None:
    """Make the streams take every character; raises SystemFaultError for a closed output.

    Where an encoding lacks a character (Latin-1, ASCII), its escape is written instead: a report
    must not be lost to a name.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    if sys.stdout is None:
        raise SystemFaultError("standard output", "is closed", remedy="send it somewhere")
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: PTH123, SIM115


def check_folder() -> None:
    """Raise UserError where the working folder is gone."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise UserError(
            "working folder", "does not exist any more", remedy="cd into one that does"
        ) from error
