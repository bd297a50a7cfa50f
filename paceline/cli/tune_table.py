"""The tables of a tuning, and its progress."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live

from paceline.cli.output import OutputColumn, TableFormat, emit_table
from paceline.cli.sweep_table import LINE_EVERY_S, LiveTable
from paceline.cli.terminal import echo
from paceline.core.units import GIB, counted, gib, step_seconds
from paceline.layouts.sweep.result import SweepRow, label
from paceline.layouts.sweep.table import notes
from paceline.layouts.sweep.trials import SweepTask, SweepTrial
from paceline.layouts.tune.ranking import RankedLayout, Ranking
from paceline.layouts.tune.result import TuneResult, TuneRow
from paceline.runs.flow import Progress, Watcher
from paceline.runs.plan import Plan
from paceline.runs.tasks.slot import JobSlot, lost_text


def print_ranking(ranking: Ranking, form: TableFormat) -> None:
    """All layouts by estimate; for people the counts below."""
    rows = [_ranked(row) for row in ranking.layouts]
    emit_table(rows, _RANKED, form, document=ranking.model_dump(mode="json"))
    if form is not TableFormat.text:
        return
    echo(
        f"{counted(ranking.n_layouts, 'layout')} estimated, {ranking.n_infeasible:,} cannot run, "
        f"{ranking.n_pruned:,} {ranking.bound}",
        err=True,
    )
    if ranking.n_pruned == ranking.n_layouts:
        echo(
            f"no layout fits: the smallest needs {gib(ranking.least_memory_bytes)} a device; take "
            "more or larger devices",
            err=True,
        )
    own = ranking.recipe_layout
    words = (
        f"{own.label}: {step_seconds(own.step_time_s)} s, memory: {own.memory}"
        if own
        else f"cannot run: {ranking.recipe_problem}"
    )
    echo(f"the recipe's own layout: {words}", err=True)


def print_tuning(result: TuneResult, form: TableFormat) -> None:
    """The layouts that were tried; for people what was learned below."""
    document = result.model_dump(mode="json")
    emit_table([_tried(row) for row in result.rows], _TRIED, form, document=document)
    if form is TableFormat.json:
        return
    lines = [*result.sentences]
    lines += [f"the best layout as a recipe: {result.recipe_file}"] if result.recipe_file else []
    lines += [f"not all has run: {result.go_on}"] if result.go_on else []
    for line in lines:
        echo(line if form is TableFormat.text else f"- {line}", err=form is TableFormat.csv)


def _ranked(row: RankedLayout) -> dict[str, Any]:
    layout = row.layout
    return {
        **row.model_dump(exclude={"layout"}, mode="json"),
        "micro_batch": layout.micro_batch,
        "recompute": layout.recomputation,
    }


def _tried(row: TuneRow) -> dict[str, Any]:
    """A row in base units, with its notes."""
    remarks = ["best"] if row.best else ["level with the best"] if row.level else []
    remarks += ["the recipe's own"] if row.own else []
    why = [] if row.status == "ok" else [": ".join(filter(None, (row.status, row.reason)))]
    return {
        **row.model_dump(exclude={"layout", "before", "expected", "after", "runs"}, mode="json"),
        "before_s": row.before.step_time_s,
        "expected_s": row.expected.step_time_s,
        "expected_low_s": row.expected.low_s,
        "expected_high_s": row.expected.high_s,
        "after_s": row.after.step_time_s,
        "prediction_error": row.prediction_error,
        "runs": " ".join(row.runs),
        "notes": ", ".join([*why, *remarks]),
    }


@dataclass
class TuneLines:
    """Progress as lines on standard error, for a file or a pipe."""

    _last_line_s: float = field(default_factory=time.monotonic)

    @contextmanager
    def running(self, task: SweepTask, plan: Plan) -> Iterator[Watcher]:
        """What runs and what is expected of it."""

        trial, repeat = task
        again = f", run {repeat}" if repeat > 1 else ""
        hoped = trial.choice.prediction
        expected = (
            f": {step_seconds(hoped.step_time_s)} s expected ({step_seconds(hoped.low_s)} to "
            f"{step_seconds(hoped.high_s)})"
            if hoped and repeat == 1
            else ""
        )
        echo(f"{trial.number}  {label(trial.choice.settings)}{again}{expected}", err=True)

        def watch(progress: Progress) -> None:
            if progress.step is not None and time.monotonic() - self._last_line_s >= LINE_EVERY_S:
                self._last_line_s = time.monotonic()
                echo(f"  step {progress.step.index} of {progress.total_steps}", err=True)

        yield watch

    def ended(self, task: SweepTask, kept: SweepRow) -> None:
        """How the layout stands now."""

        step_s, rate = step_seconds(kept.step_time_s or 0.0), kept.tokens_per_s or 0.0
        speed = f"{step_s} s, {rate:,.0f} tokens/s"
        echo(f"  {speed if kept.ok else notes(kept)}", err=True)

    def lost(self, slot: JobSlot, why: str, for_good: bool) -> None:
        """The hosts are not whole any more."""
        echo(lost_text(slot, why, for_good), err=True)


@contextmanager
def tune_display(order: list[SweepTrial]) -> Iterator[TuneLines | LiveTable]:
    """Who is told how a tuning goes on; `order` are its layouts, to which every try adds one."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield TuneLines()
        return
    with Live(console=console, transient=True, refresh_per_second=4) as live:
        yield LiveTable(order, live, console.height)


_RANKED = [
    OutputColumn("label", "layout"),
    OutputColumn("micro_batch", "micro-batch", justify="right"),
    OutputColumn("recompute", "recompute"),
    OutputColumn("step_time_s", "step s", step_seconds, "right"),
    OutputColumn("low_s", "low", step_seconds, "right"),
    OutputColumn("high_s", "high", step_seconds, "right"),
    OutputColumn("memory_bytes", "memory GiB", lambda value: f"{value / GIB:.1f}", "right"),
    OutputColumn("p_oom", "P(OOM)", lambda value: f"{value:.0%}", "right"),
    OutputColumn("fits", "fits", lambda value: "yes" if value else "no"),
    OutputColumn("memory", "memory"),
]
_TRIED = [
    OutputColumn("number", "", justify="right"),
    OutputColumn("label", "layout"),
    OutputColumn("step_time_s", "s/iteration", step_seconds, "right"),
    OutputColumn("num_runs", "runs", justify="right"),
    OutputColumn("tokens_per_s", "tokens/s", lambda value: f"{value:,.0f}", "right"),
    OutputColumn("before_s", "expected at first", step_seconds, "right"),
    OutputColumn("expected_s", "before its run", step_seconds, "right"),
    OutputColumn("after_s", "at the end", step_seconds, "right"),
    OutputColumn("notes", "notes", wraps=True),
]
