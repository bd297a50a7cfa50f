"""The history of a recipe as terminal text, Markdown and table rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from paceline.compare.directions import is_speed
from paceline.compare.over_time.timeline import History, LevelChange, RunSeries, SlowDrift
from paceline.core.text import printable
from paceline.core.units import counted, percent
from paceline.report.figures import written
from paceline.report.tables import md_text

BLOCKS = "▁▂▃▄▅▆▇█"
STEP_MARK = "│"
LEAST_HEIGHT = 0.04
USELESS = 0.5
"""A findable change beyond this is no information."""
WIDEST = 72
"""Most characters of a series; more values share a character, as their median."""
MOST_ITEMS = 8
"""Changed items of the environment that the text names; JSON has all."""


def sparkline(levels: Sequence[Sequence[float]], widest: int = WIDEST) -> str:
    """All values as blocks from the smallest to the largest, with a mark between two levels.

    The height stands for 4 % at least, so that scatter does not look like change.
    """
    number = sum(map(len, levels))
    size = -(-number // widest)
    drawn = [[_middle(level[i : i + size]) for i in range(0, len(level), size)] for level in levels]
    low, high = min(map(min, drawn)), max(map(max, drawn))
    centre = (low + high) / 2
    height = max(high - low, LEAST_HEIGHT * centre)
    top = len(BLOCKS) - 1
    return STEP_MARK.join(
        "".join(BLOCKS[round(((value - centre) / height + 0.5) * top)] for value in level)
        for level in drawn
    )


def history_lines(history: History) -> Iterator[str]:
    """The history as text, series by series."""
    count = len(history.series)
    runs = counted(sum(series.n_runs for series in history.series), "run")
    kinds = f" in {count} series that cannot be held against each other" if count > 1 else ""
    scope = f"{runs}{kinds}" if count else "no run has a figure"
    yield f"{printable(history.recipe)} · {history.metric} · {scope}"
    if count:
        yield f"  {history_verdict(history)}; {_latest(history)}"
    for series in history.series:
        yield ""
        yield from _series_lines(series, history)
    if history.left_out:
        yield ""
        yield f"left out: {printable(_left_out(history))}"


def history_md(history: History) -> Iterator[str]:
    """The history as Markdown: a table of series, a table of changes."""
    yield f"**{md_text(history.recipe)}**, `{history.metric}`: {history_verdict(history)}."
    yield ""
    yield "| series | runs | now | scatter | findable change |"
    yield "|---|---:|---:|---:|---:|"
    for series in history.series:
        cells = (
            f"{md_text(series.name)} ({series.key or 'imported'})",
            str(series.n_runs),
            _figure(series.points[-1].level, history),
            "-" if series.noise is None else percent(series.noise, 2),
            "-" if series.findable is None else percent(series.findable),
        )
        yield f"| {' | '.join(cells)} |"
    for series in history.series:
        for note in filter(None, (_drift(series, history), *series.notes)):
            yield ""
            yield f"{md_text(series.name)}: {md_text(note)}"
    if history.left_out:
        yield ""
        yield f"Left out: {md_text(_left_out(history))}"
    changes = [change for series in history.series for change in series.changes]
    if not changes:
        return
    yield ""
    yield "| first run after | change | 95 % interval | before | after | runs | changed with it |"
    yield "|---|---:|---:|---:|---:|---:|---|"
    for change in changes:
        items = [f"{e.item} {e.before} → {e.after}" for e in change.environment[:MOST_ITEMS]]
        cells = (
            md_text(_day(change.date)),
            size(change, history.metric),
            interval_text(change),
            _figure(change.old_level, history),
            _figure(change.new_level, history),
            f"{change.n_before} / {change.n_after}",
            md_text("; ".join(items) or change.environment_note or ""),
        )
        yield f"| {' | '.join(cells)} |"


def history_rows(history: History) -> list[dict[str, Any]]:
    """One row for each value, with its series, its level and the change that begins with it."""
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


def size(change: LevelChange | SlowDrift, metric: str) -> str:
    """`2.1 % slower`; without a better direction `2.1 % higher`."""
    ratio, worse = change.ratio, change.worse
    if worse is None:
        return f"{percent(abs(ratio - 1))} {'higher' if ratio > 1 else 'lower'}"
    words = ("slower", "faster") if is_speed(metric) else ("worse", "better")
    return f"{percent(abs(ratio - 1))} {words[0] if worse else words[1]}"


def newest(history: History) -> RunSeries | None:
    """The series with the last run, None where there is none."""
    return max(history.series, key=lambda series: series.points[-1].date, default=None)


def _latest(history: History) -> str:
    """Where the newest series stands, and by which of its steps it came there."""
    series = newest(history)
    assert series is not None
    last = series.points[-1]
    now = f"now {_figure(last.level, history)}"
    if not series.changes:
        return now
    change = series.changes[-1]
    change_text = f"{size(change, history.metric)} ({interval_text(change)}, 95 %)"
    return f"{now}, {change_text} since {_day(change.date)}"


def _series_lines(series: RunSeries, history: History) -> Iterator[str]:
    key = f" · key {series.key}" if series.key else " · imported logs"
    yield f"{printable(series.name)}{key}"
    values = [point.value for point in series.points]
    low, high = _figure(min(values), history), _figure(max(values), history)
    reach = low if min(values) == max(values) else f"{low} to {high}"
    days = dict.fromkeys((_day(series.points[0].date), _day(series.points[-1].date)))
    yield f"  {sparkline(list(_levels(series)))}"
    yield f"  {reach} · {counted(series.n_runs, 'run')}, {' to '.join(days)}"
    for change in series.changes:
        yield from _change_lines(change, history)
    for note in (_drift(series, history), _nothing(series), _power(series), *series.notes):
        if note:
            yield f"  {printable(note)}"


def _change_lines(change: LevelChange, history: History) -> Iterator[str]:
    runs = f"{counted(change.n_before, 'run')} before, {change.n_after} after"
    yield (
        f"  {_day(change.date)}  {size(change, history.metric)} ({interval_text(change)}, 95 %): "
        f"{_figure(change.old_level, history)} -> {_figure(change.new_level, history)} · {runs}"
    )
    note = f" ({change.environment_note})" if change.environment and change.environment_note else ""
    if not change.environment:
        yield f"    {change.environment_note}"
        return
    span = f"between {_minute(change.date_before)} and {_minute(change.date)}"
    yield f"    changed {span}{note}:"
    shown = change.environment[:MOST_ITEMS]
    widest = max(len(printable(item.item)) for item in shown)
    for item in shown:
        also = "" if item.only_here else "  (differs at other times too)"
        values = f"{printable(item.before)} -> {printable(item.after)}"
        yield f"      {printable(item.item):{widest}}  {values}{also}"
    if len(change.environment) > len(shown):
        yield f"      and {len(change.environment) - len(shown)} more (--json has all)"


def _levels(series: RunSeries) -> Iterator[list[float]]:
    starts = {change.first_after for change in series.changes}
    level: list[float] = []
    for point in series.points:
        if point.runs[0] in starts:
            yield level
            level = []
        level.append(point.value)
    yield level


def _drift(series: RunSeries, history: History) -> str | None:
    if series.drift is None:
        return None
    reach = _spaced(f"{series.drift.low - 1:+.1%} to {series.drift.high - 1:+.1%}")
    change = size(series.drift, history.metric)
    return f"slow drift: the last value is {change} than the first ({reach}, 95 %)"


def _left_out(history: History) -> str:
    reasons = [
        f"{counted(len(names), 'run')} {reason}" for reason, names in history.left_out.items()
    ]
    return "; ".join(reasons)


def _nothing(series: RunSeries) -> str | None:
    if series.changes or series.drift:
        return None
    few = len(series.points) < 4
    return "too few runs for a step to be seen: it takes 2 on either side" if few else "no change"


def _days(series: RunSeries) -> str:
    """How far single runs lie apart, where days with several of them tell it."""
    known = series.scatter
    if known is None or known.n_runs == known.n_occasions:
        return ""
    within, between = percent(known.within, 2), percent(known.between, 2)
    return f" (single runs: {within} within a day, {between} between days)"


def _power(series: RunSeries) -> str | None:
    if series.noise is None or series.findable is None:
        return None
    scatter = f"scatter {percent(series.noise, 2)} from run to run{_days(series)}"
    if series.findable > USELESS:
        return f"{scatter}: too few values for so much scatter to find any change"
    return (
        f"{scatter}; a lasting change of {percent(series.findable)} at the last "
        f"{series.findable_points} values would be found in 9 of 10 cases"
    )


def history_verdict(history: History) -> str:
    """How many steps and drifts there are: `2 changes, 1 slow drift`."""
    changes = sum(len(series.changes) for series in history.series)
    drifts = sum(series.drift is not None for series in history.series)
    drifting = f", {counted(drifts, 'slow drift')}" if drifts else ""
    return f"{counted(changes, 'change') if changes else 'no step'}{drifting}"


def interval_text(change: LevelChange) -> str:
    """Both ends of the change: `+1.1 % to +2.3 %`."""
    low, high = sorted((change.low - 1, change.high - 1))
    return _spaced(f"{low:+.1%} to {high:+.1%}")


def _spaced(text: str) -> str:
    return text.replace("%", " %")


def _figure(value: float, history: History) -> str:
    return written(value, history.unit, 4)


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _day(date: str) -> str:
    return printable(date[:10])


def _minute(date: str) -> str:
    return printable(date[:16].replace("T", " "))
