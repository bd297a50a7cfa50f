"""Parsed logs as text lines, table rows and step series."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import Any

from paceline.core.result import Metric, WindowRecord
from paceline.core.run import RunSettings
from paceline.core.steps import FLOATS, Steps
from paceline.core.text import one_line
from paceline.core.units import TERA, count, gib, percent, pluralize, significant
from paceline.logs.parsed_log import Disagreement, ParsedLog
from paceline.report.csv_table import csv_cell
from paceline.report.figures import format_value, interval_name, plus_minus, value_text
from paceline.report.run_description import describe_window_record

STEP_COLUMNS = ("step", *FLOATS, "averaged_over")
ROWS_PER_BLOCK = 10_000
DIGITS = 5


def log_row(log: ParsedLog | None) -> dict[str, Any]:
    """Return one log as a row of a table in base units; for None, a row without values."""
    metrics = log.metrics if log else {}
    times = log.step_time_s if log else None
    facts = log.settings if log else RunSettings()
    window = log.window if log else None
    flops = _value(metrics, "model_flops_per_s_per_device")
    step = metrics.get("step_time_s")
    return {
        "file": log.file if log else None,
        "engine": log.engine if log else None,
        "status": log.status if log else None,
        "n_steps": log.n_steps if log else None,
        "step_time_s": times.median if times else None,
        "step_time_mean_s": times.mean if times else None,
        "spread": step.spread if step else None,
        "n": times.n if times else None,
        "window": window.rule if window else None,
        "first_step": window.first_step if window else None,
        "last_step": window.last_step if window else None,
        "tokens_per_s": log.tokens_per_s if log else None,
        "samples_per_s": log.samples_per_s if log else None,
        "tflops_per_device": flops / TERA if flops is not None else None,
        "mfu": _value(metrics, "mfu"),
        "days_to_train": _value(metrics, "days_to_train"),
        "convention": facts.flops_convention if flops is not None else None,
        "reported_tflops_per_device": log.reported.get("tflops_per_device") if log else None,
        "reported_samples_per_s": log.reported.get("samples_per_s") if log else None,
        "device": facts.device,
        "num_devices": facts.num_devices,
        "dtype": facts.dtype,
        "global_batch": facts.global_batch or (window.global_batch if window else None),
        "seq_len": facts.seq_len,
        "findings": len(log.disagreements) if log else None,
        "warnings": "; ".join(log.warnings) if log else None,
        "reason": log.reason if log else None,
    }


def log_lines(log: ParsedLog, max_warnings: int | None = None) -> Iterator[str]:
    """Yield the terminal lines of one log, without control characters."""
    yield one_line(" · ".join([log.file, *_setup(log.settings, log.window)]))
    if log.status != "ok":
        yield one_line(f"  {log.status}: {log.reason}")
    if log.sources:
        yield f"  from the path: {', '.join(_from_path(log))}"
    yield from (f"  {line}" for line in _figures(log))
    for finding in log.disagreements:
        yield f"  ! {disagreement_text(finding)}"
    for warning in log.warnings[:max_warnings]:
        yield one_line(f"  warning: {warning}")
    if more := len(log.warnings[max_warnings:]) if max_warnings else 0:
        yield f"  {pluralize(more, 'more warning')}: --verbose"


def disagreement_text(finding: Disagreement) -> str:
    """Return a disagreement as one sentence."""
    scale = {"FLOP/s": 1 / TERA, "fraction": 100.0}.get(finding.unit, 1.0)
    unit = {"FLOP/s": " TFLOP/s", "fraction": "%"}.get(finding.unit, f" {finding.unit}")
    log_text, step_text = (
        f"{significant(value * scale, 4)}{unit}" for value in (finding.printed, finding.computed)
    )
    return (
        f"{finding.figure}: the log prints {log_text}, but its step times give {step_text} "
        f"(ratio {finding.ratio:.3f}): {finding.cause}"
    )


def step_rows(steps: Steps) -> list[dict[str, Any]]:
    """Return one mapping per step: None if the log has no value, `nan` if it printed NaN."""
    return [row for block in _blocks(steps) for row in block]


def step_json(file: str, status: str, steps: Steps) -> Iterator[str]:
    """Yield the steps as one JSON document with the log's name and status, in blocks."""
    yield json.dumps({"file": file, "status": status})[:-1] + ', "steps": ['
    before = "\n"
    for block in _blocks(steps):
        yield before + ",\n".join(map(json.dumps, block))
        before = ",\n"
    yield "\n]}"


def step_csv(steps: Steps, file: str | None, header: bool) -> Iterator[str]:
    """Yield the steps as CSV lines, in blocks."""
    names = STEP_COLUMNS if file is None else ("file", *STEP_COLUMNS)
    if header:
        yield ",".join(names) + "\n"
    for block in _blocks(steps):
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        for row in block:
            cells = [csv_cell(row[name]) for name in STEP_COLUMNS]
            writer.writerow(cells if file is None else [csv_cell(file), *cells])
        yield buffer.getvalue()


