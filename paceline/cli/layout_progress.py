"""Progress of a sweep or tuning: a table on a terminal, lines elsewhere."""

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

from paceline.cli.terminal import echo
from paceline.core.units import gib, significant, step_seconds
from paceline.layouts.sweep.report import notes
from paceline.layouts.sweep.result import SweepRow, label
from paceline.layouts.sweep.trials import SweepTask, SweepTrial, sweep_row
from paceline.runs.flow import Progress, Watcher
from paceline.runs.plan import Plan
from paceline.runs.tasks.slot import JobSlot, lost_text

LINE_EVERY_S = 5.0


@dataclass
class Lines:
    """Progress as lines on standard error, for a file or a pipe."""

    total: int
    _lock: Lock = field(default_factory=Lock)
    _last_line_s: float = field(default_factory=time.monotonic)

    @contextmanager
    def running(self, task: SweepTask, plan: Plan) -> Iterator[Watcher]:
        place = f"{task.trial.number}/{self.total}"
        self._print_line(f"{place}  {_label(task.trial)}{_repeat(task.repeat)}")

        def watch(progress: Progress) -> None:
            if progress.step is not None and time.monotonic() - self._last_line_s >= LINE_EVERY_S:
                self._last_line_s = time.monotonic()
                self._print_line(f"{place}  step {progress.step.index} of {progress.total_steps}")

        yield watch

    def task_ended(self, task: SweepTask, row: SweepRow) -> None:
        self._print_line(f"{task.trial.number}/{self.total}  {_outcome(row)}")

    def slot_lost(self, slot: JobSlot, why: str, for_good: bool) -> None:
        self._print_line(lost_text(slot, why, for_good))

    def _print_line(self, line: str) -> None:
        with self._lock:
            echo(line, err=True)


@dataclass
class LiveTable:
    """Progress as a table on a terminal: finished, running and next combinations."""

    trials: Sequence[SweepTrial]
    live: Live
    height: int
    _now: dict[int, str] = field(default_factory=dict[int, str])
    """State of each running combination, by its number."""
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

    def task_ended(self, task: SweepTask, row: SweepRow) -> None:
        self._show(task.trial, None)

    def slot_lost(self, slot: JobSlot, why: str, for_good: bool) -> None:
        self.live.console.print(lost_text(slot, why, for_good), markup=False)

    def _show(self, trial: SweepTrial, now: str | None) -> None:
        """Record the state of a run (None when it has finished) and redraw the table."""
        with self._lock:
            running = {**self._now, trial.number: now or ""}
            self._now = {number: now for number, now in running.items() if now}
            self.live.update(self._table(min(self._now, default=trial.number)))

    def _table(self, first: int) -> Table:
        begin = max(0, first - max(1, self.height - 8))
        visible_trials = self.trials[begin : begin + max(4, self.height - 6)]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for title in ("", "layout", "outcome"):
            table.add_column(title, no_wrap=True, overflow="ellipsis")
        for trial in visible_trials:
            now = self._now.get(trial.number)
            cells = (
                Text(_label(trial)),
                Text(now or _outcome(sweep_row(trial)), "bold" if now else ""),
            )
            table.add_row(str(trial.number), *cells)
        return table


@contextmanager
def sweep_display(trials: Sequence[SweepTrial]) -> Iterator[Lines | LiveTable]:
    """Yield the progress display of a sweep: a table on a terminal, lines elsewhere."""
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
    """Return `0.231 s, 17,731 tokens/s, 0.61 GiB`, or the status with its reason."""
    if not row.ok:
        return "" if row.status == "waiting" else notes(row)
    memory = f", {gib(row.memory_bytes)}" if row.memory_bytes is not None else ""
    return f"{significant(row.step_time_s or 0.0, 3)} s, {row.tokens_per_s:,.0f} tokens/s{memory}"


@dataclass
class TuneLines:
    """Progress as lines on standard error, for a file or a pipe."""

    _last_line_s: float = field(default_factory=time.monotonic)

    @contextmanager
    def running(self, task: SweepTask, plan: Plan) -> Iterator[Watcher]:
        """Print what runs and the predicted step time."""

        trial, repeat = task
        repeat_text = f", run {repeat}" if repeat > 1 else ""
        prediction = trial.choice.prediction
        expected = ""
        if prediction and repeat == 1:
            low, high = step_seconds(prediction.low_s), step_seconds(prediction.high_s)
            step_time = step_seconds(prediction.step_time_s)
            expected = f": {step_time} s expected ({low} to {high})"
        echo(f"{trial.number}  {label(trial.choice.settings)}{repeat_text}{expected}", err=True)

        def watch(progress: Progress) -> None:
            if progress.step is not None and time.monotonic() - self._last_line_s >= LINE_EVERY_S:
                self._last_line_s = time.monotonic()
                echo(f"  step {progress.step.index} of {progress.total_steps}", err=True)

        yield watch

    def task_ended(self, task: SweepTask, row: SweepRow) -> None:
        """Print the result of the layout."""

        step_s, rate = step_seconds(row.step_time_s or 0.0), row.tokens_per_s or 0.0
        speed = f"{step_s} s, {rate:,.0f} tokens/s"
        echo(f"  {speed if row.ok else notes(row)}", err=True)

    def slot_lost(self, slot: JobSlot, why: str, for_good: bool) -> None:
        """Print that hosts were lost."""
        echo(lost_text(slot, why, for_good), err=True)


@contextmanager
def tune_display(order: list[SweepTrial]) -> Iterator[TuneLines | LiveTable]:
    """Yield the progress display of a tuning; `order` grows by one layout per trial."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield TuneLines()
        return
    with Live(console=console, transient=True, refresh_per_second=4) as live:
        yield LiveTable(order, live, console.height)
