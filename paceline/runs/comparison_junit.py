"""Output of a comparison as JUnit XML, which CI servers show as tests."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from paceline.compare.judgement import Comparison, MetricComparison, change_text
from paceline.core.text import printable
from paceline.report.terminal import plain_text
from paceline.runs.comparison_report import comparison_document

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
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=False) + "\n"


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
    elif metric.verdict in ("undecided", "unknown"):
        _fault(test, "error", metric.verdict, metric.note or change_text(metric))
    return test


def _case(suite: ElementTree.Element, where: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=_clean(where), name=_clean(name))


def _fault(test: ElementTree.Element, tag: str, kind: str, message: str) -> None:
    ElementTree.SubElement(test, tag, type=kind, message=_clean(message))


def _clean(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", printable(text))