def _blocks(steps: Steps) -> Iterator[list[dict[str, Any]]]:
    for start in range(0, len(steps), ROWS_PER_BLOCK):
        part = steps.select(slice(start, start + ROWS_PER_BLOCK))
        columns = {name: [_cell(v) for v in part[name].tolist()] for name in FLOATS}
        averaged = part.averaged_over.tolist()
        yield [
            {"step": number, **{n: columns[n][row] for n in FLOATS}, "averaged_over": averaged[row]}
            for row, number in enumerate(part.index.tolist())
        ]


def _cell(value: float) -> float | str | None:
    if value != value:
        return None
    return "nan" if value in (float("inf"), float("-inf")) else float(f"{value:.9g}")


def _setup(facts: RunSettings, window: WindowRecord | None) -> Iterator[str]:
    if facts.engine:
        yield f"{facts.engine} log"
    if facts.recipe:
        yield facts.recipe
    n = facts.num_devices
    if facts.device:
        yield f"{n or 'unknown number of'} x {facts.device}"
    elif n:
        yield pluralize(n, "device")
    if facts.dtype:
        yield facts.dtype
    if facts.layout and n:
        yield facts.layout.label(n)
    if facts.seq_len:
        yield f"seq {facts.seq_len:,}"
    batch = facts.global_batch or (window.global_batch if window else None)
    if batch:
        yield f"global batch {pluralize(batch, 'sequence')}"


def _from_path(log: ParsedLog) -> Iterator[str]:
    """Yield the settings that only the log's path states."""
    for name in log.sources:
        value = getattr(log.settings, name)
        if name == "nominal_parameters":
            yield f"{count(value)} parameters"
        else:
            yield f"{name.replace('_', ' ')} {'yes' if value is True else value}"


def _figures(log: ParsedLog) -> Iterator[str]:
    metrics, window = log.metrics, log.window
    step = metrics.get("step_time_s")
    if step is not None and step.value is not None and window is not None:
        interval = plus_minus(step)
        interval_kind = f"; {interval_name(step)}" if interval else ""
        tax = metrics["jitter_overhead"].value
        of_median = tax and step.statistic == "median"
        mean = metrics["step_time_mean_s"].value if of_median else None
        mean_text = f", {significant(mean, DIGITS)} s mean" if mean is not None else ""
        value = (
            f"{significant(step.value, DIGITS)} s per step{mean_text}  {interval or ''}".rstrip()
        )
        yield f"{value}      {describe_window_record(window)}{interval_kind}"
    names = ("tokens_per_s", "samples_per_s")
    if log.tokens_per_s is None:
        names = ("tokens_per_s_per_device", "samples_per_s")
    rates = [_rate(metrics.get(name)) for name in names]
    flops, mfu = metrics.get("model_flops_per_s_per_device"), metrics.get("mfu")
    if flops is not None and flops.value is not None:
        hardware = metrics["hardware_flops_per_s_per_device"]
        has_own_convention = hardware.convention != flops.convention
        rates.append(
            ", ".join(map(_flops_text, [flops, hardware] if has_own_convention else [flops]))
        )
    if mfu is not None and mfu.value is not None:
        rates.append(f"MFU {percent(mfu.value)}")
    if shown_rates := [rate for rate in rates if rate]:
        yield " · ".join(shown_rates)
    days = metrics.get("days_to_train")
    if days is not None and days.value is not None:
        yield f"{value_text(days)} {days.note or ''}".rstrip()
    missing = flops.note if flops is not None and flops.value is None else None
    if missing:
        yield f"no FLOP/s: {missing}"
    elif mfu is not None and mfu.value is None and mfu.note:
        yield f"no MFU: {mfu.note}"
    if log.reported:
        yield f"reported by the log: {', '.join(_reported_figures(log.reported))}"


def _flops_text(metric: Metric) -> str:
    rate = None if metric.value is None else significant(metric.value / TERA, 4)
    return f"{rate} TFLOP/s per device ({metric.convention})"


def _rate(metric: Metric | None) -> str | None:
    return value_text(metric) if metric is not None and metric.value is not None else None


def _reported_figures(figures: dict[str, float]) -> Iterator[str]:
    """Yield the figures that the log itself reports."""
    for name, value in figures.items():
        words = name.removesuffix("_bytes").removesuffix("_per_s").replace("_", " ")
        if name.endswith("_bytes"):
            yield f"{words} {gib(value)}"
        elif name == "tflops_per_device":
            yield f"{significant(value, 4)} TFLOP/s per device"
        elif name == "tokens_per_s_per_device":
            yield f"{significant(value, 4)} tokens/s per device"
        elif name == "mfu":
            yield f"MFU {percent(value)}"
        elif name.endswith("_per_s"):
            yield f"{significant(value, 4)} {words}/s"
        elif name.endswith("_s"):
            yield f"{name.removesuffix('_s').replace('_', ' ')} {format_value(value, 's')}"
        else:
            yield f"{words} {count(value)}"


def _value(metrics: dict[str, Metric], name: str) -> float | None:
    return metrics[name].value if name in metrics else None
