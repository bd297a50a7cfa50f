"""Charts over steps: step times with their window, their distribution, the loss."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import Any

import altair as alt
import numpy as np

from paceline.core.run_report import RunReport
from paceline.core.steps import FloatColumn, IntColumn
from paceline.core.text import one_line
from paceline.core.units import counted
from paceline.core.window import MIN_STEADY
from paceline.report.chart_steps import ChartSteps, band_s, chart_steps, thinned_rows
from paceline.report.figures import written
from paceline.report.run_description import describe_window, window_mask
from paceline.report.theme import WHOSE, Look, chart_config

HEIGHT = 250
WARMUP, OUTSIDE, NO_WINDOW = "warm-up", "outside the window", "no window"
WINDOW = {
    "drifting": "window (drifting)",
    "uneven": "window (uneven)",
    "short": "window (too few steps)",
}
"""What a window is called that is not simply steady."""

WHOLE_LABELS = "datum.value % 1 ? '' : format(datum.value, ',d')"
"""Labels of a logarithmic axis of whole numbers, whose ticks go below 1."""


def step_series(report: RunReport, look: Look) -> alt.LayerChart | None:
    """Step time over step number: one point per step, the warm-up's ground, band and median."""
    drawn = chart_steps(report)
    if drawn is None:
        return None
    layers = [*_ground(report, drawn, look), _points(report, drawn, look)]
    if drawn.in_window.any():
        layers.append(_median_rule(drawn, look, [drawn.window_start, drawn.window_end]))
    return finish(
        layers,
        look,
        "Step times",
        [_window_sentence(report, drawn), *_drawing_notes(drawn)],
        HEIGHT,
        report.result.recipe,
    )


