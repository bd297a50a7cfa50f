"""The final figures of a run as OpenMetrics text."""

from __future__ import annotations

from pathlib import Path

from paceline.files.documents import write_output
from paceline.report.openmetrics import Gauge, openmetrics_text
from paceline.runs.exporters.run_export import RunExport


def write(run: RunExport, out: Path) -> None:
    """Write `run` to the file `out`."""
    settings = {name: run.settings.get(name) for name in ("recipe", "engine", "device", "dtype")}
    labels = {"run": run.name, **{name: str(v) for name, v in settings.items() if v is not None}}
    state = Gauge("run_info", 1.0, "Status of the run.", {**labels, "status": run.status})
    start = Gauge("run_start_seconds", run.start_unix, "Start of the run, Unix time.", labels)
    figures = [
        Gauge(f"run_{name}", metric.value, f"Metric {name} of the run in {metric.unit}.", labels)
        for name, metric in run.metrics.items()
    ]
    write_output(out, openmetrics_text([state, start, *figures]))
