"""A log without its program's end marker is distinguished from a complete one."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.engines import log_formats
from paceline.logs.facts import UserSettings
from paceline.logs.parser import parse_log
from tests.logs.example import chat_log, maxtext_log, megatron_log, titan_log

MARKER = "[after training is done] datetime: 2026-01-02 03:04:05\n"
TIMES = [5.7] * 30


def doubts(folder: Path, text: str) -> list[str]:
    path = folder / "train.log"
    path.write_text(text)
    warnings = parse_log(path, UserSettings()).document.warnings
    return [warning for warning in warnings if "end marker" in warning]


def test_a_log_cut_just_before_a_step_line_is_not_taken_for_a_whole_one(tmp_path: Path):
    assert doubts(tmp_path, megatron_log(TIMES)) == [
        "ends without an end marker ([after training is done]): the run was still "
        "going, was killed, or the log is truncated"
    ]
    assert doubts(tmp_path, megatron_log(TIMES) + MARKER) == []


def test_the_last_of_all_steps_is_an_end(tmp_path: Path):
    assert doubts(tmp_path, megatron_log([5.7] * 100)) == []
    assert doubts(tmp_path, megatron_log([5.7] * 98))


CUT_CHAT = chat_log().partition("======")[0]


@pytest.mark.parametrize("text", [titan_log(), CUT_CHAT], ids=["torchtitan", "deepspeed_chat"])
def test_other_log_formats_have_theirs(tmp_path: Path, text: str):
    assert doubts(tmp_path, text)


def test_a_printed_run_time_is_an_end(tmp_path: Path):
    assert doubts(tmp_path, chat_log()) == []


def test_a_log_format_without_one_is_not_doubted(tmp_path: Path):
    assert log_formats()["maxtext"].end_marker is None
    assert doubts(tmp_path, maxtext_log(TIMES)) == []
