"""A comparison in words, Markdown and JUnit XML, also when names are hostile."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from paceline.compare.judge import judge
from paceline.compare.judgement import Comparison
from paceline.compare.phrases import signed
from paceline.compare.sides import Side
from paceline.runs.comparison_junit import junit_xml
from paceline.runs.comparison_text import (
    MOST_CAUSES,
    comparison_md,
    finding_lines,
    headline,
    shown,
    summary_lines,
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


def test_the_headline_says_it_all():
    assert headline(slower()).startswith("▼ SLOWER  after is slower than before: step_time_s ")
    gain = judge(repeats(3, name="before"), repeats(3, -0.2, name="after"))
    assert "FASTER (SUSPICIOUS)" in headline(gain)
    assert any(line.startswith("too good: ") for line in finding_lines(gain))


def test_the_direction_of_the_ratio_is_told():
    text = "\n".join(summary_lines(slower()))
    assert "ratio 1.0300 of step_time_s, candidate over baseline (above 1 is worse)" in text
    assert "95 % interval" in text and "margin 1.00 %" in text and "n 3 and 3" in text


def test_undecided_says_how_many_more_repeats():
    assert any(" more repeats a side (" in line for line in summary_lines(undecided()))
    two = judge(repeats(2, name="before"), repeats(2, name="after"))
    assert "1 more repeat a side (" in "\n".join(summary_lines(two))
    published = undecided().baseline.model_copy(update={"kind": "reference"})
    text = "\n".join(summary_lines(undecided().model_copy(update={"baseline": published})))
    assert " more repeats (" in text


def test_a_difference_says_how_to_accept_it():
    assert "dtype: fp32 against bf16 (--allow dtype accepts it)" in list(
        finding_lines(not_comparable())
    )


def test_too_many_causes_are_counted():
    items = {f"packages.p{i}": "1" for i in range(20)}
    other = dict.fromkeys(items, "2")
    sides = (repeats(3, name=n, environment=e) for n, e in (("a", items), ("b", other)))
    lines = [line for line in finding_lines(judge(*sides)) if "cause" in line or "further" in line]
    assert len(lines) == MOST_CAUSES + 1 and lines[-1].startswith("8 further")


def test_other_units_of_the_step_time_are_left_to_json():
    names = [metric.metric for metric in shown(slower())]
    assert "step_time_s" in names and "tokens_per_s" not in names


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (1.0204, "+2.04 %"),
        (0.98, "-2.00 %"),
        (1.0, "+0.00 %"),
        (1.5, "+50.0 %"),
        (0.999999, "+0.00 %"),
    ],
)
def test_a_ratio_reads_as_a_change(ratio: float, text: str):
    assert signed(ratio) == text


def table_rows(markdown: str) -> list[str]:
    return [line for line in markdown.splitlines() if line.startswith("| ")]


def test_markdown_has_one_table_with_equal_columns():
    rows = table_rows(comparison_md(slower()))
    assert len({row.replace(r"\|", "").count("|") for row in rows}) == 1
    assert rows[2].startswith(r"| step\_time\_s \* |")


def test_hostile_names_break_neither_markdown_nor_xml_nor_terminal():
    broken = member(HOSTILE, status="failed", reason=HOSTILE)
    good = repeats(3, 0.03, name=HOSTILE)
    comparison = judge(repeats(3, name="before"), Side(HOSTILE, (*good.members, broken)))
    markdown, plain = comparison_md(comparison), [headline(comparison), *finding_lines(comparison)]
    for text in (markdown, *plain):
        assert "\x1b" not in text and "\x00" not in text
    assert not re.search(r"(?<!\\)[<`|*]", markdown.split("| metric")[0]) and all(
        "\n" not in line for line in plain
    )
    assert not [line for line in markdown.splitlines() if line.startswith("# b")]
    suite = ElementTree.fromstring(junit_xml(comparison).encode())
    assert suite.get("tests") == "2" and "</testcase>" in (suite[0].get("classname") or "")


@pytest.mark.parametrize(
    ("comparison", "failures", "errors"),
    [
        (slower(), 1, 0),
        (undecided(), 0, 1),
        (not_comparable(), 0, 1),
        (judge(repeats(5, name="a"), repeats(5, name="b")), 0, 0),
        (judge(side([0.2], "a"), Side("b", (member("b", status="oom"),))), 0, 1),
    ],
    ids=["slower", "undecided", "not comparable", "same", "invalid"],
)
def test_junit_counts_failures_and_errors(comparison: Comparison, failures: int, errors: int):
    suite = ElementTree.fromstring(junit_xml(comparison))
    cases = suite.findall("testcase")
    assert (suite.get("failures"), suite.get("errors")) == (str(failures), str(errors))
    assert suite.get("tests") == str(len(cases)) and cases[0].get("name") == "comparable"
    assert len(suite.findall(".//failure")) == failures and len(suite.findall(".//error")) == errors
    assert comparison.sentence in (suite.findtext("system-out") or "")


def test_a_primary_metric_within_the_correction_is_an_error_not_a_failure():
    both = judge(repeats(3, name="a"), repeats(3, 0.03, name="b"), metrics=["step_time_s", "mfu"])
    suite = ElementTree.fromstring(junit_xml(both))
    assert (both.verdict, suite.get("failures"), suite.get("errors")) == ("invalid", "0", "2")
