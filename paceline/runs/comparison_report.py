"""Report of a comparison of two sides."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from paceline.compare.judgement import (
    LIKELY,
    SMALLEST_SHOWN,
    Comparison,
    MetricComparison,
    SideFigure,
    SideSummary,
    change_text,
    independent_metrics,
    lead_metric,
    percent_change,
    verdict_label,
    verdict_tone,
)
from paceline.core.text import printable
from paceline.core.units import percent, pluralize
from paceline.report.document import (
    Column,
    Document,
    Figure,
    Notes,
    Table,
    Verdict,
    unknown_figure,
)
from paceline.report.figures import format_value
from paceline.report.terminal import plain_text
from paceline.runs.command_pairs import CommandComparison, commands_document

if TYPE_CHECKING:
    from altair import LayerChart

    from paceline.report.theme import ChartTheme

MAX_CAUSES = 12
BETTER = {"lower": "less is better", "higher": "more is better"}
COLUMNS = (
    Column("metric", "metric"),
    *(
        Column(key, title, justify="right")
        for key, title in (
            ("baseline", "baseline"),
            ("candidate", "candidate"),
            ("change", "change"),
            ("interval", "95% interval"),
            ("p", "p"),
            ("p_corrected", "p corrected"),
        )
    ),
    Column("verdict", "verdict", wraps=True),
)
CSV_KEYS = (
    *("metric", "unit", "primary", "baseline", "candidate", "n_baseline", "n_candidate"),
    *("ratio", "low", "high", "p", "p_corrected", "verdict", "note"),
)


def comparison_verdict(comparison: Comparison) -> Verdict:
    """Return the verdict's label and tone."""
    low = comparison.confidence == "low"
    suspicious = bool(comparison.too_good)
    return Verdict(
        verdict_label(comparison.verdict, suspicious=suspicious, low_confidence=low),
        verdict_tone(comparison.verdict),
    )


def comparison_document(comparison: Comparison) -> Document:
    """Return the comparison as a document for every output format."""
    suspicion = (f"too good: {comparison.too_good}",) if comparison.too_good else ()
    return Document(
        kind="comparison",
        title=comparison.observed.rstrip(".") or comparison.title,
        verdict=comparison_verdict(comparison),
        setup=(_margin(comparison), f"n {comparison.n_a} and {comparison.n_b}"),
        answer=(comparison.sentence.removeprefix(comparison.observed).strip(),),
        figures=_figures(comparison),
        sections=(
            Notes(
                title="Warnings",
                name="warnings",
                lines=(*suspicion, *comparison.warnings),
                tone="alert",
            ),
            Table(
                title="All metrics",
                name="metrics",
                columns=COLUMNS,
                rows=[_metric_row(metric) for metric in independent_metrics(comparison)],
                note="* The verdict depends on this metric. Change: candidate / baseline - 1.",
            ),
            Table(
                title="Settings that differ",
                name="sides",
                columns=[
                    Column(key, key) for key in ("setting", "baseline", "candidate", "allowed")
                ],
                rows=[
                    {
                        "setting": each.key,
                        "baseline": each.baseline,
                        "candidate": each.candidate,
                        "allowed": "yes" if each.allowed else f"no: --allow {each.key} accepts it",
                    }
                    for each in comparison.differences
                ],
            ),
            Notes(title="Possible causes", lines=list(_causes(comparison))),
        ),
        notes=comparison.notes,
        charts=lambda theme: _charts(comparison, theme),
        data=comparison,
        csv=Table(columns=[Column(key, key) for key in CSV_KEYS], rows=_csv_rows(comparison)),
    )


def _charts(comparison: Comparison, theme: ChartTheme) -> Mapping[str, LayerChart]:
    from paceline.runs.comparison_charts import comparison_charts  # Importing Altair is slow.

    return comparison_charts(comparison, theme)


def _figures(comparison: Comparison) -> tuple[Figure, ...]:
    """Return the change with its interval, both sides' values, and the confidence."""
    lead = lead_metric(comparison)
    return (
        _change_figure(comparison, lead),
        _side_figure("Baseline", comparison.baseline, lead and lead.baseline, lead),
        _side_figure("Candidate", comparison.candidate, lead and lead.candidate, lead),
        _confidence_figure(comparison),
    )


def _change_figure(comparison: Comparison, lead: MetricComparison | None) -> Figure:
    if lead is None or comparison.ratio is None:
        return unknown_figure("Change", comparison.verdict)
    interval = "no interval: run-to-run variation unknown"
    if comparison.low is not None and comparison.high is not None:
        interval = f"{percent_change(comparison.low)} to {percent_change(comparison.high)} (95%)"
    p = None if comparison.p is None else f"p {p_text(comparison.p)}"
    details = (BETTER.get(lead.better or ""), p)
    text = percent_change(comparison.ratio)
    return Figure(f"Change of {lead.metric}", text, interval, tuple(filter(None, details)))


def _side_figure(
    label: str, side: SideSummary, figure: SideFigure | None, lead: MetricComparison | None
) -> Figure:
    runs = pluralize(len(side.runs), "run")
    who = f"published: {side.source}" if side.kind == "reference" else runs
    left_out = [f"{len(side.left_out)} left out"] if side.left_out else []
    if figure is None or lead is None or figure.value is None:
        why = "not compared" if lead is None else "it has no value of this metric"
        return unknown_figure(label, why, (side.short_name, who, *left_out))
    spread = "" if figure.spread is None else f"spread {percent(figure.spread, 2)} between runs"
    text = format_value(figure.value, lead.unit, 4)
    return Figure(label, text, spread, (side.short_name, who, *left_out))


