"""The page of a recipe's history: where it stands, its steps, and every series as a chart."""

from __future__ import annotations

from datetime import datetime

import altair as alt

from paceline.compare.over_time.timeline import History, LevelChange, RunSeries
from paceline.core.text import one_line
from paceline.core.units import counted, percent
from paceline.report.figures import written
from paceline.report.head import Card, PageHead, Tone, card, unknown_card
from paceline.report.html import render_page
from paceline.report.step_charts import finish
from paceline.report.theme import ON_PAGE, Look
from paceline.runs.history_text import (
    USELESS,
    history_lines,
    history_verdict,
    interval_text,
    newest,
    size,
)

HEIGHT = 240
CHANGE_HEADS = ("first run after", "change", "95 % interval", "before", "after", "runs", "with it")
SERIES_HEADS = ("series", "runs", "now", "scatter", "findable change")
MOST_SERIES = 24
MOST_ITEMS = 8


def history_html(history: History) -> str:
    """The page of one history; it opens without a network, and what a user wrote is escaped."""
    return render_page(
        "history.html.j2",
        _head(history),
        history_charts(history, ON_PAGE),
        change_heads=CHANGE_HEADS,
        changes=[_change_cells(each, history) for s in history.series for each in s.changes],
        series_heads=SERIES_HEADS,
        series=[_series_cells(series, history) for series in history.series],
        series_left_out=max(0, len(history.series) - MOST_SERIES),
        lines=[line for line in history_lines(history) if line],
    )


def history_charts(history: History, look: Look) -> dict[str, alt.LayerChart]:
    """A chart of each series that has more than one value, the first ones."""
    return {
        f"series-{at}": series_chart(series, history, look, at)
        for at, series in enumerate(history.series[:MOST_SERIES], start=1)
        if len(series.points) > 1
    }


def _head(history: History) -> PageHead:
    tone: Tone = "alert" if history.slowdowns else "good" if history.series else "plain"
    runs = sum(series.n_runs for series in history.series)
    latest = newest(history)
    sentences = []
    if latest is not None and latest.changes:
        sentences.append(_change_sentence(latest.changes[-1], history))
    return PageHead(
        eyebrow="runs over time",
        name=one_line(history.recipe),
        title=f"History of {one_line(history.recipe)}",
        chip=history_verdict(history) if history.series else "no run has a figure",
        tone=tone,
        setup=(history.metric, counted(runs, "run"), f"margin {percent(history.margin, 2)}"),
        sentences=tuple(sentences),
        cards=history_cards(history),
    )


def history_cards(history: History) -> tuple[Card, ...]:
    """Where the newest series stands, its last change, its scatter, and how many runs there are."""
    series = newest(history)
    left_out = [f"{counted(len(runs), 'run')} {why}" for why, runs in history.left_out.items()]
    if series is None:
        why = "no run has a figure"
        labels = ("Now", "Last change", "Scatter")
        runs = card("Runs", "0", "", left_out)
        return (*(unknown_card(label, why) for label in labels), runs)
    count = sum(each.n_runs for each in history.series)
    last = series.points[-1]
    return (
        card(
            f"{history.metric} now",
            written(last.level, history.unit, 4),
            "",
            ["level of the newest series", f"last run {last.date[:10]}", series.name],
        ),
        _change_card(series, history),
        _scatter_card(series),
        card(
            "Runs",
            f"{count:,}",
            "",
            [
                "in one series"
                if len(history.series) == 1
                else f"in {len(history.series)} series that cannot be held against each other",
                f"the newest since {series.points[0].date[:10]}",
                *left_out,
            ],
        ),
    )


def _change_card(series: RunSeries, history: History) -> Card:
    if series.changes:
        change = series.changes[-1]
        items = [each.item for each in change.environment]
        cause = f"changed with it: {', '.join(items[:MOST_ITEMS])}" if items else None
        return card(
            "Last change",
            size(change, history.metric),
            f"{interval_text(change)} (95 %)",
            [
                f"on {change.date[:10]}",
                f"{counted(change.n_before, 'run')} before, {change.n_after} after",
                cause or change.environment_note,
            ],
        )
    if series.drift is not None:
        return card("Slow drift", size(series.drift, history.metric), "", ["last against first"])
    if len(series.points) < 4:
        return unknown_card("Last change", "too few runs: it takes 2 on either side")
    return card("Last change", "none", "", [f"no step beyond {percent(history.margin, 2)}"])


