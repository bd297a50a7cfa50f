"""The terminal report of one run."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from paceline.core.result import ReferenceComparison, Result, finite_value
from paceline.core.run import RunSettings
from paceline.core.run_report import RunReport
from paceline.core.text import printable
from paceline.core.units import percent
from paceline.report.figures import (
    interval_name,
    memory_by_kind,
    plus_minus,
    reason_for_none,
    straggler_text,
    throughput,
    value_text,
    written,
)
from paceline.report.memory import memory_sentence
from paceline.report.page import (
    advice,
    chip_label,
    describe_setup,
    describe_window,
    progress,
    stack_names,
)

LOG_LINES = 12
MOST_REFERENCES = 5
MOST_STACKS = 4
NAMED_FILES = ("report.html", "result.json", "steps.jsonl", "job.sh")

Line = tuple[str, str]
"""Text and its rich style."""


def render_text(report: RunReport, console: Console, *, header: bool = True) -> None:
    """Print the report; names and log lines are plain text, whatever they contain."""
    result = report.result
    if header:
        _print(console, (" · ".join(describe_setup(report)), "bold"))
        console.print()
    if result.status != "ok":
        for line in _outcome(report):
            _print(console, line)
        if report.stacks:
            stacks = stack_names(report, MOST_STACKS)
            _print(console, (f"  what the ranks did at the end: {stacks}", ""))
    for line in _figures(result, report.facts):
        _print(console, line)
    for warning in result.warnings:
        _print(console, (f"  warning: {warning}", "yellow"))
    for line in _files(report):
        _print(console, line)


def _print(console: Console, line: Line) -> None:
    # A Text is never parsed as markup; soft_wrap leaves lines whole when piped.
    console.print(Text(printable(line[0]), style=line[1]), soft_wrap=True, highlight=False)


def _outcome(report: RunReport) -> Iterable[Line]:
    """What happened, why, the log's end and what to do."""
    result = report.result
    yield f"  {chip_label(result)}: {progress(result)}", "bold red"
    if result.reason:
        yield f"  {result.reason}", ""
    for line in result.log_tail[-LOG_LINES:]:
        yield f"  | {line}", "dim"
    yield f"  what to do: {advice(report)}", ""


def _figures(result: Result, facts: RunSettings) -> Iterable[Line]:
    """The measured lines; without a figure, why there is none."""
    headline = throughput(result)
    if headline is not None:
        metric = headline[1]
        interval = plus_minus(metric)
        uneven = result.window is not None and result.window.state == "uneven"
        why = "steps of no one level" if uneven else "too few steps"
        sure = interval_name(metric) if interval else f"no interval: {why}"
        value = f"{value_text(metric)}  {interval}" if interval else value_text(metric)
        whence = describe_window(result)
        if not _is_printed(result):
            whence = f"{'mean' if uneven else 'median'} of {whence}; {sure}"
        yield f"  {value}      {whence}", "bold"
        if rates := _rates(headline[0], result):
            yield f"  {rates}", ""
        yield f"  {_share(result, facts)}", ""
    elif result.status == "ok":
        yield f"  no figure: {describe_window(result)}", "bold"
    parts = f"memory: {memory_sentence(result.memory)}" if result.memory else ""
    went_on = progress(result) if result.resumed_after else ""
    for line in (_step_time(result), _resources(result), parts, went_on):
        if line:
            yield f"  {line}", ""
    if headline is not None or result.status == "ok":
        yield f"  against: {result.verdict.sentence or 'no reference'}", ""
        for row in result.references[:MOST_REFERENCES]:
            yield f"    {_reference(row)}", ""


def _rates(headline: str, result: Result) -> str:
    """Beside samples/s: the mean, which published averages are, and the text in them if padded."""
    mean, real = result.metrics.get("samples_per_s_mean"), result.metrics.get("real_token_fraction")
    text, share = result.metrics.get("tokens_per_s"), finite_value(real)
    parts: list[str] = []
    if headline == "samples_per_s" and finite_value(mean) is not None and not _is_printed(result):
        parts.append(f"{value_text(mean)} at the mean step, as published averages count")
    if (
        headline == "samples_per_s"
        and share is not None
        and share < 1
        and finite_value(text) is not None
    ):
        parts.append(f"{value_text(text)} of text, {percent(share)} of the positions")
    return " · ".join(parts)


def _share(result: Result, facts: RunSettings) -> str:
    """The share of what the machine reaches, and MFU with its convention or why there is none.

    An imported log was written elsewhere, so this machine's reach is no matter.
    """
    reached, mfu = result.metrics.get("of_achievable"), result.metrics.get("mfu")
    limit = finite_value(result.metrics.get("achievable_flops_per_s"))
    share = finite_value(reached)
    if share is None:
        part = f"share of what this machine reaches: {reason_for_none(reached)}"
    else:
        within = f" in {facts.dtype}" if facts.dtype else ""
        of_what = f" ({written(limit, 'FLOP/s')})" if limit is not None else ""
        part = f"{percent(share)} of what this machine reaches{within}{of_what}"
    if mfu is None or finite_value(mfu) is None:
        utilisation = f"MFU: {reason_for_none(mfu)}"
    else:
        convention = f" ({mfu.convention})" if mfu.convention else ""
        utilisation = f"MFU {value_text(mfu)}{convention}"
    return utilisation if facts.origin == "imported" else f"{part}; {utilisation}"


def _step_time(result: Result) -> str:
    metrics = result.metrics
    parts: list[str] = []
    if _is_printed(result):
        mean = metrics.get("step_time_mean_s")
        return "" if finite_value(mean) is None else f"step {value_text(mean)} mean, as printed"
    step = metrics.get("step_time_s")
    statistic = (step and step.statistic) or "median"
    if step and finite_value(step) is not None:
        parts.append(f"step {value_text(step)} {statistic}")
    if finite_value(metrics.get("step_time_mean_s")) is not None and statistic == "median":
        jitter = finite_value(metrics.get("jitter_tax"))
        tax = f" ({written(jitter, 'fraction')} jitter)" if jitter is not None else ""
        parts.append(f"{value_text(metrics['step_time_mean_s'])} mean{tax}")
    busiest = straggler_text(result.straggler)
    return " · ".join(filter(None, [", ".join(parts), busiest]))


def _is_printed(result: Result) -> bool:
    """Whether all there is is one figure that the source prints for the whole run."""
    return result.window is not None and result.window.rule == "as printed"


def _resources(result: Result) -> str:
    """Memory with its kind, data wait and start-up."""
    kinds = memory_by_kind(result)
    parts = [f"memory {written(b, 'bytes')} a rank ({kind})" for kind, b in kinds.items()][:1]
    named = (
        ("data_wait_fraction", "data wait"),
        ("startup_s", "start-up"),
        ("first_step_s", "first step"),
        ("days_to_train", "whole training"),
    )
    for name, words in named:
        metric = result.metrics.get(name)
        if metric is not None and finite_value(metric) is not None:
            note = f" {metric.note}" if name == "days_to_train" and metric.note else ""
            parts.append(f"{words} {value_text(metric)}{note}")
    return " · ".join(parts)


def _reference(row: ReferenceComparison) -> str:
    value = f"{row.reference} {written(row.reference_value, row.unit)}"
    if row.ratio is None or not row.comparable:
        return f"{value}, not comparable: {row.why_not or 'no reason given'}"
    return f"{value}, ratio {row.ratio:.3f}"


def _files(report: RunReport) -> Iterable[Line]:
    names = [name for name in NAMED_FILES if name in report.files]
    if report.folder:
        yield "  " + "   ".join([report.folder, *names]), "dim"
