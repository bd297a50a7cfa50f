"""Progress of staging on standard error: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from paceline.cli.terminal import echo
from paceline.core.text import one_line
from paceline.core.units import seconds, si
from paceline.staging.download_log import Part, StageProgress, StageWatcher

LINE_EVERY_S = 5.0
DRAW_EVERY_S = 0.1
TOTAL = "all"

Notify = Callable[[str], None]


@contextmanager
def stage_display() -> Iterator[tuple[StageWatcher, Notify]]:
    """Yield a watcher of the progress, and a function that prints a sentence once."""
    console = Console(stderr=True)
    printed_sentences: set[str] = set()

    def print_once(sentence: str) -> None:
        if sentence not in printed_sentences:
            printed_sentences.add(sentence)
            echo(f"  {sentence}", err=True)

    if not console.is_terminal:
        yield _lines(), print_once
        return
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(),
        TextColumn("{task.fields[detail]}"),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        yield _bars(bars), print_once


def _lines() -> StageWatcher:
    last, phases, lock = 0.0, dict[str, str](), threading.Lock()

    def watch(progress: StageProgress) -> None:
        nonlocal last
        with lock:
            for part in progress.parts:
                if phases.get(part.name, "waiting") != part.phase:
                    echo(f"  {part.name}: {one_line(part.phase)}", err=True)
                phases[part.name] = part.phase
            if time.monotonic() - last >= LINE_EVERY_S and progress.done_bytes:
                last = time.monotonic()
                echo(f"  {_total(progress)}", err=True)

    return watch


def _bars(bars: Progress) -> StageWatcher:
    tasks: dict[str, TaskID] = {}
    last, lock = 0.0, threading.Lock()

    def show(name: str, done_bytes: int, total: int | None, detail: str) -> None:
        if name not in tasks:
            tasks[name] = bars.add_task(escape(name), total=None, detail="")
        bars.update(tasks[name], completed=done_bytes, total=total, detail=escape(one_line(detail)))

    def watch(progress: StageProgress) -> None:
        nonlocal last
        with lock:
            if time.monotonic() - last < DRAW_EVERY_S and tasks:
                return
            last = time.monotonic()
            for part in progress.parts:
                show(part.name, part.done_bytes, part.total_bytes, _part(part))
            show(TOTAL, progress.done_bytes, progress.total_bytes, _total(progress))

    return watch


def _part(part: Part) -> str:
    return f"{part.phase} {_bytes(part.done_bytes, part.total_bytes)}"


def _total(progress: StageProgress) -> str:
    """Return `31.2 GB of 85.1 GB · 412 MB/s · 2 min 11 s left`."""
    parts = [_bytes(progress.done_bytes, progress.total_bytes)]
    if progress.bytes_per_s:
        parts.append(si(progress.bytes_per_s, "B/s"))
    if progress.remaining_s is not None:
        parts.append(f"{seconds(progress.remaining_s)} left")
    return " · ".join(parts)


def _bytes(done_bytes: int, total: int | None) -> str:
    return si(done_bytes, "B") + (f" of {si(total, 'B')}" if total is not None else "")
