"""Output to the terminal, without control characters and secrets."""

from __future__ import annotations

import errno
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


class _Terminal(io.FileIO):
    """Terminal that drops what is written after its window was closed."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return memoryview(data).nbytes


def _survive_hangup(stream: Any) -> Any:
    """Return `stream`, or a stream to the same terminal that a closed window does not break."""
    if not isinstance(stream, io.TextIOWrapper) or not stream.isatty():
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
    )


def prepare_streams() -> None:
    """Make the streams accept every character; raise SystemFaultError for a closed output.

    A character that the encoding lacks (Latin-1, ASCII) is written as its escape, so that a name
    cannot prevent a report. A terminal that is closed during a command does not end it early.
    """
    sys.stdout, sys.stderr = _survive_hangup(sys.stdout), _survive_hangup(sys.stderr)
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
