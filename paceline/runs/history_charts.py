"""Charts of a recipe's history: every value, the level, and step changes."""

from __future__ import annotations

from datetime import datetime

import altair as alt

from paceline.compare.over_time.step_changes import History, RunSeries, change_text
from paceline.core.text import one_line
from paceline.report.step_charts import finish_chart
from paceline.report.theme import ChartTheme

HEIGHT = 240


def history_charts(
    history: History, theme: ChartTheme, limit: int | None = None
) -> dict[str, alt.LayerChart]:
    """Return a chart of each of the first `limit` series that has more than one value."""
    return {
        f"series-{at}": series_chart(series, history, theme, at)
        for at, series in enumerate(history.series[:limit], start=1)
        if len(series.points) > 1
    }


def series_chart(
    series: RunSeries, history: History, theme: ChartTheme, at: int = 1
) -> alt.LayerChart:
    """Return a chart of the values over time, with levels as a line and step changes as rules."""
    rows = [
        {
            "date": _utc_time(point.date),
            "value": point.value,
            "level": point.level,
            "run": one_line(", ".join(point.runs)),
        }
        for point in series.points
    ]
    title = f"{history.metric} ({history.unit})"
    palette = theme.palette
    x = alt.X(
        "date:T",
        title="date of the run (UTC)",
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
    layers = [level, dots, *_change_layers(series, history, x, theme)]
    note = "Dot: a run, or the median of its repeats. Dashed: the fitted level."
    note += " Orange: a step change." if series.changes else ""
    has_same_names = len({each.name for each in history.series}) < len(history.series)
    subtitle = f"{series.name}, series {at}" if has_same_names else series.name
    return finish_chart(layers, theme, f"{history.metric} over time", [note], HEIGHT, subtitle)


def _change_layers(
    series: RunSeries, history: History, x: alt.X, theme: ChartTheme
) -> list[alt.Chart]:
    """Return a rule at each step change, with its size."""
    if not series.changes:
        return []
    rows = [
        {"date": _utc_time(change.date), "text": change_text(change, history.metric)}
        for change in series.changes
    ]
    base, accent = alt.Chart(alt.Data(values=rows)).encode(x=x), theme.palette.accent
    return [
        base.properties(name="steps").mark_rule(color=accent, strokeWidth=1.2),
        base.properties(name="sizes")
        .mark_text(color=accent, align="right", dx=-6, fontWeight="bold")
        .encode(y=alt.value(6), text="text:N"),
    ]


def _utc_time(date: str) -> str:
    """Return an ISO time that Vega reads as UTC; a time without a zone is UTC."""
    try:
        moment = datetime.fromisoformat(date)
    except ValueError:
        return date
    return moment.isoformat() if moment.tzinfo else f"{moment.isoformat()}Z"
