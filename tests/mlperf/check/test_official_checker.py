"""The official checker is started as a program, and whatever becomes of it is an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.mlperf.check import official_checker
from paceline.mlperf.check.official_checker import ResultLines, finding, incomplete_records
from tests.mlperf.samples import line, trial

installed = pytest.mark.skipif(
    not official_checker.checker_rulesets(), reason="mlperf-logging is not installed"
)


@installed
def test_the_rounds_of_the_package_are_known_in_order():
    rulesets = official_checker.checker_rulesets()

    assert "5.1.0" in rulesets and rulesets.index("4.1.0") < rulesets.index("5.0.0")
    assert official_checker.checker_version()


@installed
def test_messages_come_in_the_checkers_own_words(tmp_path: Path):
    copy = tmp_path / "log.txt"
    copy.write_text(trial() + ":::MLLOG {\n")

    verdict = official_checker.check_copy(copy, "5.1.0")

    assert "Required EXACTLY_ONE occurrence of 'train_samples' but found 0" in verdict.messages
    assert verdict.unparsable[0][0] == ":::MLLOG {" and verdict.checker_error is None


@installed
def test_rules_that_are_not_there_are_an_answer(tmp_path: Path):
    copy = tmp_path / "log.txt"
    copy.write_text(trial())

    assert "not supported" in str(official_checker.check_copy(copy, "5.2.0").checker_error)


@installed
def test_only_a_long_result_line_is_not_checked(tmp_path: Path):
    copy = tmp_path / "log.txt"
    copy.write_text("x" * 100_000 + "\n" + trial())
    assert official_checker.check_copy(copy, "5.1.0").checker_error is None

    copy.write_text(trial() + line("seed", "x" * 100_000) + "\n")
    assert "65,536" in str(official_checker.check_copy(copy, "5.1.0").checker_error)


LOG = "\n".join(
    ["#!/bin/bash", line("lora_rank", 8), "step 1\rstep 2\r 0: " + line("seed", 1), line("seed", 2)]
)
LINES = ResultLines.of([LOG.encode()])


def test_result_lines_keep_the_numbers_that_an_editor_shows():
    assert LINES.numbers == [2, 3, 4]
    assert LINES.of_key("seed") == [3, 4]
    assert LINES.number_of(line("seed", 2)) == 4 and LINES.number_of("nothing") is None
    assert LINES.texts[1] == line("seed", 1)


@pytest.mark.parametrize(
    ("message", "key", "line_number"),
    [
        (f"CHECK for 'seed' failed in line 2:\n{line('seed', 2)}\nfailed test: x", "seed", 4),
        (f"Failed executing CHECK code:\n x\ntriggered by line:\n{line('seed', 1)}", "seed", 3),
        ("Required EXACTLY_ONE occurrence of 'seed' but found 2", "seed", 3),
        ("Failed checks for seed : v['value'] <= 3.3", "seed", 3),
        ("Required EXACTLY_ONE occurrence of 'run_stop' but found 0", "run_stop", None),
        ("No log lines detected", None, None),
    ],
)
def test_a_message_has_the_key_and_the_line_it_is_about(
    message: str, key: str | None, line_number: int | None
):
    located = finding(f"{message}\ncurrent context[s]={{}}\ncurrent line[v]={{}}", LINES)

    assert (located.key, located.line) == (key, line_number)
    assert located.message == message.replace(" in line 2", "")


def test_a_long_line_of_the_log_does_not_hide_the_test_that_failed():
    message = f"CHECK for 'seed' failed in line 2:\n{'x' * 5000}\nfailed test: v['value'] > 0"
    assert finding(message, LINES).message.endswith("failed test: v['value'] > 0")


def test_records_without_a_field_are_named():
    lines = ResultLines.of([b"a\n:::MLLOG {bad\n", b':::MLLOG {"key": "x", "value": 1}\n'])

    (incomplete,) = incomplete_records(lines)
    assert incomplete.line == 3
    assert incomplete.message == "this result line lacks time_ms and metadata"
