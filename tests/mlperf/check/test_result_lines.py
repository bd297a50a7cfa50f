"""Messages of the official checker come as they are, with the file's own line numbers."""

from __future__ import annotations

import pytest

from paceline.mlperf.check.result_lines import ResultLines, finding, incomplete_records
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


def test_records_without_a_field_are_named():
    lines = ResultLines.of(b'a\n:::MLLOG {bad\n:::MLLOG {"key": "x", "value": 1}\n')

    (incomplete,) = incomplete_records(lines)
    assert incomplete.line == 3
    assert incomplete.message == "this result line has no time_ms and no metadata"
