"""The report of one run as a document."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.compare.judgement import verdict_label, verdict_tone
from paceline.core.metrics import METRICS
from paceline.core.result import (
    Metric,
    RankSummary,
    ReferenceComparison,
    Result,
    finite_value,
    impossible_figure,
)
from paceline.core.run_report import RunReport
from paceline.core.text import printable
from paceline.core.units import percent, pluralize, si
from paceline.report.document import (
    Column,
    Document,
    Figure,
    Links,
    Notes,
    Preformatted,
    Section,
    Table,
    Verdict,
)
from paceline.report.figures import (
    flatten_values,
    format_value,
    half_width,
    interval_name,
    interval_text,
    memory_sentence,
    metric_title,
    peak_memory_by_kind,
    plus_minus,
    reason_for_none,
    straggler_text,
    throughput,
    value_text,
    window_text,
)
from paceline.report.run_description import (
    advice,
    describe_rule,
    describe_setup,
    describe_time,
    describe_window,
    progress,
)

if TYPE_CHECKING:
    from altair import LayerChart

    from paceline.report.theme import ChartTheme

LOG_LINES = 12
MAX_STACKS = 4
"""Maximum number of stack files that the text lists."""
MAX_RANKS = 64
MAIN_FILES = ("report.html", "result.json", "steps.jsonl", "job.sh")
STATUS_LABELS = {"oom": "✕ out of memory", "nan": "✕ NaN", "timeout": "✕ timeout"}
METRIC_COLUMNS = (
    Column("label", "metric"),
    Column("value", "value"),
    Column("interval", "95% interval"),
    Column("spread", "spread"),
    Column("n", "n", justify="right"),
    Column("statistic", "from"),
    Column("convention", "convention"),
    Column("remark", "source and note"),
)
CSV_KEYS = (
    *("run", "status", "name", "value", "unit", "n", "spread", "low", "high", "interval"),
    *("statistic", "window", "window_rule", "convention", "source", "note"),
)
RANK_COLUMNS = (
    Column("rank", "rank"),
    Column("host", "host"),
    *(
        Column(key, title, lambda value: format_value(value, "s"))
        for key, title in (
            ("step_time_s", "step"),
            ("busy_time_s", "busy"),
            ("comm_wait_s", "waiting in collectives"),
            ("data_wait_s", "waiting for data"),
        )
    ),
    Column("memory", "peak memory"),
    Column("cores", "cores"),
)
REFERENCE_COLUMNS = (
    Column("reference", "reference"),
    Column("metric", "metric"),
    Column("published", "published"),
    Column("ratio", "this run / reference"),
    Column("comparable", "comparable"),
    Column("source", "source"),
)
PAIR = (Column("name", "name"), Column("value", "value"))


def run_document(report: RunReport) -> Document:
    """Return the report of one run for every medium."""
    result = report.result
    time_text = describe_time(result.created)
    name, *setup = describe_setup(report)
    sentence = result.verdict.sentence if result.status == "ok" else ""
    return Document(
        kind=f"one run, {time_text}" if time_text else "one run",
        title=name,
        headline=run_headline(report),
        source=result.run,
        command=report.command,
        verdict=run_verdict(result),
        setup=tuple(setup),
        answer=(sentence,) if sentence else (),
        figures=run_figures(report),
        sections=(
            *_outcome(report),
            Notes(title="Warnings", name="warnings", lines=_warnings(result), tone="alert"),
            Notes(title="Confidence", name="how-sure", lines=_confidence(report), media="long"),
            Table(
                title="References",
                name="references",
                columns=REFERENCE_COLUMNS,
                rows=[_reference_row(row) for row in result.references],
            ),
            Table(
                title="All metrics",
                name="metrics",
                media="long",
                columns=METRIC_COLUMNS,
                rows=[_written_row(result, *each) for each in result.metrics.items()],
                hint_key="describes",
                note=_metrics_note(result),
            ),
            *_folds(report),
        ),
        notes=tuple(_places(report)),
        charts=lambda theme: _charts(report, theme),
        data=result,
        csv=Table(columns=[Column(key, key) for key in CSV_KEYS], rows=metric_rows(result)),
    )


def run_headline(report: RunReport) -> str:
    """Return the result in one line, the title of the page.

    `llama31-8b: 10.5k tokens/s/GPU on 16x H100, MFU 61.0%`, or the status without a figure.
    """
    result, facts = report.result, report.facts
    device = "CPU" if facts.device == "cpu" else facts.device
    place = f" on {facts.num_devices or '?'}x {device}" if device else ""
    headline = throughput(result)
    if result.status != "ok" or headline is None:
        status = STATUS_LABELS.get(result.status, result.status).removeprefix("✕ ")
        return f"{result.recipe}{place}: {'no figure' if result.status == 'ok' else status}"
    name, metric = headline
    value, unit = finite_value(metric) or 0.0, metric.unit
    rate = finite_value(result.metrics.get(f"{name}_per_device"))
    if rate is not None and facts.device != "cpu":
        value, unit = rate, f"{unit}/GPU"
    mfu = finite_value(result.metrics.get("mfu"))
    impossible = impossible_figure(result.metrics)
    share = "" if mfu is None or impossible else f", MFU {percent(mfu)}"
    routing = f", routing {facts.routing}" if facts.routing else ""
    return f"{result.recipe}: {si(value, '').replace(' ', '')} {unit}{place}{share}{routing}"


def run_verdict(result: Result) -> Verdict:
    """Return the status unless it is ok, else the verdict."""
    if result.status in ("queued", "running"):
        return Verdict(result.status)
    if impossible_figure(result.metrics):
        return Verdict("✕ impossible MFU", "alert")
    if result.status != "ok":
        return Verdict(STATUS_LABELS.get(result.status, f"✕ {result.status}"), "alert")
    kind = result.verdict.kind
    has_verdict = kind in ("pass", "slower", "faster")
    low = has_verdict and result.verdict.confidence == "low"
    return Verdict(verdict_label(kind, low_confidence=low), verdict_tone(kind))


def _charts(report: RunReport, theme: ChartTheme) -> Mapping[str, LayerChart]:
    from paceline.report.charts import run_charts  # Altair takes long to import.

    return run_charts(report, theme)


def _warnings(result: Result) -> list[str]:
    problem = impossible_figure(result.metrics)
    first = f"{problem[:1].upper()}{problem[1:]}. Comparisons exclude this run." if problem else ""
    return [*filter(None, (first,)), *result.warnings]


def _outcome(report: RunReport) -> Iterator[Section]:
    """Yield what happened to a run without success or without a figure, and what to do."""
    result = report.result
    if result.status != "ok":
        lines = [result.reason or "", f"{progress(result)}.", f"What to do: {advice(report)}"]
        yield Notes(
            title="What happened", name="outcome", lines=[x for x in lines if x], tone="alert"
        )
        tail = "\n".join(result.log_tail[-LOG_LINES:])
        yield Preformatted(title="End of the log", text=tail, tone="alert")
        if report.stacks:
            more = max(0, len(report.stacks) - MAX_STACKS)
            names = ", ".join(list(report.stacks)[:MAX_STACKS])
            names += f" and {more:,} more" if more else ""
            yield Notes(title="Stack traces at the end", lines=[names], media="text")
    elif throughput(result) is None:
        steps = f"No figure: {describe_window(result)}. {progress(result)}"
        lines = [f"{steps}; a figure needs at least five steady steps."]
        yield Notes(title="What happened", name="outcome", lines=lines, tone="alert")


def _confidence(report: RunReport) -> list[str]:
    """Return from which steps the figures come, and what their interval covers."""
    result = report.result
    lines: list[str] = []
    if result.window is not None and result.window.n:
        steps_text = f"{describe_window(result).capitalize()}: {describe_rule(report)}."
        headline = throughput(result)
        if headline is None or half_width(headline[1]) is None:
            uneven = result.window.state == "uneven"
            why = "No interval: step time is not stationary." if uneven else ""
            lines.append(f"{steps_text} {why or 'Too few steps for an interval.'}")
        else:
            metric = headline[1]
            lines.append(
                f"{steps_text} {plus_minus(metric)}: {metric.interval or '95%'}. It covers the "
                "variation of this run's steps, not run-to-run variation; repeats measure that."
            )
    return [*lines, *([report.expected] if report.expected else [])]


def _places(report: RunReport) -> Iterator[str]:
    """Yield how far the run came, and where its files are."""
    result = report.result
    if result.fabric and result.fabric.is_notable:
        yield result.fabric.sentence
    if result.status == "ok":
        yield progress(result)
    names = [name for name in MAIN_FILES if name in report.files]
    yield "   ".join([report.folder or result.run, *names])


def _folds(report: RunReport) -> Iterator[Section]:
    """Yield what a page keeps behind folds: ranks, stacks, command, recipe, environment, files."""
    result, spec = report.result, report.spec
    rows = _rank_rows(result.ranks)
    more = max(0, len(result.ranks) - MAX_RANKS)
    yield Table(
        title="Ranks",
        media="folded",
        columns=RANK_COLUMNS,
        rows=rows,
        note=f"{more} more ranks are in result.json." if more else "",
    )
    for name, stack in list(report.stacks.items())[:MAX_RANKS]:
        yield Preformatted(title=f"Stack trace at the end: {name}", text=stack, media="folded")
    yield Preformatted(title="Exact command", name="command", text=report.command, media="folded")
    yield Preformatted(title="Job script", text=report.job_script, media="folded")
    recipe_json = json.dumps(spec.model_dump(mode="json"), indent=2) if spec else ""
    yield Preformatted(title="Resolved recipe", text=recipe_json, media="folded")
    environment = {
        **result.conventions,
        **result.versions,
        **({"fabric": result.fabric.sentence} if result.fabric else {}),
        **dict(flatten_values(report.inventory)),
    }
    yield Table(
        title="Environment",
        media="folded",
        columns=PAIR,
        rows=[{"name": name, "value": value} for name, value in environment.items()],
    )
    if result.status == "ok":
        tail = "\n".join(result.log_tail)
        yield Preformatted(title="End of the log", text=tail, media="folded")
    yield Links(title="Raw files", paths=report.files, media="folded")


def run_figures(report: RunReport) -> tuple[Figure, ...]:
    """Return throughput, step time, MFU and memory; nothing without measurements."""
    result = report.result
    if not any(finite_value(metric) is not None for metric in result.metrics.values()):
        return ()
    return (_throughput(result), _step_time(result), _utilization(report), _memory(report))


def _figure(
    label: str, metric: Metric | None, lines: Iterable[str | None], other: str | None = None
) -> Figure:
    """Return a figure of `metric`; without a value, the details are the reason and `other`."""
    if metric is None or finite_value(metric) is None:
        return Figure(label, "none", "", tuple(filter(None, (reason_for_none(metric), other))))
    return Figure(label, value_text(metric), _interval(metric), tuple(filter(None, lines)))


def _interval(metric: Metric) -> str:
    """Return the interval, or the spread without one."""
    interval = plus_minus(metric)
    if interval:
        return f"{interval} {interval_name(metric)}"
    over = f" over {pluralize(metric.n, 'step')}" if metric.n else ""
    return f"spread {percent(metric.spread)}{over}" if metric.spread else ""


def _metric_phrase(result: Result, name: str, pattern: str) -> str | None:
    """Return `pattern` with the value of the metric `name`, or None if it is unknown."""
    metric = result.metrics.get(name)
    return None if finite_value(metric) is None else pattern.format(value_text(metric))


def _throughput(result: Result) -> Figure:
    headline = throughput(result)
    name, metric = headline if headline else ("tokens_per_s", result.metrics.get("tokens_per_s"))
    in_tokens = name != "samples_per_s"
    padded = (finite_value(result.metrics.get("real_token_fraction")) or 1.0) < 1.0
    lines = [
        _basis(result),
        _metric_phrase(result, "tokens_per_s_per_device", "{}") if in_tokens else None,
        _metric_phrase(result, "samples_per_s", "{}") if in_tokens else None,
        None if in_tokens else _metric_phrase(result, "samples_per_s_mean", "{} at the mean step"),
        _metric_phrase(result, "tokens_per_s", "{} of text") if padded and not in_tokens else None,
        _metric_phrase(result, "real_token_fraction", "{} of the tokens are not padding")
        if padded
        else None,
        _training_time(result),
    ]
    return _figure("Throughput", metric, lines)


def _training_time(result: Result) -> str | None:
    """Return `12 days for the whole training, 15T tokens`, or None if unknown."""
    metric = result.metrics.get("days_to_train")
    length = ((metric and metric.note) or "").removeprefix("for ")
    text = _metric_phrase(result, "days_to_train", "{} for the whole training")
    return f"{text}, {length}" if text and length else text


def _step_time(result: Result) -> Figure:
    metric = result.metrics.get("step_time_s")
    if result.window is not None and result.window.rule == "as printed":
        return _figure("Step time, mean", metric, ["as printed by the source"])
    low, high = (result.metrics.get(f"step_time_{p}_s") for p in ("p05", "p95"))
    span = None
    if finite_value(low) is not None and finite_value(high) is not None:
        span = f"{value_text(low)} to {value_text(high)} from the 5th to the 95th percentile"
    jitter = _metric_phrase(result, "jitter_overhead", ", jitter overhead {}") or ""
    lines = [
        _metric_phrase(result, "step_time_mean_s", "{} mean" + jitter),
        span,
        straggler_text(result.straggler),
        _metric_phrase(result, "data_wait_fraction", "{} data wait"),
        _metric_phrase(result, "startup_s", "{} start-up"),
    ]
    statistic = (metric and metric.statistic) or "median"
    return _figure(f"Step time, {statistic}", metric, lines)


def _utilization(report: RunReport) -> Figure:
    """Return MFU, or the share of achievable GEMM throughput; the other one in the details."""
    metrics = report.result.metrics
    achievable_fraction, mfu = metrics.get("achievable_fraction"), metrics.get("mfu")
    dtype = f" in {report.facts.dtype}" if report.facts.dtype else ""
    limit = _metric_phrase(report.result, "achievable_flops_per_s", "{} achievable GEMM throughput")
    limit = f"of {limit or 'the achievable GEMM throughput'}{dtype}"
    has_share = finite_value(achievable_fraction) is not None
    not_probed = None  # The machine of an imported log is another one.
    if report.facts.origin != "imported":
        not_probed = f"achievable GEMM throughput: {reason_for_none(achievable_fraction)}"
    if mfu is not None and finite_value(mfu) is not None:
        convention = f", {printable(mfu.convention)} FLOPs" if mfu.convention else ""
        share = f"{value_text(achievable_fraction)} {limit}" if has_share else not_probed
        peak = f"of the data-sheet peak{dtype}{convention}"
        badge = "impossible" if impossible_figure(metrics) else ""
        return replace(_figure("MFU", mfu, [peak, share]), badge=badge)
    no_mfu = f"MFU: {reason_for_none(mfu)}"
    if has_share:
        return _figure("Of achievable", achievable_fraction, [limit, no_mfu])
    return _figure("MFU", mfu, (), not_probed)


def _memory(report: RunReport) -> Figure:
    kinds = peak_memory_by_kind(report.result)
    if not kinds:
        return _figure("Memory", report.result.metrics.get("memory_resident_bytes"), ())
    kind, value = next(iter(kinds.items()))
    metric = report.result.metrics[f"memory_{kind.replace(' ', '_')}_bytes"]
    ranks = f", fullest of {metric.n:,} ranks" if metric.n and metric.n > 1 else ""
    limit = report.facts.device_memory_bytes
    lines = [f"{kind} peak{ranks}"]
    lines += (
        [f"{percent(value / limit)} of {format_value(limit, 'bytes')} a device"] if limit else []
    )
    lines += [f"{format_value(v, 'bytes')} {k} peak" for k, v in kinds.items() if k != kind]
    lines += [memory_sentence(report.result.memory)] if report.result.memory else []
    return Figure("Memory", format_value(value, "bytes"), "", tuple(lines))


def _basis(result: Result) -> str:
    """Return the steps and the statistic behind the throughput."""
    if result.window is not None and result.window.rule == "as printed":
        return describe_window(result)
    uneven = result.window is not None and result.window.state == "uneven"
    return f"{'mean' if uneven else 'median'} of {describe_window(result)}"


def _rank_rows(ranks: Sequence[RankSummary]) -> list[dict[str, Any]]:
    """Return the table's rows; a rank is named with its pipeline stage when there are several."""
    has_stages = len({rank.stage for rank in ranks}) > 1
    return [
        {
            **rank.model_dump(),
            "rank": f"{rank.rank}, stage p{rank.stage}" if has_stages else rank.rank,
            "memory": ", ".join(
                f"{format_value(size, 'bytes')} {kind}" for kind, size in rank.memory_bytes.items()
            )
            or None,
            "cores": rank.cores and f"{rank.cores}{' bound' if rank.bound else ''}",
        }
        for rank in ranks[:MAX_RANKS]
    ]


