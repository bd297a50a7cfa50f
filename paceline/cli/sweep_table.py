"""The table of a sweep in the form of published layout studies, and its progress."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.output import Column, TableFormat, emit_table

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from paceline.core.sweeps import SweepResult, SweepRow
    from paceline.flow import Progress, Watcher
    from paceline.sweeping.running import Trial

LINE_EVERY_S = 5.0
NO_SPEED = "x"
"""Where a run ended without one."""
TRIED = ("oom", "nan", "timeout", "failed", "incomplete")
FIXED = ("layout.tp", "layout.pp", "layout.micro_batch", "layout.recompute")
"""Fields that every table shows."""
RAW = (
    "status", "reason", "best", "level", "pareto", "key", "nodes", "devices", "tp", "pp", "cp", "vp", "dp",
    "zero_stage", "micro_batch", "recompute", "global_batch", "seq_len", "step_time_s", "low_s",
    "high_s", "spread", "n", "samples_per_s", "tokens_per_s", "model_flops_per_s_per_device",
    "hardware_flops_per_s_per_device", "mfu", "memory_bytes", "memory_kind", "predicted_s",
    "predicted_low_s", "predicted_high_s", "prediction_error", "predicted_memory_bytes", "p_oom",
    "runs",
)  # fmt: skip


def print_sweep(result: SweepResult, form: TableFormat) -> None:
    """The table, and for people the sentences below it."""
    from paceline.report.sweep import memory_note, sweep_rows

    rows = list(sweep_rows(result))
    if form is TableFormat.csv:
        varied = [name for name in result.dimensions if name.rpartition(".")[2] not in RAW]
        columns = [Column(name, name) for name in (*varied, *RAW)]
        emit_table(rows, columns, form)
        return
    emit_table([_for_people(row) for row in rows], columns_of(result), form,
               document=result.model_dump(mode="json"))  # fmt: skip
    if form is TableFormat.json:
        return
    recomputed = (
        f"TFLOP/s of a device, recomputation counted ({result.flops_convention}); "
        "layouts are ranked by tokens/s."
    )
    typer.echo("")
    for line in filter(None, (*result.sentences, f"{recomputed} {memory_note(result)}".strip())):
        typer.echo(line if form is TableFormat.text else f"- {line}")


def columns_of(result: SweepResult) -> list[Column]:
    """The columns of published studies, those of further settings that vary, and predictions if any."""
    from paceline.units import significant

    def number(value: Any) -> str:
        return value if isinstance(value, str) else significant(value, 3)

    further = [name for name in result.dimensions if name not in FIXED]
    columns = [Column("nodes", "nodes", justify="right")]
    columns += [Column(key, title, justify="right")
                for key, title in (("tp", "TP"), ("pp", "PP"), ("dp", "DP"), ("micro_batch", "MBS"))]  # fmt: skip
    columns.append(Column("recompute", "recompute"))
    columns += [Column(name, name.rpartition(".")[2], justify="right") for name in further]
    columns += [Column("step_time_s", "s/iteration", number, "right"),
                Column("tokens_per_s", "tokens/s", lambda value: f"{value:,.0f}", "right"),
                Column("tflops", "TFLOP/s", number, "right"),
                Column("memory", "memory GiB", justify="right")]  # fmt: skip
    if any(row.prediction for row in result.rows):
        columns += [Column("predicted_s", "predicted s", number, "right"),
                    Column("prediction_error", "error", lambda e: f"{100 * e:+.1f} %", "right"),
                    Column("predicted_memory", "predicted GiB", justify="right")]  # fmt: skip
    return [*columns, Column("notes", "notes", wraps=True)]


def _for_people(row: dict[str, Any]) -> dict[str, Any]:
    """The row with an x where a run ended without a speed, and in the units of the table."""
    from paceline.report.sweep import memory_text
    from paceline.units import TERA

    flops, failed = row["hardware_flops_per_s_per_device"], row["status"] in TRIED
    return {
        **row,
        "step_time_s": NO_SPEED if failed else row["step_time_s"],
        "tflops": NO_SPEED if failed else flops and flops / TERA,
        "memory": memory_text(row["memory_bytes"]),
        "predicted_memory": memory_text(row["predicted_memory_bytes"]),
    }


@dataclass
class Lines:
    """Progress as lines on standard error, for a file or a pipe."""

    total: int
    _told: float = field(default_factory=time.monotonic)

    @contextmanager
    def running(self, trial: Trial, repeat: int) -> Iterator[Watcher]:
        typer.echo(f"{trial.number}/{self.total}  {_label(trial)}{_repeat(repeat)}", err=True)

        def watch(progress: Progress) -> None:
            if progress.step is not None and time.monotonic() - self._told >= LINE_EVERY_S:
                self._told = time.monotonic()
                typer.echo(f"  step {progress.step.index} of {progress.total_steps}", err=True)

        yield watch

    def ended(self, trial: Trial, row: SweepRow) -> None:
        typer.echo(f"  {_outcome(row)}", err=True)


@dataclass
class LiveTable:
    """Progress as a table that grows on a terminal: what has ended, what runs, what comes next."""

    trials: Sequence[Trial]
    live: Live
    height: int

    @contextmanager
    def running(self, trial: Trial, repeat: int) -> Iterator[Watcher]:
        self._show(trial, f"starting{_repeat(repeat)}")

        def watch(progress: Progress) -> None:
            step = progress.step
            now = f"step {step.index} of {progress.total_steps}" if step else progress.phase
            self._show(trial, f"{now}{_repeat(repeat)}")

        yield watch

    def ended(self, trial: Trial, row: SweepRow) -> None:
        self._show(trial, None)

    def _show(self, running: Trial, now: str | None) -> None:
        self.live.update(self._table(running, now))

    def _table(self, running: Trial, now: str | None) -> Table:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        from paceline.sweeping.running import row_of

        begin = max(0, running.number - max(1, self.height - 8))
        shown = self.trials[begin : begin + max(4, self.height - 6)]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for title in ("", "layout", "outcome"):
            table.add_column(title, no_wrap=True, overflow="ellipsis")
        for trial in shown:
            here = trial is running and now is not None
            told = now if here else _outcome(row_of(trial))
            table.add_row(
                str(trial.number), Text(_label(trial)), Text(told or "", "bold" if here else "")
            )
        return table


@contextmanager
def sweep_display(trials: Sequence[Trial]) -> Iterator[Lines | LiveTable]:
    """Who is told how the sweep goes on: a table on a terminal, lines elsewhere."""
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    runs = [trial for trial in trials if trial.choice.runs]
    if not console.is_terminal:
        yield Lines(len(runs))
        return
    with Live(console=console, transient=True, refresh_per_second=4) as live:
        yield LiveTable(runs, live, console.height)


def _label(trial: Trial) -> str:
    from paceline.core.sweeps import label

    return label(trial.choice.settings)


def _repeat(repeat: int) -> str:
    return f", run {repeat}" if repeat > 1 else ""


def _outcome(row: SweepRow) -> str:
    """`0.231 s, 17,731 tokens/s, 0.61 GiB`, or the status with its reason."""
    from paceline.report.sweep import notes
    from paceline.units import gib, significant

    if not row.ok:
        return "" if row.status == "waiting" else notes(row)
    memory = f", {gib(row.memory_bytes)}" if row.memory_bytes is not None else ""
    return f"{significant(row.step_time_s or 0.0, 3)} s, {row.tokens_per_s:,.0f} tokens/s{memory}"
