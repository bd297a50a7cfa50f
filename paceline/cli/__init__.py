"""The command line: the only place that prints or exits; one file per verb."""

from __future__ import annotations

import errno
import os
import signal
import sys
from types import FrameType

import typer

from paceline.cli.audit import audit
from paceline.cli.calibrate import calibrate
from paceline.cli.check import check
from paceline.cli.compare import compare
from paceline.cli.convert import convert
from paceline.cli.db import app as db_app
from paceline.cli.devices import devices
from paceline.cli.estimate import estimate
from paceline.cli.history import history
from paceline.cli.hosts import hosts
from paceline.cli.import_log import import_log
from paceline.cli.list import list_runs
from paceline.cli.mlperf import app as mlperf_app
from paceline.cli.parse import parse
from paceline.cli.probe import app as probe_app
from paceline.cli.rampup import rampup
from paceline.cli.recipes import recipes
from paceline.cli.report import report
from paceline.cli.run import run
from paceline.cli.scale import scale
from paceline.cli.show import show
from paceline.cli.sweep import sweep
from paceline.cli.tune import tune
from paceline.cli.validate import validate
from paceline.cli.version import version
from paceline.core.errors import EXIT_BAD_INPUT, EXIT_SYSTEM_FAULT, PacelineError

EPILOG = (
    "First steps: `paceline run tiny-llama` measures this machine in a minute; "
    "`paceline recipes` lists what else can be run; `paceline show last` repeats the report. "
    "Exit codes: 0 ok, 1 bad input, 2 system fault, 3 gate failed, 4 incomplete."
)

app = typer.Typer(
    name="paceline",
    help="Measure how fast this machine or cluster trains large language models, "
    "and what holds it back.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In the order of `--help`; commands of one panel stand together.
MEASURE, CLUSTER, PLAN = "Measure", "Clusters", "Know before you run"
READ, JUDGE, RUNS, MORE = "Read logs and tables", "Judge", "Stored runs", "What there is"

app.command("run", rich_help_panel=MEASURE)(run)
app.command("sweep", rich_help_panel=MEASURE)(sweep)
app.command("tune", rich_help_panel=MEASURE)(tune)
app.command("calibrate", rich_help_panel=MEASURE)(calibrate)
app.add_typer(probe_app, name="probe", rich_help_panel=MEASURE)
app.add_typer(mlperf_app, name="mlperf", rich_help_panel=MEASURE)
app.command("hosts", rich_help_panel=CLUSTER)(hosts)
app.command("check", rich_help_panel=CLUSTER)(check)
app.command("scale", rich_help_panel=CLUSTER)(scale)
app.command("estimate", rich_help_panel=PLAN)(estimate)
app.command("rampup", rich_help_panel=PLAN)(rampup)
app.command("validate", rich_help_panel=PLAN)(validate)
app.command("parse", rich_help_panel=READ)(parse)
app.command("import", rich_help_panel=READ)(import_log)
app.command("audit", rich_help_panel=READ)(audit)
app.command("convert", rich_help_panel=READ)(convert)
app.command("compare", rich_help_panel=JUDGE)(compare)
app.command("history", rich_help_panel=JUDGE)(history)
app.command("list", rich_help_panel=RUNS)(list_runs)
app.command("show", rich_help_panel=RUNS)(show)
app.command("report", rich_help_panel=RUNS)(report)
app.add_typer(db_app, name="db", rich_help_panel=RUNS)
app.command("recipes", rich_help_panel=MORE)(recipes)
app.command("devices", rich_help_panel=MORE)(devices)
app.command("version", rich_help_panel=MORE)(version)

# A wrong option is bad input like any other; the command-line library would exit with 2.
typer.BadParameter.__mro__[1].exit_code = EXIT_BAD_INPUT  # type: ignore[attr-defined]


def main() -> None:
    """Run the command line; an expected error is one line on standard error and its exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        app()
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _give_up_output(error)


def _give_up_output(error: OSError) -> None:
    """Say that standard output cannot be written (a full disk), and end with a system fault."""
    print(f"error: standard output: cannot be written: {error.strerror}", file=sys.stderr)
    # What is still buffered would fail again when the interpreter closes the stream.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(EXIT_SYSTEM_FAULT)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """SIGTERM ends a run as Ctrl-C does: its processes go and the folder says what happened."""
    raise KeyboardInterrupt
