"""Figures of a log: computed from its step times, printed by the log, and their disagreements."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log10
from statistics import median

import numpy as np

from paceline.core.metrics import METRICS, measure
from paceline.core.result import Metric, WindowRecord
from paceline.core.run import RunSettings
from paceline.core.stats import Summary, printed_step_s, summarize
from paceline.core.steps import Step, Steps
from paceline.core.timed_run import TimedRun, timed_run
from paceline.core.units import TERA
from paceline.core.window import Window, uneven_warning
from paceline.engines.log_reading.log_content import LogContent, LogFormat
from paceline.logs.completion import completed_steps
from paceline.logs.disagreement import (
    RUNNING_AVERAGE,
    PrintedFigure,
    find_disagreements,
    last_digit,
    peak_doubt,
)
from paceline.logs.parsed_log import Disagreement
from paceline.machines.placement import find_device

COARSE = 0.005
"""Resolution of printed step times, relative to the step, above which a warning is given."""

JITTER_WARNING = 0.1
PARTIAL, FULL = 0.2, 0.999
"""Bounds on the mean batch, relative to the full batch. Partial last batches of epochs may lower
the mean by up to `PARTIAL`; from `FULL` on it counts as the full batch."""

MAX_DIGIT_LINES = 1000
"""Maximum number of lines, from the start of a window, whose printed digits are counted."""

SPARSE = 2.0
"""Ratio of sparse to dense peak, equal on every device with structured sparsity."""

PRINTED_COLUMNS = {
    "samples_per_s": ("samples_per_s", 1.0),
    "flops_per_s_per_device": ("tflops_per_device", 1 / TERA),
    "tokens_per_s_per_device": ("tokens_per_s_per_device", 1.0),
    "mfu": ("mfu", 1.0),
    "allocated_bytes": ("memory_allocated_bytes", 1.0),
    "reserved_bytes": ("memory_reserved_bytes", 1.0),
}
"""Column of the log -> name and scale of the reported figure."""


@dataclass(frozen=True)
class LogFigures:
    """All figures of a window of a log."""

    times: Summary
    metrics: dict[str, Metric]
    reported_figures: dict[str, float]
    disagreements: tuple[Disagreement, ...]
    conventions: dict[str, str]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class SingleFigure:
    """A run whose log prints one throughput, as one step of the window `as printed`."""

    steps: Steps
    """One step with the mean step time; none if the batch is unknown."""
    window: Window
    rates: dict[str, Metric]
    """Printed rates; the only figures without a batch."""


def figures_of(
    facts: RunSettings,
    steps: Steps,
    window: Steps,
    log: LogContent,
    printed: bool = False,
    uneven: bool = False,
) -> LogFigures:
    """Return the figures of a window of timed steps.

    `printed` = the window is the log's one figure for the run. `uneven` = step time is not
    stationary, so the mean step is used.
    """
    run = log_run(facts, steps, window, uneven, log.resolution_s)
    metrics = measure(run)
    if printed:
        metrics = {name: _as_printed(name, metric) for name, metric in metrics.items()}
    metrics |= _printed_memory(log, metrics)
    log_figures = reported_figures(window, log)
    device = facts.device or "unknown"
    return LogFigures(
        times=run.times,
        metrics=metrics,
        reported_figures=log_figures,
        disagreements=find_disagreements(
            facts, _printed_figures(run, log_figures), _other_rates(log)
        ),
        conventions={
            "flops": facts.flops_convention or "unknown",
            "peak": f"dense data-sheet peak of one {device}",
            "step_time": "mean of the whole run, as printed"
            if printed
            else f"{run.statistic} of the window",
            "tokens": "real tokens where the recipe states the padding, else every position",
        },
        warnings=tuple(_warnings(run, log, printed, log_figures)),
    )


def figures_without_batch(
    facts: RunSettings,
    window: Steps,
    log: LogContent,
    rates: dict[str, Metric],
    printed: bool,
    uneven: bool = False,
) -> LogFigures | None:
    """Return the figures of a log that prints a throughput and no batch, for a batch of one sample.

    Step times are left out. Returns None if not even the time per sample is known.
    """
    of_one = facts.model_copy(update={"global_batch": 1})
    if printed and "samples_per_s" in rates:
        window = Steps.of([Step(0, step_time_s=1 / (rates["samples_per_s"].value or 1))])
    timed_steps = completed_steps(window, of_one, log)
    if not timed_steps.known("step_time_s"):
        return None
    finite = np.isfinite(timed_steps["step_time_s"])
    if not finite.all():  # select() copies all columns, which is costly for a long log.
        timed_steps = timed_steps.select(finite)
    figures = figures_of(of_one, timed_steps, timed_steps, log, printed, uneven)
    metrics = {
        name: m for name, m in figures.metrics.items() if METRICS[name].needs == "any figure"
    }
    return replace(figures, metrics=metrics | rates)


def log_run(
    facts: RunSettings, steps: Steps, window: Steps, uneven: bool = False, resolution_s: float = 0.0
) -> TimedRun:
    """Return the log as a timed run, from which metrics are computed.

    `resolution_s` is the resolution of printed times in seconds, 0 if unknown. It is raised if all
    times end at a coarser decimal.
    """
    device = find_device(facts.device) if facts.device else None
    peak = device.peaks.get(facts.dtype) if device and facts.dtype else None
    return timed_run(
        facts,
        steps,
        window,
        peak_flops_per_s=peak.flops_per_s if peak else None,
        peak_source=peak.source if peak else None,
        uneven=uneven,
        resolution_s=max(resolution_s, printed_step_s(window["step_time_s"])),
    )


def single_figure(
    log: LogContent, facts: RunSettings, kind: LogFormat, steps: Steps, rule: str | None
) -> SingleFigure | None:
    """Return the log's one figure for the run, if its log format reports one or has no step times.

    Returns None if a rule selects steps, or if there are only steps.
    """
    rates = printed_rates(log, facts)
    has_steps = steps.known("step_time_s")
    per_s = log.figures.get("steps_per_s")
    if not (rates or per_s) or (has_steps and (rule is not None or not kind.whole_run)):
        return None
    samples = rates["samples_per_s"].value if "samples_per_s" in rates else None
    batch = facts.global_batch
    time = 1 / per_s if per_s else batch / samples if batch and samples else None
    number = int(log.figures.get("timed_steps", 0))
    mean_batch = _mean_batch(batch, samples, time)
    mean_step = (
        [Step(number, step_time_s=time, global_batch=mean_batch, seq_len=facts.seq_len)]
        if time
        else []
    )
    record = WindowRecord(
        rule="as printed",
        first_step=None,
        last_step=None,
        n=1,
        n_warmup=0,
        state="short",
        global_batch=batch,
        seq_len=facts.seq_len,
    )
    return SingleFigure(Steps.of(mean_step), Window(slice(0, len(mean_step)), record), rates)


def _mean_batch(
    batch: int | None, samples_per_s: float | None, time_s: float | None
) -> float | None:
    """Return the samples of the mean step: printed rate x time, unless that contradicts the batch.

    The last batch of an epoch may be partial, which makes the mean slightly smaller.
    """
    if not (samples_per_s and time_s):
        return batch
    mean = samples_per_s * time_s
    return mean if batch is None or FULL - PARTIAL <= mean / batch < FULL else batch


def printed_rates(log: LogContent, facts: RunSettings) -> dict[str, Metric]:
    """Return printed samples/s and tokens/s, each derived from the other if the log prints one."""
    samples, tokens = log.figures.get("samples_per_s"), log.figures.get("tokens_per_s")
    per_s, batch, length = log.figures.get("steps_per_s"), facts.global_batch, facts.seq_len
    if samples is None and per_s and batch:
        samples = per_s * batch
    if samples is None and tokens is not None and length:
        samples = tokens / length
    if tokens is None and samples is not None and length:
        tokens = samples * length
    rates = {"samples_per_s": (samples, "samples/s"), "tokens_per_s": (tokens, "tokens/s")}
    return {
        name: Metric(value=value, unit=unit, n=1, statistic="as printed")
        for name, (value, unit) in rates.items()
        if value is not None and value > 0
    }


def rates_of(facts: RunSettings, window: Steps, uneven: bool = False) -> dict[str, Metric]:
    """Return the rates that step lines print, as medians over the window.

    `tokens_per_s` is the total of all devices. For an uneven window the rate is that of the mean
    step, the harmonic mean n / sum(1 / r).
    """
    n = facts.num_devices
    columns = (
        ("samples_per_s", "samples_per_s", 1, "samples/s"),
        ("tokens_per_s", "tokens_per_s_per_device", n, "tokens/s"),
        ("tokens_per_s_per_device", "tokens_per_s_per_device", 1, "tokens/s/device"),
    )
    rates: dict[str, Metric] = {}
    for name, column, factor, unit in columns:
        values = window[column]
        sound = np.isfinite(values) & (values > 0)
        if factor and sound.any():
            # Only what has to be is copied: a long log has millions of values.
            values = values if sound.all() else values[sound]
            values = values if factor == 1 else values * factor
            rate = summarize(values)
            typical = 1 / float(np.mean(1 / values)) if uneven else rate.median
            rates[name] = Metric(
                value=_plain(typical),
                unit=unit,
                n=rate.n,
                spread=rate.relative_spread,
                statistic=f"{'harmonic mean' if uneven else 'median'} of the printed rates",
            )
    return rates


def _as_printed(name: str, metric: Metric) -> Metric:
    """Return a metric of a run of which only a mean is known."""
    if METRICS[name].needs == "many steps":
        return Metric(value=None, unit=metric.unit, note="the log prints one figure for the run")
    if metric.statistic is None and metric.spread is None:
        return metric
    return metric.model_copy(update={"statistic": "as printed", "spread": None})


def reported_figures(window: Steps, log: LogContent) -> dict[str, float]:
    """Return the log's own figures: medians over the window, and values printed once."""
    figures: dict[str, float] = {}
    for column, (name, scale) in PRINTED_COLUMNS.items():
        values = window[column]
        finite = values[np.isfinite(values)]
        if len(finite):
            figures[name] = _plain(float(np.median(finite)) * scale)
    for name, value in log.figures.items():
        figures[name] = value
    for kind, value in log.memory_bytes.items():
        figures[f"memory_{kind}_bytes"] = max(value, figures.get(f"memory_{kind}_bytes", 0.0))
    flops = figures.pop("flops_per_s_per_device", None)
    return figures if flops is None else {**figures, "tflops_per_device": flops / TERA}


