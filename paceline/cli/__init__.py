"""Command line: the only package that prints or exits. Verbs are imported when called."""

from __future__ import annotations

import errno
import os
import signal
import sys
import warnings
from functools import partial
from typing import Annotated, Any

import typer

from paceline.cli.terminal import check_folder, echo, prepare_streams
from paceline.cli.verbs import VERBS, VerbGroup, add_verbs
from paceline.core.errors import EXIT_BAD_INPUT, EXIT_SYSTEM_FAULT, PacelineError

EPILOG = (
    "First steps: `paceline run tiny-llama` measures this machine in a minute; "
    "`paceline recipes` lists what else can be run; `paceline runs show last` repeats the report. "
    "Exit codes: 0 ok, 1 bad input, 2 system fault, 3 check failed, 4 incomplete."
)

EXIT_UNREAD = 128 + signal.SIGPIPE
"""Exit code of a program that SIGPIPE ends, e.g. in front of `| head -1`."""

app = typer.Typer(
    name="paceline",
    cls=VerbGroup,
    help="Measure how fast this machine or cluster trains large language models, "
    "and what holds it back.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for panel, verbs in VERBS.items():
    add_verbs(app, verbs, panel)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from paceline.cli.version import versions  # Reading the versions of packages takes time.

        echo("\n".join(f"{program} {version}" for program, version in versions().items()))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            callback=_print_version,
            is_eager=True,
            help="Print the versions of Paceline, Python and torch, and exit.",
        ),
    ] = False,
) -> None:
    pass


# A wrong option is bad input like any other; the command-line library would exit with 2.
typer.BadParameter.__mro__[1].exit_code = EXIT_BAD_INPUT  # type: ignore[attr-defined]


def main() -> None:
    """Run the command line; print an expected error as one line and exit with its code."""
    warnings.showwarning = partial(_show_warning, warnings.showwarning)
    try:
        prepare_streams()
        check_folder()
        try:
            app(prog_name="paceline")  # Also for `python -m paceline`.
        finally:
            sys.stdout.flush()  # What is still buffered may find no reader, or no room.
    except (BrokenPipeError, SystemExit) as end:
        # typer and rich exit with 1, which is bad input here, where nobody reads any more.
        if isinstance(end, SystemExit) and not isinstance(end.__context__, BrokenPipeError):
            raise
        _drop_output()
        sys.exit(EXIT_UNREAD)
    except PacelineError as error:
        _end(str(error), error.exit_code)
    except OSError as error:
        if error.errno == errno.ENOSPC and error.filename is None:
            _give_up_output(error)
        _end(f"{error.filename or 'system'}: {error.strerror or error}", EXIT_SYSTEM_FAULT)


def _show_warning(usual: Any, message: Warning | str, category: type[Warning], *place: Any) -> None:
    """Print a warning about a plug-in as one line; other warnings as Python does."""
    if category.__name__ == "PluginWarning":
        echo(f"warning: {message}", err=True)
    else:
        usual(message, category, *place)


def _end(sentence: str, code: int) -> None:
    echo(f"error: {sentence}", err=True)
    sys.exit(code)


def _give_up_output(error: OSError) -> None:
    """Report that standard output cannot be written (a full disk), and exit with a system fault."""
    print(f"error: standard output: cannot be written: {error.strerror}", file=sys.stderr)
    _drop_output()
    sys.exit(EXIT_SYSTEM_FAULT)


def _drop_output() -> None:
    """Discard buffered output, which would fail again when the interpreter closes the stream."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
