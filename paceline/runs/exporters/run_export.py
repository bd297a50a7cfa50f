"""Settings, final figures and steps of a run, as exporters write them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from paceline.core.result import Metric, finite_value
from paceline.core.steps import Steps
from paceline.files.run_folder import read_record
from paceline.runs.outcome import evaluate

Scalar = str | int | float | bool


@dataclass(frozen=True)
class ExportedStep:
    """Known values of one step, and its end in seconds since 1970."""

    index: int
    time_unix: float
    values: dict[str, float]


@dataclass(frozen=True)
class RunExport:
    """Content of one exported run."""

    name: str
    status: str
    start_unix: float
    settings: dict[str, Scalar]
    """Known settings; fields of a nested setting are joined with a dot."""
    metrics: dict[str, Metric]
    """Metrics with a finite value."""
    steps: Steps

    @property
    def figures(self) -> dict[str, float]:
        """Final figures by metric, in base units."""
        values = {name: finite_value(metric) for name, metric in self.metrics.items()}
        return {name: value for name, value in values.items() if value is not None}

    def rows(self) -> Iterator[ExportedStep]:
        """Yield the steps in order; a step without a time ends with the one before it."""
        end = self.start_unix
        for row, index in enumerate(self.steps.index):
            values = {name: float(column[row]) for name, column in self.steps.columns.items()}
            finite = {name: value for name, value in values.items() if math.isfinite(value)}
            end += finite.get("step_time_s", 0.0)
            yield ExportedStep(int(index), end, finite)


def run_export(folder: Path) -> RunExport:
    """Read a run folder; raise UserError if it holds no run."""
    record, report = read_record(folder), evaluate(folder)
    created = datetime.fromisoformat(record.created).timestamp()
    settings = report.facts.model_dump(mode="json", exclude_none=True)
    metrics = report.result.metrics
    return RunExport(
        name=record.name,
        status=report.result.status,
        start_unix=record.launched_unix or created,
        settings=dict(_flat("", settings)),
        metrics={name: each for name, each in metrics.items() if finite_value(each) is not None},
        steps=report.steps,
    )


def _flat(prefix: str, value: object) -> Iterator[tuple[str, Scalar]]:
    if isinstance(value, dict):
        for name, member in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else str(name), member)
    elif isinstance(value, str | int | float | bool):
        yield prefix, value
    elif isinstance(value, list):
        yield prefix, ", ".join(map(str, value))
