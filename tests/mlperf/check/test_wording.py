"""Messages of the official checker become plain sentences with the file's own line numbers."""

from __future__ import annotations

import pytest

from paceline.mlperf.check.result_lines import ResultLines
from paceline.mlperf.check.wording import finding, in_words, incomplete_records, unread_finding
from tests.mlperf.samples import line

LOG = "\n".join(
    ["#!/bin/bash", line("lora_rank", 8), "step 1\rstep 2\r 0: " + line("seed", 1), line("seed", 2)]
)
LINES = ResultLines.of(LOG.encode())


def test_result_lines_keep_the_numbers_that_an_editor_shows():
    assert LINES.numbers == [2, 3, 4]
    assert LINES.of_key("seed") == [3, 4]
    assert LINES.number_of(line("seed", 2)) == 4 and LINES.number_of("nothing") is None
    assert LINES.texts[1] == line("seed", 1)


def test_a_failed_check_names_line_rule_and_value():
    message = (
        f"CHECK for 'lora_rank' failed in line 0:\n{line('lora_rank', 8)}\n"
        "failed test:  v['value'] == 16\ncurrent context[s]={}\ncurrent line[v]={}"
    )

    worded = finding(message, LINES)

    assert (worded.key, worded.line) == ("lora_rank", 2)
    assert worded.message == "lora_rank must be 16, and is 8"
    assert worded.rule == "v['value'] == 16"
    assert worded.official.startswith("CHECK for 'lora_rank' failed in line 0:")


def test_a_check_that_broke_off_names_its_line():
    message = (
        "Failed executing CHECK code:\n v['value'] > 0 \ntriggered by line:\n"
        f"{line('lora_rank', 8)}\ncurrent context[s]={{}}"
    )

    worded = finding(message, LINES)

    assert (worded.key, worded.line) == ("lora_rank", 2)
    assert worded.message == "lora_rank must be > 0; the check itself failed on it"


@pytest.mark.parametrize(
    ("message", "key", "line_number", "words"),
    [
        (
            "Required EXACTLY_ONE occurrence of 'run_stop' but found 0",
            "run_stop",
            None,
            "run_stop is missing",
        ),
        (
            "Required EXACTLY_ONE occurrence of 'seed' but found 2 with different values: [1, 2]",
            "seed",
            3,
            "seed stands 2 times with different values (1, 2), it must stand once (lines 3, 4)",
        ),
        (
            "Required AT_LEAST(5) occurrence of 'seed' but found 2",
            "seed",
            3,
            "seed stands 2 times, it must stand at least 5 times (lines 3, 4)",
        ),
        (
            "Required AT_LEAST_ONE occurrence of 'eval_stop' or 'block_stop'",
            None,
            None,
            "block_stop or eval_stop is missing: one of them must be there",
        ),
        (
            "Failed checks for seed : (v['value'] <= 3.3) and v['value'] > 0.0",
            "seed",
            4,
            "no seed passes: one of its 2 must reach 3.3 or less, and be above 0",
        ),
        ("No log lines detected", None, None, "the log holds no result line"),
        (
            "Could not find config file: /x/training_5.1.0/closed_bert.yaml",
            None,
            None,
            "the ruleset has no rules for 'bert'",
        ),
        (
            "Could not find config file: /x/training_5.1.0/closed_llama31_8b_tiny.yaml",
            None,
            None,
            "the ruleset has no rules for 'llama31_8b_tiny'; --ruleset tiny has some",
        ),
        (
            "failed test: s['run_stopped']\ncurrent context[s]={}",
            None,
            None,
            "at its end the log breaks the rule `s['run_stopped']`",
        ),
        ("something new", None, None, "something new"),
    ],
)
def test_messages_about_no_single_line_are_put_into_words(
    message: str, key: str | None, line_number: int | None, words: str
):
    worded = finding(message, LINES)

    assert (worded.key, worded.line, worded.message) == (key, line_number, words)


@pytest.mark.parametrize(
    ("test", "words"),
    [
        (" v['value'] in ['closed', 'open'] ", "must be one of 'closed', 'open'"),
        (" v['value'] == 'cosine with linear warmup' ", "must be 'cosine with linear warmup'"),
        (
            " v['value'] == 1_200_000 - s['opt_learning_rate_warmup_steps'] ",
            "must be 1200000 less opt_learning_rate_warmup_steps",
        ),
        (" v['value'] != '' ", "must not be empty"),
        ("'status' in v['metadata']", "must state status in its metadata"),
        (" ( s['init_stopped'] == True )", "must stand behind init_stop"),
        (
            "ll.timestamp - s['first_init_start'] < (s['compile_time_mins']*60*1e3)",
            "comes too late: initialisation takes longer than the division allows untimed",
        ),
        (
            "v['metadata']['epoch_count'] > 0 if 'epoch_count' in v['metadata'] else True",
            "breaks the rule "
            "`v['metadata']['epoch_count'] > 0 if 'epoch_count' in v['metadata'] else True`",
        ),
    ],
)
def test_rules_are_put_into_words_or_quoted(test: str, words: str):
    assert in_words(test) == words


def test_lines_that_cannot_be_parsed_are_named():
    lines = ResultLines.of(b'a\n:::MLLOG {bad\n:::MLLOG {"key": "x", "value": 1}\n')

    assert unread_finding(":::MLLOG {bad", "why", lines).line == 2
    (worded,) = incomplete_records(lines)
    assert (worded.line, worded.message) == (3, "this result line has no time_ms and no metadata")
