"""The metrics as rows, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

from paceline.core.metrics import METRICS
from paceline.core.result import Metric, Result
from paceline.core.text import printable
from paceline.core.units import percent
from paceline.report.csv_table import csv_cell
from paceline.report.figures import interval_text, label, value_text, window_text
from paceline.report.markdown import md_text
from paceline.report.page import chip_label


@dataclass(frozen=True)
class MetricRow:
    """One metric with all that it takes to believe it; numbers raw, None = unknown."""

    name: str
    value: float | None
    unit: str
    n: int | None
    spread: float | None
    low: float | None
    high: float | None
    interval: str | None
    statistic: str | None
    window: str | None
    """Step numbers as the log prints them, both ends included."""
    window_rule: str | None
    convention: str | None
    source: str | None
    note: str | None


@dataclass(frozen=True)
class WrittenRow:
    """One metric as text for people; an empty string where there is nothing to say."""

    name: str
    label: str
    describes: str
    value: str
    known: bool
    interval: str
    spread: str
    n: str
    statistic: str
    window: str
    convention: str
    source: str
    note: str


def metric_rows(result: Result) -> list[MetricRow]:
    """One row per metric in the result's order; what is not finite counts as unknown."""
    return [_row(result, name, metric) for name, metric in result.metrics.items()]


def written_rows(result: Result) -> list[WrittenRow]:
    """The same rows as text; `interval_kinds` says what their intervals are."""
    return [_written(result, name, metric) for name, metric in result.metrics.items()]


def interval_kinds(result: Result) -> str:
    """What the intervals in the table are, with the method."""
    kinds = {m.interval for m in result.metrics.values() if m.interval and m.low is not None}
    return printable("; ".join(sorted(kinds)))


def metrics_csv(result: Result) -> str:
    """The metrics as CSV: full precision, fractions 0-1, text that no spreadsheet computes."""
    columns = [field.name for field in fields(MetricRow)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", "status", *columns])
    rows: Iterable[MetricRow | None] = metric_rows(result) or [None]
    for row in rows:
        cells = [None] * len(columns) if row is None else list(asdict(row).values())
        writer.writerow([csv_cell(cell) for cell in (result.run, result.status, *cells)])
    return text.getvalue()


def metrics_md(result: Result) -> str:
    """Run, verdict and the metrics table as Markdown."""
    chip, sentence = md_text(chip_label(result)), md_text(result.verdict.sentence)
    lines = [f"**{md_text(result.run)}**: {chip}. {sentence}"]
    if result.reason:
        lines += ["", f"Reason: {md_text(result.reason)}"]
    head = (
        "metric",
        "value",
        "95 % interval",
        "spread",
        "n",
        "statistic",
        "window",
        "convention",
        "source or note",
    )
    rows = [_md_cells(row) for row in written_rows(result)]
    if rows:
        lines += ["", _md_line(head), _md_line(["---"] * len(head)), *map(_md_line, rows)]
        lines += ["", f"Interval: {md_text(kinds)}."] if (kinds := interval_kinds(result)) else []
    return "\n".join(lines) + "\n"


def _row(result: Result, name: str, metric: Metric) -> MetricRow:
    return MetricRow(
        name=name,
        value=_finite(metric.value),
        unit=metric.unit,
        n=metric.n,
        spread=_finite(metric.spread),
        low=_finite(metric.low),
        high=_finite(metric.high),
        interval=metric.interval,
        statistic=metric.statistic,
        window=(window := window_text(result, name)),
        window_rule=result.window.rule if result.window and window else None,
        convention=metric.convention,
        source=metric.source,
        note=metric.note,
    )


def _written(result: Result, name: str, metric: Metric) -> WrittenRow:
    window = window_text(result, name)
    is_known, spread = _finite(metric.value) is not None, _finite(metric.spread)
    return WrittenRow(
        name=printable(name),
        label=label(name),
        describes=METRICS[name].describes if name in METRICS else "",
        value=value_text(metric),
        known=is_known,
        interval=interval_text(metric) or "",
        spread="" if spread is None else percent(spread, 2),
        n="" if metric.n is None else f"{metric.n:,}",
        statistic=printable(metric.statistic or ""),
        window=f"steps {window}" if window and window[0].isdigit() else window or "",
        convention=printable(metric.convention or ""),
        source=printable(metric.source or ""),
        note=printable(metric.note or "") if is_known else "",
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _md_cells(row: WrittenRow) -> list[str]:
    remark = "; ".join(part for part in (row.source, row.note) if part)
    cells = (
        row.value,
        row.interval,
        row.spread,
        row.n,
        row.statistic,
        row.window,
        row.convention,
        remark,
    )
    name = f"`{row.name}`" if re.fullmatch(r"[a-z0-9_]+", row.name) else md_text(row.name)
    return [name, *(md_text(cell) for cell in cells)]


def _md_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