def _reference_row(row: ReferenceComparison) -> dict[str, str]:
    return {
        "reference": row.reference,
        "metric": metric_title(row.metric),
        "published": format_value(row.reference_value, row.unit),
        "ratio": "none" if row.ratio is None else f"{row.ratio:.3f}",
        "comparable": "yes" if row.comparable else f"no: {row.why_not or 'no reason given'}",
        "source": row.source,
    }


def metric_rows(result: Result) -> list[dict[str, Any]]:
    """Return one raw row per metric for CSV, one without a metric when there is none.

    What is not finite counts as unknown; the window has the step numbers as the log prints them.
    """
    run = {"run": result.run, "status": result.status}
    rows = [
        {
            **run,
            **metric.model_dump(),
            "name": name,
            "value": finite_value(metric),
            **{key: _finite(getattr(metric, key)) for key in ("spread", "low", "high")},
            "window": (window := window_text(result, name)),
            "window_rule": result.window.rule if result.window and window else None,
        }
        for name, metric in result.metrics.items()
    ]
    return rows or [run]


def _written_row(result: Result, name: str, metric: Metric) -> dict[str, str | None]:
    """Return one metric as text for people."""
    window = window_text(result, name)
    steps = f"steps {window}" if window and window[0].isdigit() else window
    note = metric.note if finite_value(metric) is not None else None
    spread = _finite(metric.spread)
    return {
        "label": metric_title(name),
        "describes": METRICS[name].describes if name in METRICS else "",
        "value": value_text(metric),
        "interval": interval_text(metric),
        "spread": None if spread is None else percent(spread, 2),
        "n": None if metric.n is None else f"{metric.n:,}",
        "statistic": ", ".join(filter(None, (metric.statistic, steps))) or None,
        "convention": metric.convention,
        "remark": "; ".join(filter(None, (metric.source, note))) or None,
    }


def _metrics_note(result: Result) -> str:
    """Return what intervals, spread and n are."""
    kinds = {m.interval for m in result.metrics.values() if m.interval and m.low is not None}
    interval = f"Interval: {'; '.join(sorted(kinds))}. " if kinds else ""
    return (
        f"{interval}Spread: 1.4826 x median absolute deviation / median. n: steps behind the "
        "figure; ranks for memory."
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
