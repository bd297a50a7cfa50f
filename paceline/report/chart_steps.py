"""Which steps a chart draws, and where: thinning and the range of the axis."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.core.run_report import RunReport
from paceline.core.steps import FloatColumn, IntColumn
from paceline.report.run_description import window_mask

MAX_POINTS = 5000
"""More steps than this are thinned, which the chart says."""

MAX_BANDS = 4
"""Steps further than this many band half-widths from the median are drawn at the edge."""


@dataclass(frozen=True)
class ChartSteps:
    """The timed steps as they are drawn."""

    index: IntColumn
    times_s: FloatColumn
    """True step times."""
    drawn_s: FloatColumn
    """Step times moved to the edge of the axis where they lie beyond it."""
    in_window: npt.NDArray[np.bool_]
    num_steps: int
    """Timed steps before thinning."""
    centre_s: float
    """Median of the window, of all steps without one."""
    low_s: float
    high_s: float
    """What the axis spans."""

    @property
    def window_start(self) -> float:
        """Half a step before the window's first step."""
        return float(self.index[self.in_window][0]) - 0.5

    @property
    def window_end(self) -> float:
        """Half a step after the window's last step."""
        return float(self.index[self.in_window][-1]) + 0.5

    @property
    def num_beyond_axis(self) -> int:
        """Drawn steps that lie beyond the axis."""
        return int((self.times_s != self.drawn_s).sum())


def chart_steps(report: RunReport) -> ChartSteps | None:
    """The steps with a time, thinned and fitted to the axis; None when there are none."""
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
    """Rows to draw: all up to `most`, else the lowest and the highest of equal groups."""
    if len(values) <= max_rows:
        return np.arange(len(values))
    groups = np.array_split(np.arange(len(values)), max_rows // 2)
    picks = [rows[f(values[rows])] for rows in groups for f in (np.argmin, np.argmax)]
    return np.unique(np.array(picks, dtype=np.int64))


def axis_range(
    times: FloatColumn, centre_s: float, band_half_width: float | None
) -> tuple[float, float]:
    """Seconds that the axis spans: all steps, but at most EDGE_BANDS bands around the median."""
    low, high = float(times.min()), float(times.max())
    if band_half_width:
        low = max(low, centre_s - MAX_BANDS * band_half_width)
        high = min(high, centre_s + MAX_BANDS * band_half_width)
        low, high = (
            min(low, centre_s - 1.5 * band_half_width),
            max(high, centre_s + 1.5 * band_half_width),
        )
        low = max(low, 0.0)
    if high <= low:
        low, high = 0.99 * centre_s, 1.01 * centre_s
    return low, high


def band_half_width(report: RunReport) -> float | None:
    """Half-width of the window's band in seconds; None when too few steps make a window."""
    window = report.result.window
    return None if window is None or window.state in ("short", "none") else window.half_width_s
