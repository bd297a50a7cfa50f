"""Report of a recipe's history: current level, step changes, all series."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.compare.over_time.step_changes import (
    History,
    LevelChange,
    RunSeries,
    SlowDrift,
    change_text,
)
from paceline.core.units import percent, pluralize
from paceline.report.document import (
    Column,
    Document,
    Figure,
    Notes,
    Preformatted,
    Table,
    Verdict,
    unknown_figure,
)
from paceline.report.figures import format_value

if TYPE_CHECKING:
    from altair import LayerChart

    from paceline.report.theme import ChartTheme

BLOCKS = "▁▂▃▄▅▆▇█"
STEP_MARK = "│"
MIN_HEIGHT = 0.04
MAX_DETECTABLE_CHANGE = 0.5
"""A detectable change above this is not shown."""
MAX_WIDTH = 72
"""Maximum characters of a sparkline; with more values, each shows the median of several."""
MAX_ITEMS = 8
"""Maximum number of listed changes of the environment; JSON has all."""
MAX_CHARTS = 24
"""Maximum number of series with a chart; the table has all."""
CSV_KEYS = ("series", "key", "date", "runs", "level", "ratio", "low", "high")
SERIES_COLUMNS = (
    Column("series", "series"),
    Column("runs", "runs", justify="right"),
    Column("days", "days"),
    Column("range", "range"),
    Column("now", "now", justify="right"),
    Column("noise", "run-to-run variation", justify="right"),
    Column("findable", "detectable change", justify="right"),
)
CHANGE_COLUMNS = (
    Column("date", "first run after"),
    Column("change", "change"),
    Column("interval", "95% interval"),
    Column("before", "before", justify="right"),
    Column("after", "after", justify="right"),
    Column("runs", "runs", justify="right"),
    Column("environment", "changed with it", wraps=True),
)


def history_document(history: History) -> Document:
    """Return the history as a document; a terminal shows sparklines, a page shows charts."""
    count = len(history.series)
    runs = pluralize(sum(series.n_runs for series in history.series), "run")
    left_out = max(0, count - MAX_CHARTS)
    verdict = history_verdict(history) if count else "no run has a value"
    return Document(
        kind="runs over time",
        title=history.recipe,
        headline=f"{history.recipe}: {verdict}, {runs}",
        verdict=Verdict(
            verdict,
            "alert" if history.slowdowns else "good" if count else "plain",
        ),
        setup=(history.metric, runs, f"margin {percent(history.margin, 2)}"),
        answer=_answer(history),
        figures=_figures(history),
        sections=(
            *(
                Preformatted(title=series.name, text=sparkline(list(_levels(series))), media="text")
                for series in history.series
                if len(series.points) > 1
            ),
            Table(
                title="Step changes",
                name="changes",
                columns=CHANGE_COLUMNS,
                rows=[_change_row(each, history) for s in history.series for each in s.changes],
            ),
            Table(
                title="Series",
                name="series",
                columns=SERIES_COLUMNS,
                rows=[_series_row(series, history) for series in history.series],
                note="Runs of one series have the same configuration and kind of machine. A "
                "detectable change at the last values is found in 9 of 10 cases.",
            ),
            Notes(title="Notes on the series", lines=list(_series_notes(history))),
        ),
        notes=(f"{left_out} more series have no chart",) if left_out else (),
        charts=lambda theme: _charts(history, theme),
        data=history,
        csv=_csv_table(history),
    )


def _charts(history: History, theme: ChartTheme) -> Mapping[str, LayerChart]:
    from paceline.runs.history_charts import history_charts  # Importing Altair is slow.

    return history_charts(history, theme, MAX_CHARTS)


def _answer(history: History) -> tuple[str, ...]:
    """Return the newest step change of the newest series in a sentence."""
    series = newest_series(history)
    if series is None or not series.changes:
        return ()
    change = series.changes[-1]
    before, after = (format_value(x, history.unit, 4) for x in (change.old_level, change.new_level))
    text = change_text(change, history.metric).capitalize()
    return (
        f"{text} since {change.date[:10]}: {before} before, {after} after "
        f"({interval_text(change)}, 95%).",
    )


def _figures(history: History) -> tuple[Figure, ...]:
    """Return the newest level, its last change, its variation, and the number of runs."""
    series = newest_series(history)
    left_out = _left_out(history)
    if series is None:
        labels = ("Now", "Last change", "Run-to-run variation")
        unknown = (unknown_figure(label, "no run has a value") for label in labels)
        return (*unknown, Figure("Runs", "0", "", left_out))
    last, count = series.points[-1], len(history.series)
    return (
        Figure(
            f"{history.metric} now",
            format_value(last.level, history.unit, 4),
            "",
            ("level of the newest series", f"last run {last.date[:10]}", series.name),
        ),
        _change_figure(series, history),
        _noise_figure(series),
        Figure(
            "Runs",
            f"{sum(each.n_runs for each in history.series):,}",
            "",
            (
                "in one series" if count == 1 else f"in {count} series that are not comparable",
                f"the newest since {series.points[0].date[:10]}",
                *left_out,
            ),
        ),
    )


def _change_figure(series: RunSeries, history: History) -> Figure:
    if series.changes:
        change = series.changes[-1]
        items = [each.item for each in change.environment]
        cause = f"changed with it: {', '.join(items[:MAX_ITEMS])}" if items else ""
        return Figure(
            "Last change",
            change_text(change, history.metric),
            f"{interval_text(change)} (95%)",
            (
                f"on {change.date[:10]}",
                f"{pluralize(change.n_before, 'run')} before, {change.n_after} after",
                cause or change.environment_note or "",
            ),
        )
    if series.drift is not None:
        return Figure(
            "Slow drift",
            change_text(series.drift, history.metric),
            "",
            ("last value relative to first",),
        )
    if len(series.points) < 4:
        return unknown_figure("Last change", "too few runs: 2 before and 2 after are needed")
    return Figure("Last change", "none", "", (f"no change beyond {percent(history.margin, 2)}",))


def _noise_figure(series: RunSeries) -> Figure:
    label = "Run-to-run variation"
    if series.noise is None:
        return unknown_figure(label, "too few runs")
    details: list[str] = []
    variation = series.variation
    if variation is not None and variation.n_runs != variation.n_occasions:
        within, between = percent(variation.within, 2), percent(variation.between, 2)
        details.append(f"single runs: {within} within a day, {between} between days")
    if series.findable is not None and series.findable > MAX_DETECTABLE_CHANGE:
        details.append("too few values to detect any change at this variation")
    elif series.findable is not None:
        details.append(
            f"a change of {percent(series.findable)} at the last {series.findable_points} values "
            "would be found in 9 of 10 cases"
        )
    return Figure(label, percent(series.noise, 2), "", tuple(details))


def _series_row(series: RunSeries, history: History) -> dict[str, Any]:
    values = [point.value for point in series.points]
    low, high = (format_value(end, history.unit, 4) for end in (min(values), max(values)))
    days = dict.fromkeys((series.points[0].date[:10], series.points[-1].date[:10]))
    findable = series.findable
    return {
        "series": series.name + (f" ({series.key})" if series.key else " (imported)"),
        "runs": f"{series.n_runs:,}",
        "days": " to ".join(days),
        "range": low if low == high else f"{low} to {high}",
        "now": format_value(series.points[-1].level, history.unit, 4),
        "noise": None if series.noise is None else percent(series.noise, 2),
        "findable": None
        if findable is None or findable > MAX_DETECTABLE_CHANGE
        else percent(findable),
    }


def _change_row(change: LevelChange, history: History) -> dict[str, Any]:
    items = [
        f"{each.item} {each.before} → {each.after}"
        + ("" if each.only_here else " (differs at other times too)")
        for each in change.environment[:MAX_ITEMS]
    ]
    more = len(change.environment) - len(items)
    return {
        "date": change.date[:10],
        "change": change_text(change, history.metric),
        "interval": interval_text(change),
        "before": format_value(change.old_level, history.unit, 4),
        "after": format_value(change.new_level, history.unit, 4),
        "runs": f"{change.n_before} / {change.n_after}",
        "environment": "; ".join(
            filter(None, (*items, f"{more} more" if more else "", change.environment_note))
        ),
    }


def _series_notes(history: History) -> Iterator[str]:
    several = len(history.series) > 1
    for series in history.series:
        drift = [_drift(series.drift, history)] if series.drift else []
        for note in (*drift, *series.notes):
            yield f"{series.name}: {note}" if several else note


def _drift(drift: SlowDrift, history: History) -> str:
    interval = f"{drift.low - 1:+.1%} to {drift.high - 1:+.1%}"
    change = change_text(drift, history.metric)
    return f"slow drift: the last value is {change} than the first ({interval}, 95%)"


def _left_out(history: History) -> tuple[str, ...]:
    return tuple(f"{pluralize(len(runs), 'run')} {why}" for why, runs in history.left_out.items())


def _csv_table(history: History) -> Table:
    keys = (*CSV_KEYS[:4], history.metric, *CSV_KEYS[4:])
    return Table(columns=[Column(key, key) for key in keys], rows=history_rows(history))


def history_rows(history: History) -> list[dict[str, Any]]:
    """Return one row for each value, with its series, level and the step change at it."""
    rows: list[dict[str, Any]] = []
    for place, series in enumerate(history.series, start=1):
        steps = {change.first_after: change for change in series.changes}
        for point in series.points:
            step = steps.get(point.runs[0])
            rows.append(
                {
                    "series": place,
                    "key": series.key,
                    "date": point.date,
                    "runs": " ".join(point.runs),
                    history.metric: point.value,
                    "level": point.level,
                    "ratio": step.ratio if step else None,
                    "low": step.low if step else None,
                    "high": step.high if step else None,
                }
            )
    return rows


def sparkline(levels: Sequence[Sequence[float]], max_width: int = MAX_WIDTH) -> str:
    """Return all values as block characters, with a mark between two levels.

    The height spans at least 4%, so that noise does not look like a change.
    """
    number = sum(map(len, levels))
    size = -(-number // max_width)
    columns = [
        [_median(level[i : i + size]) for i in range(0, len(level), size)] for level in levels
    ]
    low, high = min(map(min, columns)), max(map(max, columns))
    centre = (low + high) / 2
    height = max(high - low, MIN_HEIGHT * centre)
    top = len(BLOCKS) - 1
    return STEP_MARK.join(
        "".join(BLOCKS[round(((value - centre) / height + 0.5) * top)] for value in level)
        for level in columns
    )


def newest_series(history: History) -> RunSeries | None:
    """Return the series with the latest run; None if there are no runs."""
    return max(history.series, key=lambda series: series.points[-1].date, default=None)


def _levels(series: RunSeries) -> Iterator[list[float]]:
    starts = {change.first_after for change in series.changes}
    level: list[float] = []
    for point in series.points:
        if point.runs[0] in starts:
            yield level
            level = []
        level.append(point.value)
    yield level


def history_verdict(history: History) -> str:
    """Return the number of changes and drifts: `2 changes, 1 slow drift`."""
    changes = sum(len(series.changes) for series in history.series)
    drifts = sum(series.drift is not None for series in history.series)
    drifting = f", {pluralize(drifts, 'slow drift')}" if drifts else ""
    return f"{pluralize(changes, 'change') if changes else 'no change'}{drifting}"


def interval_text(change: LevelChange) -> str:
    """Return the interval of the change: `+1.1% to +2.3%`."""
    low, high = sorted((change.low - 1, change.high - 1))
    return f"{low:+.1%} to {high:+.1%}"


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
