"""A comparison in words, Markdown and JUnit XML, also when names are hostile."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from paceline.compare.judge import judge
from paceline.compare.judgement import Comparison, independent_metrics, percent_change
from paceline.compare.sides import ComparisonSide
from paceline.report.document import Notes, Table
from paceline.report.markdown import markdown
from paceline.report.terminal import plain_text
from paceline.runs.comparison_report import (
    MAX_CAUSES,
    comparison_document,
    comparison_verdict,
    junit_xml,
)
from tests.compare.members import FACTS, member, repeats, side

HOSTILE = "</testcase><a href='x'>&\"\x00\x1b[31m\ud800\uffff ]]> | `*_$x$\n# b"


def slower(name: str = "after") -> Comparison:
    return judge(repeats(3, name="before"), repeats(3, 0.03, name=name))


def undecided() -> Comparison:
    return judge(repeats(3, name="before"), repeats(3, 0.006, name="after"))


def not_comparable() -> Comparison:
    other = FACTS.model_copy(update={"dtype": "bf16"})
    return judge(repeats(3, name="before"), repeats(3, name="after", facts=other))


def section_lines(comparison: Comparison, title: str) -> list[str]:
    return [
        line
        for section in comparison_document(comparison).sections
        if isinstance(section, Notes) and section.title == title
        for line in section.lines
    ]


def test_a_gain_that_is_too_good_is_marked():
    gain = judge(repeats(3, name="before"), repeats(3, -0.2, name="after"))
    assert comparison_verdict(gain).text.startswith("▲ faster, suspicious")
    assert section_lines(gain, "Warnings")[0].startswith("too good: ")


def test_the_change_has_its_interval_its_p_and_its_direction():
    change = comparison_document(slower()).figures[0]
    assert (change.label, change.value) == ("Change of step_time_s", "+3.00%")
    assert change.interval.endswith("(95%)") and change.details[0] == "less is better"
    assert comparison_verdict(slower()).tone == "alert"


def test_undecided_says_how_many_more_repeats():
    def needed(comparison: Comparison) -> str:
        return comparison_document(comparison).figures[-1].details[-1]

    assert " more repeats per side (" in needed(undecided())
    two = judge(repeats(2, name="before"), repeats(2, name="after"))
    assert needed(two).startswith("1 more repeat per side (")
    published = undecided().baseline.model_copy(update={"kind": "reference"})
    assert " more repeats (" in needed(undecided().model_copy(update={"baseline": published}))


def test_a_difference_says_how_to_accept_it():
    (table,) = [
        section
        for section in comparison_document(not_comparable()).sections_for("terminal")
        if isinstance(section, Table)
    ]
    assert table.cells()[:1] == [["dtype", "fp32", "bf16", "no: --allow dtype accepts it"]]


def test_too_many_causes_are_counted():
    items = {f"packages.p{i}": "1" for i in range(20)}
    other = dict.fromkeys(items, "2")
    sides = (repeats(3, name=n, environment=e) for n, e in (("a", items), ("b", other)))
    lines = section_lines(judge(*sides), "Possible causes")
    assert len(lines) == MAX_CAUSES + 1 and lines[-1].startswith("8 further")


def test_other_units_of_the_step_time_are_left_to_json():
    names = [metric.metric for metric in independent_metrics(slower())]
    assert "step_time_s" in names and "tokens_per_s" not in names


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (1.0204, "+2.04%"),
        (0.98, "-2.00%"),
        (1.0, "+0.00%"),
        (1.5, "+50.0%"),
        (0.999999, "+0.00%"),
    ],
)
def test_a_ratio_reads_as_a_change(ratio: float, text: str):
    assert percent_change(ratio) == text


def test_hostile_names_break_neither_markdown_nor_xml_nor_terminal():
    broken = member(HOSTILE, status="failed", reason=HOSTILE)
    good = repeats(3, 0.03, name=HOSTILE)
    comparison = judge(repeats(3, name="before"), ComparisonSide(HOSTILE, (*good.members, broken)))
    md, plain = (
        markdown(comparison_document(comparison)),
        plain_text(comparison_document(comparison)),
    )
    assert not set("\x1b\x00") & set(md + plain)
    assert not re.search(r"(?<!\\)[<`]", md)
    assert not [line for line in (md + plain).splitlines() if line.startswith("# b")]
    suite = ElementTree.fromstring(junit_xml(comparison).encode())
    assert suite.get("tests") == "2" and "</testcase>" in (suite[0].get("classname") or "")


@pytest.mark.parametrize(
    ("comparison", "failures", "errors"),
    [
        (slower(), 1, 0),
        (undecided(), 0, 1),
        (not_comparable(), 0, 1),
        (judge(repeats(5, name="a"), repeats(5, name="b")), 0, 0),
        (judge(side([0.2], "a"), ComparisonSide("b", (member("b", status="oom"),))), 0, 1),
    ],
    ids=["slower", "undecided", "not comparable", "same", "invalid"],
)
def test_junit_counts_failures_and_errors(comparison: Comparison, failures: int, errors: int):
    suite = ElementTree.fromstring(junit_xml(comparison))
    cases = suite.findall("testcase")
    assert (suite.get("failures"), suite.get("errors")) == (str(failures), str(errors))
    assert suite.get("tests") == str(len(cases)) and cases[0].get("name") == "comparable"
    assert len(suite.findall(".//failure")) == failures and len(suite.findall(".//error")) == errors
    printed = suite.findtext("system-out") or ""
    assert comparison.observed.rstrip(".") in printed
    assert comparison.sentence.removeprefix(comparison.observed).strip() in printed


def test_a_primary_metric_within_the_correction_is_an_error_not_a_failure():
    both = judge(repeats(3, name="a"), repeats(3, 0.03, name="b"), metrics=["step_time_s", "mfu"])
    suite = ElementTree.fromstring(junit_xml(both))
    assert (both.verdict, suite.get("failures"), suite.get("errors")) == ("invalid", "0", "2")