def _scatter_card(series: RunSeries) -> Card:
    if series.noise is None:
        return unknown_card("Scatter", "too few runs")
    power = None
    if series.findable is not None and series.findable > USELESS:
        power = "too few values for so much scatter to find any change"
    elif series.findable is not None:
        power = (
            f"a change of {percent(series.findable)} at the last {series.findable_points} values "
            "would be found in 9 of 10 cases"
        )
    return card("Scatter", percent(series.noise, 2), "from run to run", [power])


def series_chart(series: RunSeries, history: History, look: Look, at: int = 1) -> alt.LayerChart:
    """Every value over its time, the levels as a line, steps as rules."""
    rows = [
        {
            "date": _moment(point.date),
            "value": point.value,
            "level": point.level,
            "run": one_line(", ".join(point.runs)),
        }
        for point in series.points
    ]
    title = f"{history.metric} ({history.unit})"
    palette = look.palette
    x = alt.X(
        "date:T",
        title="run made on (UTC)",
        axis=alt.Axis(tickCount=6, labelOverlap=True, format="%m-%d %H:%M"),
        scale=alt.Scale(type="utc", padding=14),
    )
    base = alt.Chart(alt.Data(values=rows)).encode(x=x)
    scale = alt.Scale(zero=False, padding=14)
    level = (
        base.properties(name="levels")
        .mark_line(color=palette.ink, strokeDash=[4, 3], strokeWidth=1.2, interpolate="step-after")
        .encode(y=alt.Y("level:Q", title=title, scale=scale))
    )
    dots = (
        base.properties(name="values")
        .mark_circle(opacity=0.85, size=60, color=palette.steady)
        .encode(
            y=alt.Y("value:Q", title=title, scale=scale),
            tooltip=[
                alt.Tooltip("run:N"),
                alt.Tooltip("date:T", format="%Y-%m-%d %H:%M"),
                alt.Tooltip("value:Q", title=title, format=".5~g"),
            ],
        )
    )
    layers = [level, dots, *_change_layers(series, history, x, look)]
    note = "Dot: a run, or the median of its repeats. Dashed: the level without scatter."
    note += " Orange: a change of the level." if series.changes else ""
    several = len({each.name for each in history.series}) < len(history.series)
    whose = f"{series.name}, series {at}" if several else series.name
    return finish(layers, look, f"{history.metric} over time", [note], HEIGHT, whose)


def _change_layers(series: RunSeries, history: History, x: alt.X, look: Look) -> list[alt.Chart]:
    """A rule at each change of the level, with its size."""
    if not series.changes:
        return []
    rows = [
        {"date": _moment(change.date), "text": size(change, history.metric)}
        for change in series.changes
    ]
    base, accent = alt.Chart(alt.Data(values=rows)).encode(x=x), look.palette.accent
    return [
        base.properties(name="steps").mark_rule(color=accent, strokeWidth=1.2),
        base.properties(name="sizes")
        .mark_text(color=accent, align="right", dx=-6, fontWeight="bold")
        .encode(y=alt.value(6), text="text:N"),
    ]


def _moment(date: str) -> str:
    """An ISO time that Vega reads as UTC; what has no zone is taken as UTC."""
    try:
        moment = datetime.fromisoformat(date)
    except ValueError:
        return date
    return moment.isoformat() if moment.tzinfo else f"{moment.isoformat()}Z"


def _change_sentence(change: LevelChange, history: History) -> str:
    before, after = (written(x, history.unit, 4) for x in (change.old_level, change.new_level))
    return (
        f"{size(change, history.metric).capitalize()} since {change.date[:10]}: {before} before, "
        f"{after} after ({interval_text(change)}, 95 %)."
    )


def _change_cells(change: LevelChange, history: History) -> list[str]:
    items = [f"{e.item} {e.before} → {e.after}" for e in change.environment[:MOST_ITEMS]]
    return [
        one_line(change.date[:10]),
        size(change, history.metric),
        interval_text(change),
        written(change.old_level, history.unit, 4),
        written(change.new_level, history.unit, 4),
        f"{change.n_before} / {change.n_after}",
        one_line("; ".join(items) or change.environment_note or ""),
    ]


def _series_cells(series: RunSeries, history: History) -> list[str]:
    findable = series.findable
    return [
        one_line(series.name) + (f" ({series.key})" if series.key else " (imported)"),
        f"{series.n_runs:,}",
        written(series.points[-1].level, history.unit, 4),
        "-" if series.noise is None else percent(series.noise, 2),
        "-" if findable is None or findable > USELESS else percent(findable),
    ]
