"""Selection of the steps that a chart draws, and the range of its axis."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.core.run_report import RunReport
from paceline.core.steps import FloatColumn, IntColumn
from paceline.report.run_description import window_mask

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