def distribution(report: RunReport, look: Look) -> alt.LayerChart | None:
    """Histogram of the window's step times on the axis of the series; None below five steps."""
    drawn = chart_steps(report)
    times = report.steps["step_time_s"][window_mask(report)]
    if drawn is None or len(times) < MIN_STEADY:
        return None
    shown = np.clip(times, drawn.low_s, drawn.high_s)
    counts, edges = np.histogram(shown, bins=_bin_edges(shown))
    rows = [
        {"low": float(a), "high": float(b), "steps": int(c)}
        for a, b, c in zip(edges[:-1], edges[1:], counts, strict=True)
        if c
    ]
    bars = (
        alt.Chart(alt.Data(values=rows), name="bins")
        .mark_rect(color=look.palette.steady, stroke=look.background, strokeWidth=0.5)
        .encode(
            y=alt.Y("low:Q", title="step time (s)", scale=_scale(drawn)),
            y2="high:Q",
            x=alt.X(
                "steps:Q",
                title="steps in the window (count)",
                axis=whole_axis(0, int(max(counts)), 4),
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
        written(float(p), "s") for p in (p05, p95)
    )
    moved = int((times != shown).sum())
    notes = [f"{moved} beyond the axis, counted in the outermost bins"] if moved else []
    layers = [bars, _median_rule(drawn, look, [0, int(max(counts))])]
    narrow = replace(look, width=look.width // 2) if isinstance(look.width, int) else look
    whose = report.result.recipe
    return finish(layers, narrow, "Distribution", [sentence, *notes], HEIGHT, whose)


def loss(report: RunReport, look: Look) -> alt.LayerChart | None:
    """Training loss over step number; None when no step has one."""
    finite = np.flatnonzero(np.isfinite(report.steps["loss"]))
    if not len(finite):
        return None
    values = report.steps["loss"][finite]
    rows = thinned_rows(values)
    data = [
        {"step": int(i), "loss": float(v)}
        for i, v in zip(report.steps.index[finite][rows], values[rows], strict=True)
    ]
    metric = report.result.metrics.get("loss_last")
    unit = metric.unit if metric else "(as logged)"
    base = alt.Chart(alt.Data(values=data)).encode(
        x=_step_axis(report.steps.index[finite]),
        y=alt.Y("loss:Q", title=f"loss ({unit.strip('()')})", scale=alt.Scale(zero=False)),
        tooltip=[alt.Tooltip("step:Q"), alt.Tooltip("loss:Q", format=".4f")],
    )
    line = base.mark_line(color=look.palette.steady, strokeWidth=1.4)
    dots = base.properties(name="losses").mark_circle(
        color=look.palette.steady, size=_dot_size(len(data)), opacity=1
    )
    last = int(report.steps.index[finite[-1]])
    course = f"from {values[0]:.3f} to {values[-1]:.3f}" if len(values) > 1 else f"{values[0]:.3f}"
    sentence = f"{course} {unit} at step {last:,}"
    notes = _thinning_note(len(data), len(values))
    return finish([line, dots], look, "Loss", [sentence, *notes], 210, report.result.recipe)


def finish(
    layers: list[alt.Chart], look: Look, title: str, notes: list[str], height: int, whose: str = ""
) -> alt.LayerChart:
    """The layers as one chart with title, notes below it, size and the quiet configuration.

    `whose` names in the title the recipe, device or run that the chart shows.
    """
    title = f"{title}{WHOSE}{one_line(whose)}" if whose else title
    wrapped = [line for note in notes for line in textwrap.wrap(note, _columns(look))]
    heading = alt.TitleParams(text=title, subtitle=wrapped)
    chart = alt.layer(*layers)
    assert isinstance(chart, alt.LayerChart)
    chart = chart.properties(
        width=look.width, height=height, title=heading, description=f"{title}. {' '.join(notes)}"
    )
    return chart.configure(**chart_config(look), autosize={"type": "fit-x", "contains": "padding"})


def whole_axis(first: int, last: int, most: int = 8) -> alt.Axis:
    """An axis of whole numbers with about `most` ticks."""
    if last - first < most:
        return alt.Axis(values=list(range(first, last + 1)), format=",d")
    return alt.Axis(tickMinStep=1, format=",d", tickCount=most)


def _columns(look: Look) -> int:
    """Characters that fit on a line of notes; the page wraps them itself."""
    return 400 if look.width == "container" else int(look.width) // 6


def _points(report: RunReport, drawn: ChartSteps, look: Look) -> alt.Chart:
    phases = _phases(report, drawn)
    rows: list[dict[str, Any]] = [
        {"step": int(i), "time": float(t), "shown": float(s), "phase": p, "edge": bool(t != s)}
        for i, t, s, p in zip(drawn.index, drawn.times_s, drawn.shown_s, phases, strict=True)
    ]
    palette = look.palette
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
            x=_step_axis(drawn.index),
            y=alt.Y("shown:Q", title="step time (s)", scale=_scale(drawn)),
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


def _ground(report: RunReport, drawn: ChartSteps, look: Look) -> list[alt.Chart]:
    """The warm-up's shade and the window's band, each where there is one."""
    if not drawn.in_window.any():
        return []
    layers: list[alt.Chart] = []
    first, last = drawn.window_start, drawn.window_end
    start = float(drawn.index[0]) - 0.5
    if start < first:
        low, high = _domain(drawn)
        area = {"step": start, "step2": first, "y": low, "y2": high}
        description = f"Warm-up: {counted(round(first - start), 'step')} before the window"
        layers.append(_rectangle("warmup", area, drawn, look.palette.shade, description))
    band = band_s(report)
    if band:
        area = {
            "step": first,
            "step2": last,
            "y": drawn.centre_s - band,
            "y2": drawn.centre_s + band,
        }
        description = f"Window's band: {written(drawn.centre_s, 's')} ± {written(band, 's')}"
        layers.append(_rectangle("band", area, drawn, look.palette.band, description))
    return layers


def _rectangle(
    name: str, area: dict[str, float], drawn: ChartSteps, colour: str, description: str
) -> alt.Chart:
    return (
        alt.Chart(alt.Data(values=[area]), name=name)
        .mark_rect(color=colour, clip=True, tooltip=None)
        .encode(
            x=_step_axis(drawn.index),
            x2="step2:Q",
            y=alt.Y("y:Q", title="step time (s)", scale=_scale(drawn)),
            y2="y2:Q",
            description=alt.value(description),
        )
    )


def _median_rule(drawn: ChartSteps, look: Look, ends: list[float]) -> alt.Chart:
    """A thin line at the median between two x positions."""
    rows = [{"at": end, "median": drawn.centre_s} for end in ends]
    return (
        alt.Chart(alt.Data(values=rows), name="median")
        .mark_line(color=look.palette.ink, strokeWidth=1, strokeDash=[4, 3])
        .encode(
            x="at:Q",
            y=alt.Y("median:Q", scale=_scale(drawn)),
            description=alt.value(f"Median: {written(drawn.centre_s, 's')}"),
        )
    )


def _phases(report: RunReport, drawn: ChartSteps) -> list[str]:
    window = report.result.window
    if window is None or window.first_step is None:
        return [NO_WINDOW] * len(drawn.index)
    first, name = window.first_step, _window_name(report)
    return [
        name if inside else WARMUP if index < first else OUTSIDE
        for index, inside in zip(drawn.index, drawn.in_window, strict=True)
    ]


def _window_name(report: RunReport) -> str:
    window = report.result.window
    return WINDOW.get(window.state if window else "", "steady window")


def _window_sentence(report: RunReport, drawn: ChartSteps) -> str:
    band = band_s(report)
    if not drawn.in_window.any():
        return f"{counted(drawn.num_timed, 'step')}, {describe_window(report.result)}"
    width = f", band ± {100 * band / drawn.centre_s:.1f}%" if band else ""
    return (
        f"Dashed: median {written(drawn.centre_s, 's')} of {describe_window(report.result)}{width}"
    )


def _drawing_notes(drawn: ChartSteps) -> list[str]:
    """What the drawing does not show as it is: points at the edge, thinned points."""
    notes: list[str] = []
    if drawn.num_moved:
        slowest = written(float(drawn.times_s.max()), "s")
        notes.append(
            f"▲ {drawn.num_moved} beyond the axis, drawn at its edge; slowest step {slowest}"
        )
    return notes + _thinning_note(len(drawn.index), drawn.num_timed)


def _thinning_note(num_drawn: int, total: int) -> list[str]:
    if num_drawn == total:
        return []
    return [f"{num_drawn:,} of {total:,} steps drawn: the lowest and highest of equal groups"]


def _bin_edges(shown: FloatColumn) -> FloatColumn:
    """Between 5 and 40 equal bins by the Freedman-Diaconis width."""
    low, high = float(shown.min()), float(shown.max())
    if high <= low:
        return np.array([0.999 * low, 1.001 * low])
    q25, q75 = np.quantile(shown, [0.25, 0.75])
    width = 2 * (q75 - q25) / len(shown) ** (1 / 3)
    bins = 5 if width <= 0 else int(np.clip(np.ceil((high - low) / width), 5, 40))
    return np.linspace(low, high, bins + 1)


def _step_axis(index: IntColumn) -> alt.X:
    first, last = int(index[0]), int(index[-1])
    scale = alt.Scale(domain=[first - 0.5, last + 0.5], nice=False)
    return alt.X("step:Q", title="step (number)", axis=whole_axis(first, last), scale=scale)


def _domain(drawn: ChartSteps) -> list[float]:
    margin = 0.05 * (drawn.high_s - drawn.low_s)
    return [max(drawn.low_s - margin, 0.0), drawn.high_s + margin]


def _scale(drawn: ChartSteps) -> alt.Scale:
    return alt.Scale(domain=_domain(drawn), nice=False, zero=False)


def _dot_size(count: int) -> int:
    return 34 if count <= 150 else 18 if count <= 1000 else 8