def _printed_memory(log: LogContent, metrics: dict[str, Metric]) -> dict[str, Metric]:
    """Return memory peaks that the log prints outside its step lines."""
    return {
        f"memory_{kind}_bytes": Metric(value=value, unit="bytes", statistic="max")
        for kind, value in log.memory_bytes.items()
        if f"memory_{kind}_bytes" in metrics and metrics[f"memory_{kind}_bytes"].value is None
    }


def _printed_figures(run: TimedRun, reported_values: dict[str, float]) -> list[PrintedFigure]:
    """Return the printed figures that have a computed counterpart."""
    batch, length, n = run.global_batch, run.seq_len, run.facts.num_devices
    samples = batch / run.typical_step_s if batch else None
    tokens = samples * length / n if samples and length and n else None
    flops = run.flops_per_s_per_device
    peak = run.peak_flops_per_s
    share = flops / peak if flops and peak else None
    rows = (
        ("samples_per_s", samples, "samples/s", "samples_per_s"),
        ("running_samples_per_s", samples, "samples/s", None),
        ("tokens_per_s_per_device", tokens, "tokens/s", "tokens_per_s_per_device"),
        ("trained_tokens_per_s_per_device", tokens, "tokens/s", None),
        ("tflops_per_device", flops, "FLOP/s", "flops_per_s_per_device"),
        ("mfu", share, "fraction", "mfu"),
    )
    return [
        PrintedFigure(
            figure,
            reported_values[figure] * (TERA if unit == "FLOP/s" else 1),
            computed,
            unit,
            SPARSE if unit == "fraction" else None,
            _rounding(run, column) if column else None,
        )
        for figure, computed, unit, column in rows
        if reported_values.get(figure)
        and computed
        and not _is_part(figure, reported_values, computed)
    ]


