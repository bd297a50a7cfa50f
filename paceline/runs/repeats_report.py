"""Document of one or two groups of repeats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.compare.over_time.repeats import GroupResult, SeriesResult, has_figure
from paceline.core.result import Metric, Result, finite_value
from paceline.core.units import percent, pluralize, significant
from paceline.report.document import Column, Document, Figure, Table, unknown_figure
from paceline.report.figures import plus_minus, value_text
from paceline.runs.comparison_report import comparison_verdict

RATES = ("tokens_per_s", "padded_tokens_per_s", "samples_per_s")
MAX_CHANGES = 4
ROW_METRICS = ("step_time_s", "step_time_mean_s", "tokens_per_s", "mfu", "achievable_fraction")


def series_document(series: SeriesResult) -> Document:
    """Describe a series: every group's medians and runs, then how to compare and resume it."""
    verdict, answer = None, []
    if series.verdict:
        verdict = comparison_verdict(series.verdict)
        answer.append(series.verdict.sentence)
    if series.interrupted:
        answer.append("The series was interrupted. Finished runs are kept.")
    return Document(
        kind="repeats",
        title=" and ".join(group.group for group in series.groups),
        verdict=verdict,
        answer=(*answer, *map(_group_sentence, series.groups)),
        figures=tuple(figure for group in series.groups for figure in _figures(group)),
        sections=(Table(title="Runs", columns=RUN_COLUMNS, rows=list(_run_rows(series))),),
        notes=tuple(_notes(series)),
        data=series,
        csv=Table(columns=CSV_COLUMNS, rows=list(_csv_rows(series))),
    )


def changes_text(changes: tuple[str, ...]) -> str:
    """Return the changes of a configuration in one line."""
    more = len(changes) - MAX_CHANGES
    return ", ".join(changes[:MAX_CHANGES]) + (f" and {more} more" if more > 0 else "")


def run_text(result: Result) -> str:
    """Return how one repeat ended: `ok · 0.2310 s · 17,731 tokens/s`."""
    metrics = [result.metrics.get(name) for name in ("step_time_s", result.headline)]
    figures = [value_text(metric) for metric in metrics if finite_value(metric) is not None]
    return " · ".join(filter(None, [result.status, *figures, result.reason]))


def _group_sentence(group: GroupResult) -> str:
    failed = f", {group.failed} failed" if group.failed else ""
    changes = f"; {changes_text(group.changes)}" if group.changes else ""
    repeats = pluralize(group.num_repeats, "repeat")
    return f"{group.group}: {group.ok:,} of {repeats}{failed}{changes}"


def _rate(group: GroupResult) -> Metric | None:
    """Return the median rate that the runs report first, None if no run has one."""
    names = (*{run.headline: None for run in group.runs}, *RATES)
    rates = (group.figures.get(name) for name in names)
    return next((rate for rate in rates if finite_value(rate) is not None), None)


def _figures(group: GroupResult) -> Iterator[Figure]:
    rate, step = _rate(group), group.figures.get("step_time_s")
    if rate is None:
        yield unknown_figure(group.group, "no run has a figure")
        return
    interval = plus_minus(rate)
    yield Figure(
        group.group,
        value_text(rate),
        f"{interval} run-to-run 95%" if interval else "no interval: 3 runs are needed",
        (f"median of {pluralize(rate.n or 0, 'run')}",),
    )
    if step is not None and finite_value(step) is not None:
        spread = "" if step.spread is None else f"run-to-run spread {percent(step.spread, 2)}"
        yield Figure(f"{group.group} step", value_text(step), spread)


RUN_COLUMNS = (
    Column("group", "group"),
    Column("repeat", "repeat", justify="right"),
    Column("status", "status"),
    Column("step", "step time", justify="right"),
    Column("rate", "rate", justify="right"),
    Column("run", "run"),
    Column("reason", "reason", wraps=True),
)
CSV_COLUMNS = (
    *(Column(name, name) for name in ("group", "repeat", "run", "status", "n", "spread")),
    *(Column(name, name, lambda v: significant(v, 4), "right") for name in ROW_METRICS),
)


def _run_rows(series: SeriesResult) -> Iterator[dict[str, Any]]:
    for group in series.groups:
        for number, run in enumerate(group.runs, start=1):
            step, rate = run.metrics.get("step_time_s"), run.metrics.get(run.headline)
            reason = None if has_figure(run) else run.reason or "no step time"
            yield {
                "group": group.group,
                "repeat": number,
                "status": run.status,
                "step": value_text(step) if step and finite_value(step) is not None else None,
                "rate": value_text(rate) if rate and finite_value(rate) is not None else None,
                "run": run.run,
                "reason": reason or "",
            }


def _csv_rows(series: SeriesResult) -> Iterator[dict[str, Any]]:
    """Yield one row for each run, and one for each group's median."""
    for group in series.groups:
        for number, run in enumerate(group.runs, start=1):
            step = run.metrics.get("step_time_s")
            yield {
                "group": group.group,
                "repeat": str(number),
                "run": run.run,
                "status": run.status,
                "n": step.n if step else None,
                **{name: finite_value(run.metrics.get(name)) for name in ROW_METRICS},
            }
        step = group.figures.get("step_time_s")
        yield {
            "group": group.group,
            "repeat": "median",
            "n": group.ok,
            "spread": step.spread if step else None,
            **{name: finite_value(group.figures.get(name)) for name in ROW_METRICS},
        }


def _notes(series: SeriesResult) -> Iterator[str]:
    for group in series.groups:
        warnings = [run.warnings[0] for run in group.runs if run.warnings]
        if warnings:
            runs = pluralize(len(group.runs), "run")
            yield f"{len(warnings):,} of {runs} with warnings, the last: {warnings[-1]}"
        yield from (f"no run: {fault}" for fault in group.faults)
    if series.compare:
        yield f"Compare them with `{series.compare}`."
    elif len(series.groups) == 1 and series.groups[0].ok:
        group = series.groups[0].group
        yield f"Compare with `paceline compare {group} OTHER` (a run, a group, a tag)."
    if series.resume:
        yield f"Run what is missing with `{series.resume}`."
