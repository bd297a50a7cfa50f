"""Progress of a run on standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from paceline.cli.terminal import echo
from paceline.core.run import RunSettings, RunSpec
from paceline.core.steps import Step
from paceline.core.units import compact, pluralize, seconds, significant
from paceline.runs.flow import Progress, Watcher

LINE_EVERY_S = 5.0
"""Interval of progress lines if standard error is not a terminal."""

RECENT_STEPS = 10


@contextmanager
def progress_display(spec: RunSpec, repeat: str | None = None) -> Iterator[Watcher]:
    """Yield a watcher that shows phases and steps.

    `repeat` replaces the headline for one of several runs.
    """
    console = Console(stderr=True)
    in_samples = RunSettings.of(spec).headline == "samples_per_s"
    headline = repeat or run_headline(spec)
    if console.is_terminal:
        with _bar(console, headline, spec.steps_requested, in_samples) as watch:
            yield watch
    else:
        echo(headline, err=True)
        yield _lines(in_samples)


def run_headline(spec: RunSpec) -> str:
    """Return a line that describes the run."""
    label = f" ({spec.cluster.device_label})" if spec.cluster.device_label else ""
    place = f"{spec.recipe} · {spec.engine} · {spec.world_size} x {spec.cluster.device}{label}"
    if spec.bare:
        return place
    facts = RunSettings.of(spec)
    routing = f"routing {facts.routing} · " if facts.routing else ""
    return (
        f"{place} · {routing}"
        f"{spec.training.dtype} · {spec.layout.full_label(spec.world_size)} · "
        f"seq {spec.training.seq_len:,} · global batch "
        f"{pluralize(spec.training.global_batch, facts.batch_unit)}"
    )


def _lines(in_samples: bool) -> Watcher:
    last = 0.0
    recent = _RecentTimes()

    def watch(progress: Progress) -> None:
        nonlocal last
        if progress.step is None:
            echo(f"  {progress.phase}", err=True)
            return
        recent.add(progress.step)
        finished = progress.step.index == progress.total_steps
        if time.monotonic() - last >= LINE_EVERY_S or finished:
            last = time.monotonic()
            echo(f"  {_step_text(progress, recent, in_samples)}", err=True)

    return watch


@contextmanager
def _bar(
    console: object, headline: str, total: int | None, in_samples: bool
) -> Iterator[Callable[[Progress], None]]:
    assert isinstance(console, Console)
    console.print(escape(headline), highlight=False)
    recent = _RecentTimes()
    columns = (
        TextColumn("  {task.fields[phase]}"),
        BarColumn(),
        TextColumn("{task.fields[detail]}"),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("run", total=total, phase="starting", detail="")

        def watch(progress: Progress) -> None:
            if progress.step is None:
                bar.update(task, phase=progress.phase)
                return
            recent.add(progress.step)
            detail = escape(_step_text(progress, recent, in_samples))
            bar.update(task, completed=progress.step.index, phase="step", detail=detail)

        yield watch


class _RecentTimes:
    """Times of the latest steps in seconds; restarts when the batch grows."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._batch: float | None = None

    def add(self, step: Step) -> None:
        if step.global_batch != self._batch:
            self._times, self._batch = [], step.global_batch
        if step.step_time_s:
            self._times = [*self._times, step.step_time_s][-RECENT_STEPS:]

    def median(self) -> float | None:
        return median(self._times) if self._times else None


def _step_text(progress: Progress, recent: _RecentTimes, in_samples: bool) -> str:
    """Return `31/60 · 0.231 s · 17,731 tokens/s · loss 3.41 · 7 s left`.

    Speeds are those of the last ten steps. Some logs report only rates; then no time is shown.
    """
    step = progress.step
    assert step is not None
    typical = recent.median()
    total = progress.total_steps
    parts = [f"{step.index:,}/{total:,}" if total else f"step {step.index:,}"]
    if typical:
        parts.append(f"{compact(typical)} s")
    if typical and in_samples and step.global_batch:
        parts.append(f"{significant(step.global_batch / typical, 4)} samples/s")
    elif typical and progress.tokens_per_step:
        parts.append(f"{progress.tokens_per_step / typical:,.0f} tokens/s")
    if step.loss is not None:
        parts.append(f"loss {step.loss:.3f}")
    if total and typical:
        parts.append(f"{_remaining_text(typical * (total - step.index))} left")
    return " · ".join(parts)


def _remaining_text(value_s: float) -> str:
    """Return the remaining time: whole seconds below two minutes."""
    return seconds(value_s) if value_s >= 120 else f"{value_s:.0f} s"
