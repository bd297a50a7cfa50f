"""Charts over steps: step times with their window, their distribution, and the loss."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import altair as alt
import numpy as np
import numpy.typing as npt

from paceline.core.run_report import RunReport
from paceline.core.steps import FloatColumn, IntColumn
from paceline.core.text import one_line
from paceline.core.units import pluralize
from paceline.core.window import MIN_STEADY
from paceline.report.figures import format_value
from paceline.report.run_description import describe_window, window_mask
from paceline.report.theme import TITLE_SEPARATOR, ChartTheme, chart_config

HEIGHT = 250
MAX_DOTS = 150
"""Maximum number of points that a line chart marks with dots."""
WARMUP, OUTSIDE, NO_WINDOW = "warm-up", "outside the window", "no window"
WINDOW = {
    "drifting": "window (drifting)",
    "uneven": "window (uneven)",
    "short": "window (too few steps)",
}
"""Names of windows that are not steady."""

WHOLE_LABELS = "datum.value % 1 ? '' : format(datum.value, ',d')"
"""Vega expression for labels of a logarithmic axis of integers, which has ticks below 1."""


def step_time_chart(report: RunReport, theme: ChartTheme) -> alt.LayerChart | None:
    """Return a chart of step time over step number, with warm-up, window band and median."""
    steps = chart_steps(report)
    if steps is None:
        return None
    layers = [*_ground(report, steps, theme), _points(report, steps, theme)]
    if steps.in_window.any():
        layers.append(_median_rule(steps, theme, [steps.window_start, steps.window_end]))
    return finish_chart(
        layers,
        theme,
        "Step times",
        [_window_sentence(report, steps), *_drawing_notes(steps)],
        HEIGHT,
        report.result.recipe,
    )


def step_time_histogram(report: RunReport, theme: ChartTheme) -> alt.LayerChart | None:
    """Return a histogram of the window's step times, or None below five steps."""
    steps = chart_steps(report)
    times = report.steps["step_time_s"][window_mask(report)]
    if steps is None or len(times) < MIN_STEADY:
        return None
    on_axis = np.clip(times, steps.low_s, steps.high_s)
    counts, edges = np.histogram(on_axis, bins=_bin_edges(on_axis))
    rows = [
        {"low": float(a), "high": float(b), "steps": int(c)}
        for a, b, c in zip(edges[:-1], edges[1:], counts, strict=True)
        if c
    ]
    bars = (
        alt.Chart(alt.Data(values=rows), name="bins")
        .mark_rect(color=theme.palette.steady, stroke=theme.background, strokeWidth=0.5)
        .encode(
            y=alt.Y("low:Q", title="step time (s)", scale=_scale(steps)),
            y2="high:Q",
            x=alt.X(
                "steps:Q",
                title="steps in the window (count)",
                axis=integer_axis(0, int(max(counts)), 4),
            ),
            x2=alt.datum(0),
            tooltip=[
                alt.Tooltip("low:Q", title="from (s)", format=".4~f"),
                alt.Tooltip("high:Q", title="to (s)", format=".4~f"),
                alt.Tooltip("steps:Q", title="steps"),
            ],
        )
    )
    p05, p95 = np.quantile(times, [0.05, 0.95])
    sentence = f"{describe_window(report.result)}; 5th to 95th percentile " + " to ".join(
        format_value(float(p), "s") for p in (p05, p95)
    )
    num_clipped = int((times != on_axis).sum())
    notes = (
        [f"{num_clipped} beyond the axis, included in the outermost bins"] if num_clipped else []
    )
    layers = [bars, _median_rule(steps, theme, [0, int(max(counts))])]
    narrow = replace(theme, width=theme.width // 2) if isinstance(theme.width, int) else theme
    recipe = report.result.recipe
    return finish_chart(layers, narrow, "Distribution", [sentence, *notes], HEIGHT, recipe)


def loss_chart(report: RunReport, theme: ChartTheme) -> alt.LayerChart | None:
    """Return a chart of training loss over step number, or None if no step has a loss."""
    finite = np.flatnonzero(np.isfinite(report.steps["loss"]))
    if not len(finite):
        return None
    values = report.steps["loss"][finite]
    rows = rows_to_draw(values)
    data = [
        {"step": int(i), "loss": float(v)}
        for i, v in zip(report.steps.index[finite][rows], values[rows], strict=True)
    ]
    metric = report.result.metrics.get("loss_last")
    unit = metric.unit if metric else "(as logged)"
    base = alt.Chart(alt.Data(values=data)).encode(
        x=_step_axis(report.steps.index[finite]),
        y=alt.Y("loss:Q", title=f"loss ({unit.strip('()')})", scale=value_scale(values)),
        tooltip=[alt.Tooltip("step:Q"), alt.Tooltip("loss:Q", format=".4f")],
    )
    line = base.mark_line(color=theme.palette.steady, strokeWidth=1.4)
    layers = [line]
    if len(data) <= MAX_DOTS:
        dots = base.properties(name="losses")
        layers.append(dots.mark_circle(color=theme.palette.steady, size=_dot_size(1), opacity=1))
    last = int(report.steps.index[finite[-1]])
    change = f"from {values[0]:.3f} to {values[-1]:.3f}" if len(values) > 1 else f"{values[0]:.3f}"
    sentence = f"{change} {unit} at step {last:,}"
    notes = _thinning_note(len(data), len(values))
    return finish_chart(layers, theme, "Loss", [sentence, *notes], 210, report.result.recipe)


def finish_chart(
    layers: list[alt.Chart],
    theme: ChartTheme,
    title: str,
    notes: list[str],
    height: int,
    subject: str = "",
) -> alt.LayerChart:
    """Return the layers as one chart with title, notes, size and Paceline's configuration.

    `subject` is the recipe, device or run of the chart, for the title.
    """
    title = f"{title}{TITLE_SEPARATOR}{one_line(subject)}" if subject else title
    lines = [line for note in notes for line in textwrap.wrap(note, _columns(theme))]
    heading = alt.TitleParams(text=title, subtitle=lines)
    chart = alt.layer(*layers)
    assert isinstance(chart, alt.LayerChart)
    chart = chart.properties(
        width=theme.width, height=height, title=heading, description=f"{title}. {' '.join(notes)}"
    )
    return chart.configure(**chart_config(theme), autosize={"type": "fit-x", "contains": "padding"})


def value_scale(values: Iterable[float]) -> alt.Scale:
    """Return a scale that spans the values, and at least MIN_RANGE of their median to both sides.

    Without the minimum, an axis would magnify noise until it looks like a difference.
    """
    numbers = [value for value in values if math.isfinite(value)]
    centre = float(np.median(numbers)) if numbers else 0.0
    low = min([*numbers, centre - MIN_RANGE * abs(centre)])
    high = max([*numbers, centre + MIN_RANGE * abs(centre)])
    margin = 0.05 * (high - low) or 1.0
    return alt.Scale(domain=[low - margin, high + margin], nice=False, zero=False)


def integer_axis(first: int, last: int, max_ticks: int = 8) -> alt.Axis:
    """Return an axis of integers with about `max_ticks` ticks."""
    if last - first < max_ticks:
        return alt.Axis(values=list(range(first, last + 1)), format=",d")
    return alt.Axis(tickMinStep=1, format=",d", tickCount=max_ticks)


def _columns(theme: ChartTheme) -> int:
    """Return how many characters fit on a line of notes; a page wraps them itself."""
    return 400 if theme.width == "container" else int(theme.width) // 6


def _points(report: RunReport, steps: ChartSteps, theme: ChartTheme) -> alt.Chart:
    phases = _phases(report, steps)
    rows: list[dict[str, Any]] = [
        {"step": int(i), "time": float(t), "shown": float(s), "phase": p, "edge": bool(t != s)}
        for i, t, s, p in zip(steps.index, steps.times_s, steps.drawn_s, phases, strict=True)
    ]
    palette = theme.palette
    colours = {
        WARMUP: palette.warmup,
        _window_name(report): palette.steady,
        OUTSIDE: palette.accent,
        NO_WINDOW: palette.steady,
    }
    present = [phase for phase in colours if phase in phases]
    return (
        alt.Chart(alt.Data(values=rows), name="steps")
        .mark_point(filled=True, opacity=1, size=_dot_size(len(rows)))
        .encode(
            x=_step_axis(steps.index),
            y=alt.Y("shown:Q", title="step time (s)", scale=_scale(steps)),
            color=alt.Color(
                "phase:N", scale=alt.Scale(domain=present, range=[colours[p] for p in present])
            ),
            shape=alt.Shape(
                "edge:N",
                scale=alt.Scale(domain=[False, True], range=["circle", "triangle-up"]),
                legend=None,
            ),
            tooltip=[
                alt.Tooltip("step:Q"),
                alt.Tooltip("time:Q", title="step time (s)", format=".4~f"),
                alt.Tooltip("phase:N"),
            ],
        )
    )


def _ground(report: RunReport, steps: ChartSteps, theme: ChartTheme) -> list[alt.Chart]:
    """Return the shaded warm-up and the band of the window, if there are any."""
    if not steps.in_window.any():
        return []
    layers: list[alt.Chart] = []
    first, last = steps.window_start, steps.window_end
    start = float(steps.index[0]) - 0.5
    if start < first:
        low, high = _domain(steps)
        area = {"step": start, "step2": first, "y": low, "y2": high}
        description = f"Warm-up: {pluralize(round(first - start), 'step')} before the window"
        layers.append(_rectangle("warmup", area, steps, theme.palette.shade, description))
    band = band_half_width(report)
    if band:
        area = {
            "step": first,
            "step2": last,
            "y": steps.centre_s - band,
            "y2": steps.centre_s + band,
        }
        description = (
            f"Window's band: {format_value(steps.centre_s, 's')} ± {format_value(band, 's')}"
        )
        layers.append(_rectangle("band", area, steps, theme.palette.band, description))
    return layers


def _rectangle(
    name: str, area: dict[str, float], steps: ChartSteps, colour: str, description: str
) -> alt.Chart:
    return (
        alt.Chart(alt.Data(values=[area]), name=name)
        .mark_rect(color=colour, clip=True, tooltip=None)
        .encode(
            x=_step_axis(steps.index),
            x2="step2:Q",
            y=alt.Y("y:Q", title="step time (s)", scale=_scale(steps)),
            y2="y2:Q",
            description=alt.value(description),
        )
    )


def _median_rule(steps: ChartSteps, theme: ChartTheme, ends: list[float]) -> alt.Chart:
    """Return a dashed line at the median between two x positions."""
    rows = [{"at": end, "median": steps.centre_s} for end in ends]
    return (
        alt.Chart(alt.Data(values=rows), name="median")
        .mark_line(color=theme.palette.ink, strokeWidth=1, strokeDash=[4, 3])
        .encode(
            x="at:Q",
            y=alt.Y("median:Q", scale=_scale(steps)),
            description=alt.value(f"Median: {format_value(steps.centre_s, 's')}"),
        )
    )


def _phases(report: RunReport, steps: ChartSteps) -> list[str]:
    window = report.result.window
    if window is None or window.first_step is None:
        return [NO_WINDOW] * len(steps.index)
    first, name = window.first_step, _window_name(report)
    return [
        name if inside else WARMUP if index < first else OUTSIDE
        for index, inside in zip(steps.index, steps.in_window, strict=True)
    ]


def _window_name(report: RunReport) -> str:
    window = report.result.window
    return WINDOW.get(window.state if window else "", "steady window")


def _window_sentence(report: RunReport, steps: ChartSteps) -> str:
    band = band_half_width(report)
    if not steps.in_window.any():
        return f"{pluralize(steps.num_steps, 'step')}, {describe_window(report.result)}"
    width = f", band ± {100 * band / steps.centre_s:.1f}%" if band else ""
    median = format_value(steps.centre_s, "s")
    return f"Dashed: median {median} of {describe_window(report.result)}{width}"


def _drawing_notes(steps: ChartSteps) -> list[str]:
    """Return notes about points that are on_axis to the axis or thinned."""
    notes: list[str] = []
    if steps.num_beyond_axis:
        slowest = format_value(float(steps.times_s.max()), "s")
        notes.append(
            f"▲ {steps.num_beyond_axis} beyond the axis, drawn at its edge. Slowest step: {slowest}"
        )
    return notes + _thinning_note(len(steps.index), steps.num_steps)


def _thinning_note(num_drawn: int, total: int) -> list[str]:
    if num_drawn == total:
        return []
    return [f"{num_drawn:,} of {total:,} steps drawn: the lowest and highest of equal groups"]


def _bin_edges(values: FloatColumn) -> FloatColumn:
    """Return the edges of 5 to 40 equal bins by the Freedman-Diaconis rule."""
    low, high = float(values.min()), float(values.max())
    if high <= low:
        return np.array([0.999 * low, 1.001 * low])
    q25, q75 = np.quantile(values, [0.25, 0.75])
    width = 2 * (q75 - q25) / len(values) ** (1 / 3)
    bins = 5 if width <= 0 else int(np.clip(np.ceil((high - low) / width), 5, 40))
    return np.linspace(low, high, bins + 1)


def _step_axis(index: IntColumn) -> alt.X:
    first, last = int(index[0]), int(index[-1])
    scale = alt.Scale(domain=[first - 0.5, last + 0.5], nice=False)
    return alt.X("step:Q", title="step (number)", axis=integer_axis(first, last), scale=scale)


def _domain(steps: ChartSteps) -> list[float]:
    margin = 0.05 * (steps.high_s - steps.low_s)
    return [max(steps.low_s - margin, 0.0), steps.high_s + margin]


def _scale(steps: ChartSteps) -> alt.Scale:
    return alt.Scale(domain=_domain(steps), nice=False, zero=False)


def _dot_size(count: int) -> int:
    return 34 if count <= 150 else 18 if count <= 1000 else 8


MAX_POINTS = 600
"""Maximum number of points in a chart. Longer series are thinned, and the chart says so."""

MIN_RANGE = 0.1
"""Minimum extent of the axis to both sides of the median, as a fraction of the median."""

MAX_BANDS = 4
"""Steps further from the median than this many half-widths of the band are drawn at the edge."""


@dataclass(frozen=True)
class ChartSteps:
    """Steps with a time, as a chart draws them."""

    index: IntColumn
    times_s: FloatColumn
    """Measured step times."""
    drawn_s: FloatColumn
    """Step times clipped to the axis."""
    in_window: npt.NDArray[np.bool_]
    num_steps: int
    """Number of steps with a time, before thinning."""
    centre_s: float
    """Median of the window, or of all steps without a window."""
    low_s: float
    high_s: float
    """Upper end of the axis; `low_s` is the lower end."""

    @property
    def window_start(self) -> float:
        """Position on the step axis where the window starts."""
        return float(self.index[self.in_window][0]) - 0.5

    @property
    def window_end(self) -> float:
        """Position on the step axis where the window ends."""
        return float(self.index[self.in_window][-1]) + 0.5

    @property
    def num_beyond_axis(self) -> int:
        """Number of drawn steps whose time is beyond the axis."""
        return int((self.times_s != self.drawn_s).sum())


def chart_steps(report: RunReport) -> ChartSteps | None:
    """Return the steps with a time, thinned and clipped to the axis, or None if there are none."""
    rows_with_time = np.flatnonzero(np.isfinite(report.steps["step_time_s"]))
    if not len(rows_with_time):
        return None
    times = report.steps["step_time_s"][rows_with_time]
    inside = window_mask(report)[rows_with_time]
    centre = float(np.median(times[inside] if inside.any() else times))
    low, high = axis_range(times, centre, band_half_width(report))
    rows = rows_to_draw(times)
    return ChartSteps(
        index=report.steps.index[rows_with_time][rows],
        times_s=times[rows],
        drawn_s=np.clip(times[rows], low, high),
        in_window=inside[rows],
        num_steps=len(rows_with_time),
        centre_s=centre,
        low_s=low,
        high_s=high,
    )


def rows_to_draw(values: FloatColumn, max_rows: int = MAX_POINTS) -> IntColumn:
    """Return the rows to draw: all, or the lowest and highest of equal groups above `max_rows`."""
    if len(values) <= max_rows:
        return np.arange(len(values))
    groups = np.array_split(np.arange(len(values)), max_rows // 2)
    picks = [rows[f(values[rows])] for rows in groups for f in (np.argmin, np.argmax)]
    return np.unique(np.array(picks, dtype=np.int64))


def axis_range(
    times: FloatColumn, centre_s: float, half_width_s: float | None
) -> tuple[float, float]:
    """Return the seconds that the axis spans.

    It shows all steps up to MAX_BANDS half-widths of the window's band around the median, and at
    least MIN_RANGE of the median to both sides, so that noise is not magnified.
    """
    low, high = float(times.min()), float(times.max())
    if half_width_s:
        low = max(low, centre_s - MAX_BANDS * half_width_s)
        high = min(high, centre_s + MAX_BANDS * half_width_s)
        low = min(low, centre_s - 1.5 * half_width_s)
        high = max(high, centre_s + 1.5 * half_width_s)
    low, high = min(low, (1 - MIN_RANGE) * centre_s), max(high, (1 + MIN_RANGE) * centre_s)
    return max(low, 0.0), high


def band_half_width(report: RunReport) -> float | None:
    """Return the half-width of the window's band in seconds; None for a window of too few steps."""
    window = report.result.window
    return None if window is None or window.state in ("short", "none") else window.half_width_s