def _is_part(figure: str, reported_values: dict[str, float], computed: float) -> bool:
    """Return whether a figure of trained tokens is no more than that of all tokens."""
    return figure.startswith("trained_") and reported_values[figure] <= computed


def _other_rates(log: LogContent) -> dict[str, float]:
    """Return the samples per second that the log's possible mistakes would print."""
    running = log.figures.get("running_samples_per_s")
    return {RUNNING_AVERAGE: running, **log.other_rates} if running else log.other_rates


def _rounding(run: TimedRun, column: str) -> float | None:
    """Return half the last digit of a printed column and of the step times, relative to both.

    A column may have a fixed number of decimals or of significant digits. Zeros at the end of a
    number are unknown, so the digits are those of the value with the most. The coarser of both
    readings counts, at the median of the column.
    """
    values = run.window[column][:MAX_DIGIT_LINES]
    positive = list(map(_plain, values[np.isfinite(values) & (values > 0)].tolist()))
    if not positive:
        return None
    typical = median(positive)
    by_decimals = min(last_digit(value) * value for value in positive) / typical
    by_digits = min(last_digit(value) * _mantissa(value) for value in positive)
    rounding = max(by_decimals, by_digits / _mantissa(typical))
    return rounding + run.resolution_s / 2 / run.typical_step_s


def _mantissa(value: float) -> float:
    """Return the mantissa of a positive number, from 1 up to 10."""
    return 10 ** (log10(value) % 1)


def _warnings(
    run: TimedRun, log: LogContent, printed: bool, reported_values: dict[str, float]
) -> list[str]:
    warnings: list[str] = []
    step = log.resolution_s / run.typical_step_s
    if not printed and step > COARSE:
        warnings.append(
            f"the log prints step times in steps of {log.resolution_s:g} s, {step:.1%} of one step"
        )
    facts = run.facts
    if doubt := peak_doubt(run.flops_per_s_per_device, facts.device, facts.dtype):
        warnings.append(doubt)
    elif doubt := peak_doubt(
        reported_values.get("tflops_per_device", 0.0) * TERA, facts.device, facts.dtype
    ):
        warnings.append(f"the log's own figure: {doubt}")
    elif (mfu := reported_values.get("mfu", 0.0)) > 1:
        warnings.append(f"the log prints an MFU of {mfu:.1%}: its FLOPs or its peak are wrong")
    if run.uneven:
        warnings.append(uneven_warning(run.window["step_time_s"]))
    elif run.times.jitter_overhead > JITTER_WARNING:
        warnings.append(
            f"spikes: the mean step is {run.times.jitter_overhead:.0%} above the median"
        )
    return warnings


def _plain(value: float) -> float:
    """Return a value without the digits that a 32-bit column adds."""
    return float(f"{value:.7g}")
