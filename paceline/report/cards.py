"""The four figures at the top of the page: throughput, step time, share of the limit, memory."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core.result import Metric, Result, finite_value
from paceline.core.run_report import RunReport
from paceline.core.text import printable
from paceline.core.units import counted, percent
from paceline.report.figures import (
    interval_name,
    memory_by_kind,
    plus_minus,
    reason_for_none,
    throughput,
    value_text,
    written,
)
from paceline.report.head import Card, card


def cards(report: RunReport) -> list[Card]:
    """Throughput, step time, share of the limit, memory; none of them when nothing was measured."""
    result = report.result
    if not any(finite_value(metric) is not None for metric in result.metrics.values()):
        return []
    return [_throughput(result), _step_time(result), _limit(report), _memory(report)]


def _card(label: str, text: str, metric: Metric | None, lines: Iterable[str | None]) -> Card:
    return card(label, text, _interval_text(metric), lines)


def _interval_text(metric: Metric | None) -> str:
    """The interval, else the spread."""
    if metric is None or finite_value(metric) is None:
        return ""
    interval = plus_minus(metric)
    if interval:
        return f"{interval} {interval_name(metric)}"
    over = f" over {counted(metric.n, 'step')}" if metric.n else ""
    return f"spread {percent(metric.spread)}{over}" if metric.spread else ""


def _named(result: Result, name: str, pattern: str) -> str | None:
    """`pattern` filled with the figure `name`, None when that is unknown."""
    metric = result.metrics.get(name)
    return None if finite_value(metric) is None else pattern.format(value_text(metric))


def _throughput(result: Result) -> Card:
    headline = throughput(result)
    name, metric = headline if headline else ("tokens_per_s", result.metrics.get("tokens_per_s"))
    in_tokens = name != "samples_per_s"
    padded = (finite_value(result.metrics.get("real_token_fraction")) or 1.0) < 1.0
    lines = [
        _named(result, "tokens_per_s_per_device", "{}") if in_tokens else None,
        _named(result, "samples_per_s", "{}") if in_tokens else None,
        None if in_tokens else _named(result, "samples_per_s_mean", "{} at the mean step"),
        _named(result, "tokens_per_s", "{} of text") if padded and not in_tokens else None,
        _named(result, "real_token_fraction", "{} of the tokens are real") if padded else None,
        _named(result, "days_to_train", "{} for the whole training"),
    ]
    text = value_text(metric) if headline else "none"
    return _card("Throughput", text, metric, lines if headline else [reason_for_none(metric)])


def _step_time(result: Result) -> Card:
    metric = result.metrics.get("step_time_s")
    if result.window is not None and result.window.rule == "as printed":
        return _card(
            "Step time, mean",
            "none" if finite_value(metric) is None else value_text(metric),
            metric,
            ["as the source prints it"] if finite_value(metric) else _reason(metric),
        )
    low, high = (result.metrics.get(f"step_time_{p}_s") for p in ("p05", "p95"))
    span = None
    if finite_value(low) is not None and finite_value(high) is not None:
        span = f"{value_text(low)} to {value_text(high)} from the 5th to the 95th percentile"
    jitter = _named(result, "jitter_tax", ", jitter tax {}") or ""
    lines = [
        _named(result, "step_time_mean_s", "{} mean" + jitter),
        span,
        _named(result, "startup_s", "{} start-up"),
    ]
    text = value_text(metric) if finite_value(metric) is not None else "none"
    statistic = (metric and metric.statistic) or "median"
    return _card(
        f"Step time, {statistic}", text, metric, lines if text != "none" else _reason(metric)
    )


def _limit(report: RunReport) -> Card:
    """Share of the measured reachable rate, else MFU; the other one below it."""
    metrics = report.result.metrics
    reached, mfu = metrics.get("of_achievable"), metrics.get("mfu")
    dtype = f" in {report.facts.dtype}" if report.facts.dtype else ""
    convention = f", {printable(mfu.convention)} FLOPs" if mfu and mfu.convention else ""
    mfu_text = f"MFU: {reason_for_none(mfu)}"
    if finite_value(mfu) is not None:
        mfu_text = f"MFU {value_text(mfu)} of the data-sheet peak{convention}"
    if finite_value(reached) is not None:
        limit = _named(report.result, "achievable_flops_per_s", "of the {} this machine reaches")
        first = (limit or "of what this machine reaches") + dtype
        return _card("Share of the limit", value_text(reached), reached, [first, mfu_text])
    missing = f"Share of what this machine reaches: {reason_for_none(reached)}"
    if report.facts.origin == "imported":
        missing = None  # The log was written elsewhere.
    if finite_value(mfu) is not None:
        first = f"MFU: of the data-sheet peak{dtype}{convention}"
        return _card("Share of the limit", value_text(mfu), mfu, [first, missing])
    return _card("Share of the limit", "none", None, [mfu_text, missing])


def _memory(report: RunReport) -> Card:
    kinds = memory_by_kind(report.result)
    if not kinds:
        metric = report.result.metrics.get("memory_resident_bytes")
        return _card("Memory", "none", None, _reason(metric))
    kind, value = next(iter(kinds.items()))
    metric = report.result.metrics[f"memory_{kind.replace(' ', '_')}_bytes"]
    ranks = f", fullest of {metric.n:,} ranks" if metric.n and metric.n > 1 else ""
    limit = report.facts.device_memory_bytes
    lines = [f"{kind} peak{ranks}"]
    lines += [f"{percent(value / limit)} of {written(limit, 'bytes')} a device"] if limit else []
    lines += [f"{written(v, 'bytes')} {k} peak" for k, v in kinds.items() if k != kind]
    return _card("Memory", written(value, "bytes"), None, lines)


def _reason(metric: Metric | None) -> list[str]:
    return [reason_for_none(metric)]
