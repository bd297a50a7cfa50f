"""Groups of repeats as terminal text and as table rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.compare.judgement import verdict_label
from paceline.compare.over_time.repeats import GroupResult, SeriesResult, has_figure
from paceline.core.result import Result, finite_value
from paceline.core.text import printable
from paceline.core.units import percent, pluralize
from paceline.report.figures import format_value, plus_minus, split_unit, value_text

HEADLINES = ("tokens_per_s", "padded_tokens_per_s", "samples_per_s")
MAX_CHANGES = 4
ROW_METRICS = ("step_time_s", "step_time_mean_s", "tokens_per_s", "mfu", "achievable_fraction")


def series_lines(series: SeriesResult) -> Iterator[str]:
    """Yield the report of a series: every group, then how to compare and resume it."""
    for group in series.groups:
        yield from group_lines(group)
    if series.interrupted:
        yield "interrupted: finished runs are kept"
    if series.verdict:
        label = verdict_label(series.verdict.verdict, suspicious=bool(series.verdict.too_good))
        yield printable(f"{label}: {series.verdict.sentence}")
    if series.compare:
        yield f"compare: {series.compare}"
    elif len(series.groups) == 1 and series.groups[0].ok:
        yield f"compare: paceline compare {series.groups[0].group} OTHER (a run, a group, a tag)"
    if series.resume:
        yield f"run what is missing: {series.resume}"


def group_lines(group: GroupResult) -> Iterator[str]:
    """Yield one group: its medians with run-to-run spread, and each run's value."""
    failed = f", {group.failed} failed" if group.failed else ""
    yield f"{group.group}: {group.ok:,} of {pluralize(group.num_repeats, 'repeat')}{failed}"
    if group.changes:
        yield f"  {changes_text(group.changes)}"
    figures = group.figures
    names = (*{run.headline: None for run in group.runs}, *HEADLINES)
    lead = next((figures[n] for n in names if finite_value(figures.get(n)) is not None), None)
    if lead is not None:
        interval = plus_minus(lead)
        interval = f"  {interval}" if interval else ""
        kind = "run-to-run 95%" if interval else "no interval: 3 runs are needed"
        runs = pluralize(lead.n or 0, "run")
        yield f"  {value_text(lead)}{interval}      median of {runs}; {kind}"
    step = figures.get("step_time_s")
    if step is not None and finite_value(step) is not None:
        spread = "" if step.spread is None else f"; run-to-run spread {percent(step.spread, 2)}"
        yield f"  step {value_text(step)}{spread}"
        yield f"  each {_step_times(group)}"
    for number, run in enumerate(group.runs, start=1):
        if not has_figure(run):
            reason = printable(run.reason or "no step time")
            yield f"  run {number} {run.status}: {reason} ({run.run})"
    runs_with_warnings = [run for run in group.runs if run.warnings]
    if runs_with_warnings:
        count = f"{len(runs_with_warnings):,} of {pluralize(len(group.runs), 'run')} with warnings"
        yield f"  {count}, the last: {printable(runs_with_warnings[-1].warnings[0])}"
    for fault in group.faults:
        yield f"  no run: {printable(fault)}"


def changes_text(changes: tuple[str, ...]) -> str:
    """Return the changes of a configuration in one line."""
    texts = [printable(change) for change in changes[:MAX_CHANGES]]
    more = len(changes) - len(texts)
    return ", ".join(texts) + (f" and {more} more" if more > 0 else "")


def run_text(result: Result) -> str:
    """Return how one repeat ended: `ok · 0.2310 s · 17,731 tokens/s`."""
    metrics = [result.metrics.get(name) for name in ("step_time_s", result.headline)]
    figures = [value_text(metric) for metric in metrics if finite_value(metric) is not None]
    reason = printable(result.reason) if result.reason else None
    return " · ".join(filter(None, [result.status, *figures, reason]))


def group_rows(series: SeriesResult) -> list[dict[str, Any]]:
    """Return one row for each run, and one for each group's median."""
    rows: list[dict[str, Any]] = []
    for group in series.groups:
        for number, run in enumerate(group.runs, start=1):
            rows.append(
                {
                    "group": group.group,
                    "repeat": str(number),
                    "run": run.run,
                    "status": run.status,
                    "n": _count(run, "step_time_s"),
                    **{name: finite_value(run.metrics.get(name)) for name in ROW_METRICS},
                }
            )
        step = group.figures.get("step_time_s")
        rows.append(
            {
                "group": group.group,
                "repeat": "median",
                "run": None,
                "status": None,
                "n": group.ok,
                "spread": step.spread if step else None,
                **{name: finite_value(group.figures.get(name)) for name in ROW_METRICS},
            }
        )
    return rows


def _count(run: Result, name: str) -> int | None:
    metric = run.metrics.get(name)
    return metric.n if metric else None


def _step_times(group: GroupResult) -> str:
    """Return every run's step time in run order: `0.2301 0.2310 0.2322 s`."""
    steps = [run.metrics["step_time_s"] for run in group.runs if has_figure(run)]
    times = [time for metric in steps if (time := finite_value(metric)) is not None]
    parts = [split_unit(format_value(time, "s")) for time in times]
    units = {unit for _, unit in parts}
    if len(units) != 1:
        return " ".join(format_value(time, "s") for time in times)
    return f"{' '.join(number for number, _ in parts)} {units.pop()}"
