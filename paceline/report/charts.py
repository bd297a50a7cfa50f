"""Charts of one run, and their files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from io import BytesIO, StringIO
from pathlib import Path

import altair as alt

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.run_report import RunReport
from paceline.files.temporary import replaced_file
from paceline.report import machine_charts, step_charts, waterfall
from paceline.report.theme import EXPORT, ChartTheme

CHARTS: dict[str, Callable[[RunReport, ChartTheme], alt.LayerChart | None]] = {
    "step-times": step_charts.step_time_chart,
    "distribution": step_charts.step_time_histogram,
    "ranks": machine_charts.rank_chart,
    "loss": step_charts.loss_chart,
    "memory": machine_charts.peak_memory_chart,
    "memory-parts": machine_charts.memory_by_part_chart,
    "waterfall": waterfall.run_waterfall_chart,
    "references": machine_charts.reference_chart,
}
"""Charts in the page's order; each returns None when the run has no data for it."""

FORMATS = ("svg", "png")
PIXELS_PER_UNIT = 2


def run_charts(report: RunReport, theme: ChartTheme) -> dict[str, alt.LayerChart]:
    """Return the charts that the run has data for, by name."""
    charts = {name: draw(report, theme) for name, draw in CHARTS.items()}
    return {name: chart for name, chart in charts.items() if chart is not None}


def save_chart(chart: alt.LayerChart, path: Path) -> Path:
    """Write one chart as .svg or .png (two pixels per unit), depending on the path's suffix."""
    form = path.suffix.removeprefix(".")
    if form not in FORMATS:
        raise UserError(str(path), "is not a chart format", allowed=", ".join(FORMATS))
    try:
        buffer = StringIO() if form == "svg" else BytesIO()
        chart.save(buffer, format=form, scale_factor=PIXELS_PER_UNIT if form == "png" else 1)
        content = buffer.getvalue()
        with replaced_file(path) as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise SystemFaultError(str(path), f"cannot be written: {error.strerror}") from error
    return path


def save_charts(report: RunReport, folder: Path, formats: Iterable[str] = FORMATS) -> list[Path]:
    """Write every chart of the run into `folder`, one file per format, and return the paths."""
    return save_all(run_charts(report, EXPORT), folder, formats)


def save_all(
    charts: Mapping[str, alt.LayerChart], folder: Path, formats: Iterable[str] = FORMATS
) -> list[Path]:
    """Write charts into `folder` as NAME.FORMAT and return the paths."""
    return [
        save_chart(chart, folder / f"{name}.{form}")
        for form in formats
        for name, chart in charts.items()
    ]
