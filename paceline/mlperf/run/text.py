"""Format a series of MLPerf trials as text lines and table rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.core.text import one_line
from paceline.core.units import pluralize, significant
from paceline.mlperf.run.trials import SeriesReport, TrialSeries, TrialState
from paceline.mlperf.score.convergence import ExpectedTime
from paceline.mlperf.score.text import score_lines


def trial_row(series: TrialSeries, trial: TrialState) -> dict[str, Any]:
    """Return one trial as a table row."""
    return {
        **trial.model_dump(mode="json"),
        "benchmark": series.benchmark,
        "series": series.name,
        "label": series.label,
    }


def trial_text(trial: TrialState) -> str:
    """Return the outcome of a trial in one line."""
    parts = [f"trial {trial.number}, seed {trial.seed}: {trial.status}"]
    if trial.samples_to_target is not None:
        parts.append(f"{trial.samples_to_target:,} samples to the target")
    if trial.minutes is not None:
        parts.append(f"{trial.minutes:.4f} minutes")
    if trial.last_loss is not None:
        parts.append(f"last loss {trial.last_loss:.4f}")
    if trial.samples_per_s is not None:
        parts.append(f"{significant(trial.samples_per_s, 4)} samples/s in the steady window")
    line = " · ".join(parts)
    return one_line(f"{line}: {trial.reason}" if trial.reason else line)


def report_lines(report: SeriesReport) -> Iterator[str]:
    """Yield the state and the results of a series, as terminal lines."""
    series = report.series
    num_finished = len(series.trials) - len(series.missing)
    yield one_line(f"{series.benchmark} · {series.label}")
    yield (
        f"  series       {report.status}: {num_finished:,} of "
        f"{pluralize(len(series.trials), 'trial')} finished"
    )
    yield one_line(f"  logs         {report.folder}")
    if report.expected is not None:
        yield from _expected(report.expected)
    elif series.synthetic and report.status == "complete":
        yield "  expected     unknown: no speed, no evaluation, or no reference for this batch"
    yield from (one_line(f"  warning      {warning}") for warning in report.warnings)
    if report.resume:
        yield one_line(f"  resume       {report.resume}")
    if report.score is not None:
        yield from score_lines(report.score)


def _expected(time: ExpectedTime) -> Iterator[str]:
    speed, batches = time.speed, " and ".join(f"{batch:,}" for batch in time.reference_batches)
    yield (
        f"  expected     {time.minutes:.4g} minutes to train ({time.low_minutes:.4g} to "
        f"{time.high_minutes:.4g} for {time.coverage:.0%} of runs); not a result"
    )
    yield (
        f"  from         {time.samples:,.0f} samples (references at batch {batches}) at "
        f"{significant(speed.samples_per_s, 4)} samples/s, median of "
        f"{pluralize(speed.num_steps, 'step')}, and "
        f"{pluralize(time.num_evaluations, 'evaluation')} of {significant(speed.evaluation_s, 3)} s"
    )
