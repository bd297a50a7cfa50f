"""`paceline runs watch`: watch a run in progress."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from paceline.cli.options import Json, Prometheus, RunsDir
from paceline.cli.output import TableFormat, emit
from paceline.cli.terminal import echo
from paceline.core.errors import SystemFaultError, UserError
from paceline.files.documents import write_output
from paceline.files.run_folder import find_run, read_record, run_folders, runs_root
from paceline.report.terminal import print_document
from paceline.runs.watch.reader import RunReader, WatchState
from paceline.runs.watch.report import snapshot_document, state_line, watch_metrics

LINE_INTERVAL_S = 5.0
"""Interval of progress lines if standard error is not a terminal."""
START_TIMEOUT_S = 120.0
"""Maximum time until the run folder of a started command exists."""


def watch(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="Run: folder, unique prefix, tag or `last`."),
    ] = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND]",
            help="Program to start, as with `paceline run -- COMMAND`, and to watch.",
            show_default=False,
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Show the current state once and exit.")
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Time between two updates.")
    ] = 1.0,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --once: also write an HTML page to this file."),
    ] = None,
    prometheus: Prometheus = None,
    runs_dir: RunsDir = None,
    as_json: Json = False,
) -> None:
    """Watch a run in progress: speed, rates, waits, memory, clocks and ETA.

    It only reads the run folder, so it works over SSH or on a shared disk. The run continues when
    you stop watching (Ctrl-C). `--once --json` prints the current state for scripts; `--json`
    alone prints one object per line at every update.

    Examples:

      paceline runs watch last

      paceline runs watch last --once --json

      paceline runs watch last --once --html now.html

      paceline runs watch -- torchrun --nproc-per-node 8 train.py
    """
    root = runs_root(runs_dir)
    if (run is None) == (not command):
        raise UserError(
            "watch",
            "takes either RUN or -- COMMAND, and exactly one of them",
            remedy="`paceline runs list`",
        )
    if html and not once:
        raise UserError("--html", "requires --once", remedy="add --once")
    folder = _start_run(command, root) if command else find_run(root, run or "last")
    reader = RunReader(folder)
    try:
        if once:
            state = _state(reader, prometheus)
            form = TableFormat.json if as_json else TableFormat.text
            emit(snapshot_document(state), form, page=html)
        else:
            _follow(lambda: _state(reader, prometheus), interval, as_json)
    except KeyboardInterrupt:
        echo(f"the run continues: {folder}", err=True)


def _state(reader: RunReader, prometheus: Path | None) -> WatchState:
    """Return the present state, and write it to the file for Prometheus."""
    state = reader.state()
    if prometheus is not None:
        write_output(prometheus, watch_metrics(state))
    return state


def _follow(read: Callable[[], WatchState], every: float, as_json: bool) -> None:
    """Show the run until it has finished."""
    console = Console()
    if as_json or not console.is_terminal:
        _print_lines(read, every if as_json else max(every, LINE_INTERVAL_S), as_json)
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            state = read()
            live.update(_page(state, console), refresh=True)
            if state.ended:
                return
            time.sleep(every)


def _page(state: WatchState, console: Console) -> Text:
    """Return the snapshot as it is printed on this terminal."""
    page = Console(
        file=StringIO(), force_terminal=True, width=console.width, no_color=console.no_color
    )
    with page.capture() as capture:
        print_document(snapshot_document(state), page)
    return Text.from_ansi(capture.get())


def _print_lines(read: Callable[[], WatchState], every: float, as_json: bool) -> None:
    while True:
        state = read()
        echo(state.model_dump_json() if as_json else state_line(state))
        if state.ended:
            return
        time.sleep(every)


def _start_run(command: list[str], root: Path) -> Path:
    """Start the command as a run that outlives this program, and return its folder."""
    before = set(run_folders(root))
    run = [sys.executable, "-P", "-m", "paceline", "run", "--runs-dir", str(root), "--", *command]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            run,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            new = [folder for folder in run_folders(root) if folder not in before]
            ours = [folder for folder in new if _controller(folder) == process.pid]
            if ours:
                return ours[0]
            if process.poll() is not None:
                break
            time.sleep(0.1)
        output.seek(0)
        output_lines = output.read().decode(errors="replace").strip().splitlines()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 15)
    why = output_lines[-1] if output_lines else "there was no output"
    raise SystemFaultError(" ".join(command), f"did not create a run: {why}")


def _controller(folder: Path) -> int | None:
    """Return the process that started the run in a folder."""
    with suppress(UserError):
        controller = read_record(folder).controller
        return controller.pid if controller else None
    return None