def _confidence_figure(comparison: Comparison) -> Figure:
    not_warned = [why for why in comparison.why_low if why not in comparison.warnings]
    details = [f"{comparison.n_a} and {pluralize(comparison.n_b, 'run')}", *not_warned]
    if comparison.repeats_needed:
        noun = "repeat" if comparison.repeats_needed == 1 else "repeats"
        whose = "" if comparison.baseline.kind == "reference" else " per side"
        more = f"{comparison.repeats_needed} more {noun}{whose}"
        details.append(f"{more} ({comparison.repeats_note})")
    if comparison.differences:
        details.append(pluralize(len(comparison.differences), "setting", "differ"))
    return Figure("Confidence", comparison.confidence, "", tuple(details))


def _margin(comparison: Comparison) -> str:
    rounding = comparison.resolution
    rounding_text = (
        f" + {percent(rounding, 2)} for printed digits" if rounding >= SMALLEST_SHOWN else ""
    )
    return f"margin {percent(comparison.margin, 2)}{rounding_text}"


def _causes(comparison: Comparison) -> Iterator[str]:
    yield from comparison.causes[:MAX_CAUSES]
    if len(comparison.causes) > MAX_CAUSES:
        yield f"{pluralize(len(comparison.causes) - MAX_CAUSES, 'further change')} in the JSON"


def _metric_row(metric: MetricComparison) -> dict[str, Any]:
    interval = None
    if metric.low is not None and metric.high is not None:
        interval = f"{percent_change(metric.low)} to {percent_change(metric.high)}"
    baseline, candidate = (
        None if side.value is None else format_value(side.value, metric.unit)
        for side in (metric.baseline, metric.candidate)
    )
    return {
        "metric": f"{metric.metric} *" if metric.primary else metric.metric,
        "baseline": baseline,
        "candidate": candidate,
        "change": None if metric.ratio is None else percent_change(metric.ratio),
        "interval": interval,
        "p": None if metric.p is None else p_text(metric.p),
        "p_corrected": None if metric.p_corrected is None else p_text(metric.p_corrected),
        "verdict": metric.verdict if metric.note is None else f"{metric.verdict}: {metric.note}",
    }


def _csv_rows(comparison: Comparison) -> list[dict[str, Any]]:
    return [
        {
            **metric.model_dump(),
            "baseline": metric.baseline.value,
            "candidate": metric.candidate.value,
            "n_baseline": metric.baseline.n,
            "n_candidate": metric.candidate.n,
        }
        for metric in comparison.metrics
    ]


def p_text(value: float) -> str:
    """Return a p value with four decimals, or `< 0.0001`."""
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}"


_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold, escaped or not."""

FAILURES = frozenset({"slower", "worse", "differs"})


def junit_xml(comparison: Comparison) -> str:
    """Return a test suite with one test for comparability and one for each primary metric.

    A regression is a failure. An undecided metric is an error.
    """
    suite = ElementTree.Element("testsuite", name="paceline compare")
    where = f"{comparison.candidate.name} against {comparison.baseline.name}"
    tests = [_comparable(suite, where, comparison)]
    tests += [
        _metric(suite, where, metric, comparison) for metric in comparison.metrics if metric.primary
    ]
    suite.set("tests", str(len(tests)))
    suite.set("failures", str(sum(test.find("failure") is not None for test in tests)))
    suite.set("errors", str(sum(test.find("error") is not None for test in tests)))
    output = ElementTree.SubElement(suite, "system-out")
    output.text = _clean(plain_text(comparison_document(comparison)))
    return _text(suite)


def commands_junit_xml(comparison: CommandComparison) -> str:
    """Return a test suite with one test: whether command B is as good as A.

    A worse, failed or different command is a failure. An undecided or likely verdict is an error.
    """
    suite = ElementTree.Element("testsuite", name="paceline ab")
    test = _case(
        suite, f"{comparison.commands[1]} against {comparison.commands[0]}", comparison.metric
    )
    tags = {"same": None, "faster": None, "better": None}
    tag = tags.get(comparison.verdict, "failure")
    if comparison.verdict == "undecided" or comparison.verdict in LIKELY:
        tag = "error"
    if tag:
        _fault(test, tag, comparison.verdict, comparison.sentence)
    suite.set("tests", "1")
    suite.set("failures", str(int(tag == "failure")))
    suite.set("errors", str(int(tag == "error")))
    output = ElementTree.SubElement(suite, "system-out")
    output.text = _clean(plain_text(commands_document(comparison)))
    return _text(suite)


def _text(suite: ElementTree.Element) -> str:
    ElementTree.indent(suite)
    xml = ElementTree.tostring(suite, encoding="unicode", xml_declaration=False)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{xml}\n'


def _comparable(
    suite: ElementTree.Element, where: str, comparison: Comparison
) -> ElementTree.Element:
    test = _case(suite, where, "comparable")
    if not comparison.metrics:
        _fault(test, "error", comparison.verdict, comparison.sentence)
    return test


def _metric(
    suite: ElementTree.Element, where: str, metric: MetricComparison, comparison: Comparison
) -> ElementTree.Element:
    test = _case(suite, where, metric.metric)
    if metric.verdict in FAILURES:
        # With several primary metrics, a difference may be within chance after the correction.
        sure = metric.metric == comparison.metric or comparison.verdict in FAILURES
        _fault(test, "failure" if sure else "error", metric.verdict, change_text(metric))
    elif metric.verdict in ("undecided", "unknown", *LIKELY):
        _fault(test, "error", metric.verdict, metric.note or change_text(metric))
    return test


def _case(suite: ElementTree.Element, where: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=_clean(where), name=_clean(name))


def _fault(test: ElementTree.Element, tag: str, kind: str, message: str) -> None:
    ElementTree.SubElement(test, tag, type=kind, message=_clean(message))


def _clean(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", printable(text))
