"""The table of a sweep in the form of published layout studies, and its progress."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.cli.output import OutputColumn, TableFormat, emit_table, print_sentences
from paceline.cli.terminal import echo
from paceline.core.units import gib, significant
from paceline.layouts.sweep.result import SweepResult, SweepRow, label
from paceline.layouts.sweep.table import (
    CSV_KEYS,
    for_people,
    notes,
    sweep_columns,
    sweep_rows,
    table_note,
)
from paceline.layouts.sweep.trials import SweepTask, SweepTrial, row_of
from paceline.runs.flow import Progress, Watcher
from paceline.runs.plan import Plan
from paceline.runs.tasks.slot import JobSlot, lost_text

LINE_EVERY_S = 5.0


def print_sweep(result: SweepResult, form: TableFormat) -> None:
    """The table, and for people the sentences below it."""
    rows = list(sweep_rows(result))
    if form is TableFormat.csv:
        varied = [name for name in result.dimensions if name.rpartition(".")[2] not in CSV_KEYS]
        columns = [OutputColumn(name, name) for name in (*varied, *CSV_KEYS)]
        emit_table(rows, columns, form)
        return
    print_sentences(result.sentences, form)
    emit_table(
        [for_people(row) for row in rows],
        columns_of(result),
        form,
        document=result.model_dump(mode="json"),
    )
    if form is TableFormat.json:
        return
    if note := table_note(result):
        echo(f"\n{note if form is TableFormat.text else f'- {note}'}")


def columns_of(result: SweepResult) -> list[OutputColumn]:
    """The columns that people are shown."""
    return [
        OutputColumn(
            column.key,
            column.title,
            column.write,
            "right" if column.is_number else "left",
            wraps=column.key == "notes",
        )
        for column in sweep_columns(result)
    ]


@dataclass
class Lines:
    """Progress as lines on standard error, for a file or a pipe."""

    total: int
    _lock: Lock = field(default_factory=Lock)
    _last_line_s: float = field(default_factory=time.monotonic)

    @contextmanager
    def running(self, task: SweepTask, plan: Plan) -> Iterator[Watcher]:
        place = f"{task.trial.number}/{self.total}"
        self._tell(f"{place}  {_label(task.trial)}{_repeat(task.repeat)}")

        def watch(progress: Progress) -> None:
            if progress.step is not None and time.monotonic() - self._last_line_s >= LINE_EVERY_S:
                self._last_line_s = time.monotonic()
                self._tell(f"{place}  step {progress.step.index} of {progress.total_steps}")

        yield watch

    def ended(self, task: SweepTask, kept: SweepRow) -> None:
        self._tell(f"{task.trial.number}/{self.total}  {_outcome(kept)}")

    def lost(self, slot: JobSlot, why: str, for_good: bool) -> None:
        self._tell(lost_text(slot, why, for_good))

    def _tell(self, line: str) -> None:
        with self._lock:
            echo(line, err=True)


@dataclass
class LiveTable:
    """Progress as a table that grows on a terminal: what has ended, what runs, what comes next."""

    trials: Sequence[SweepTrial]
    live: Live
    height: int
    _now: dict[int, str] = field(default_factory=dict[int, str])
    """What each running combination is doing, by its number."""
    _lock: Lock = field(default_factory=Lock)

    @contextmanager
    def running(self, task: SweepTask, plan: Plan) -> Iterator[Watcher]:
        trial, repeat = task
        self._show(trial, f"starting{_repeat(repeat)}")

        def watch(progress: Progress) -> None:
            step = progress.step
            now = f"step {step.index} of {progress.total_steps}" if step else progress.phase
            self._show(trial, f"{now}{_repeat(repeat)}")

        try:
            yield watch
        finally:
            self._show(trial, None)

    def ended(self, task: SweepTask, kept: SweepRow) -> None:
        self._show(task.trial, None)

    def lost(self, slot: JobSlot, why: str, for_good: bool) -> None:
        self.live.console.print(lost_text(slot, why, for_good), markup=False)

    def _show(self, trial: SweepTrial, now: str | None) -> None:
        """Note what a run does, None when it has ended, and draw the table anew."""
        with self._lock:
            running = {**self._now, trial.number: now or ""}
            self._now = {number: now for number, now in running.items() if now}
            self.live.update(self._table(min(self._now, default=trial.number)))

    def _table(self, first: int) -> Table:
        begin = max(0, first - max(1, self.height - 8))
        shown = self.trials[begin : begin + max(4, self.height - 6)]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for title in ("", "layout", "outcome"):
            table.add_column(title, no_wrap=True, overflow="ellipsis")
        for trial in shown:
            now = self._now.get(trial.number)
            cells = Text(_label(trial)), Text(now or _outcome(row_of(trial)), "bold" if now else "")
            table.add_row(str(trial.number), *cells)
        return table


@contextmanager
def sweep_display(trials: Sequence[SweepTrial]) -> Iterator[Lines | LiveTable]:
    """Who is told how the sweep goes on: a table on a terminal, lines elsewhere."""
    console = Console(stderr=True)
    runs = [trial for trial in trials if trial.choice.runs]
    if not console.is_terminal:
        yield Lines(len(runs))
        return
    with Live(console=console, transient=True, refresh_per_second=4) as live:
        yield LiveTable(runs, live, console.height)


def _label(trial: SweepTrial) -> str:
    return label(trial.choice.settings)


def _repeat(repeat: int) -> str:
    return f", run {repeat}" if repeat > 1 else ""


def _outcome(row: SweepRow) -> str:
    """`0.231 s, 17,731 tokens/s, 0.61 GiB`, or the status with its reason."""
    if not row.ok:
        return "" if row.status == "waiting" else notes(row)
    memory = f", {gib(row.memory_bytes)}" if row.memory_bytes is not None else ""
    return f"{significant(row.step_time_s or 0.0, 3)} s, {row.tokens_per_s:,.0f} tokens/s{memory}"
