"""Event lines are read back whole, and a torn line costs only itself."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paceline.files.events import read_events, read_rank
from tests.example import make_spec

START: dict[str, Any] = {
    "event": "start",
    "schema": 1,
    "rank": 0,
    "world_size": 1,
    "local_rank": 0,
    "host": "h",
    "pid": 1,
    "time_unix": 1.0,
    "torch": "2",
    "python": "3",
    "cuda": None,
    "backend": None,
    "device_name": "cpu",
    "num_parameters": make_spec().num_parameters,
    "trainable_parameters": 1,
    "layout": {},
    "dtype": "fp32",
    "matmul_precision": "high",
    "threads": 1,
    "data": {},
}
STEP: dict[str, Any] = {
    "event": "step",
    "step": 1,
    "loss": 2.0,
    "grad_norm": 1.0,
    "tokens": 64,
    "samples": 2,
    "global_batch": 4,
    "seq_len": 32,
    "step_time_s": 0.2,
    "busy_time_s": 0.1,
    "comm_wait_s": 0.1,
    "data_wait_s": 0.0,
    "memory_bytes": {"allocated": None, "reserved": None, "resident": 5.0},
}
END: dict[str, Any] = {
    "event": "end",
    "status": "ok",
    "reason": None,
    "steps": 1,
    "time_unix": 2.0,
}
MEMORY: dict[str, Any] = {
    "event": "memory",
    "step": 2,
    "kind": "tracked",
    "tracker": "MemTracker",
    "why": None,
    "watcher_bytes": 2e6,
    "parts_bytes": {
        "weights": 40.0,
        "gradients": 40.0,
        "optimizer": 80.0,
        "buffers": 5.0,
        "gathered": 0.0,
        "activations": 300.0,
        "other": 0.0,
        "context": 1000.0,
    },
    "at_peak_bytes": {
        "weights": 40.0,
        "gradients": 10.0,
        "optimizer": 80.0,
        "buffers": 5.0,
        "gathered": 0.0,
        "activations": 300.0,
        "other": 0.0,
    },
    "peak_bytes": {
        "allocated": None,
        "reserved": None,
        "device_used": None,
        "resident": 2000.0,
        "tracked": 435.0,
    },
}


def lines(*events: dict[str, Any]) -> list[str]:
    return [json.dumps(event) + "\n" for event in events]


def test_a_rank_reads_back():
    log = read_rank(lines(START, STEP, END))
    assert log.start is not None and log.end is not None
    assert (log.steps[0].index, log.steps[0].resident_bytes, log.steps[0].allocated_bytes) == (
        1,
        5.0,
        None,
    )


def test_a_rank_knows_its_pipeline_stage_where_the_line_says_so():
    def stage(layout: dict[str, Any]) -> int:
        start = read_rank(lines({**START, "layout": layout})).start
        assert start is not None
        return start.stage

    assert stage({"coordinates": {"pp": 3, "dp": 0, "cp": 0, "tp": 1}}) == 3
    for unknown in (
        {},
        {"coordinates": None},
        {"coordinates": {"pp": "1"}},
        {"coordinates": {"pp": -1}},
        {"coordinates": [1]},
    ):
        assert stage(unknown) == 0


def test_the_memory_of_a_rank_is_read_and_its_traced_step_has_no_time():
    watched = {**STEP, "step": 2, "tracked": True, "step_time_s": 9.0}
    log = read_rank(lines(START, STEP, MEMORY, watched, {**STEP, "step": 3}, END))

    assert log.memory is not None and log.memory.parts_bytes["activations"] == 300.0
    assert log.tracked_step is not None and log.tracked_step.step_time_s == 9.0
    assert [s.step_time_s for s in log.steps] == [0.2, None, 0.2]
    assert log.steps[1].busy_time_s is None and log.steps[1].loss == 2.0
    assert log.skipped_lines.lines == 0


def test_what_the_device_has_in_use_is_read_where_the_line_says_it():
    used = {**STEP, "memory_bytes": {**STEP["memory_bytes"], "device_used": 7.0}}
    assert [s.device_used_bytes for s in read_rank(lines(STEP, used)).steps] == [None, 7.0]


def test_a_truncated_last_line_loses_no_other():
    text = lines(START, STEP, {**STEP, "step": 2})
    log = read_rank([*text[:2], text[2][:40]])
    assert [s.index for s in log.steps] == [1] and log.end is None


def test_foreign_and_wrong_lines_are_passed_over():
    noise = ["warning: x\n", "{}\n", '{"event": "step"}\n', "{nonsense\n", '{"event": "other"}\n']
    assert [s.index for s in read_rank([*noise, *lines(STEP), *noise]).steps] == [1]


def test_event_lines_that_are_not_valid_are_counted():
    wrong = [{**STEP, "step": -1}, {**STEP, "surprise": 1}, {"event": "step"}, {"event": "other"}]
    log = read_rank(lines(START, STEP, *wrong, END))

    assert len(log.steps) == 1 and log.skipped_lines.lines == 4
    assert log.skipped_lines.warning == "4 event lines are not valid in schema 1 and skipped"


def test_a_log_of_valid_lines_has_nothing_unread():
    log = read_rank([*lines(START, STEP), "a warning\n", "{}\n", "{nonsense\n", *lines(END)])

    assert log.skipped_lines.lines == 0 and log.skipped_lines.warning is None


def test_a_newer_schema_gives_a_warning():
    log = read_rank(lines({**START, "schema": 3}, {**STEP, "new": 1}, {**START, "schema": 2}))

    assert log.start is None and log.skipped_lines.newest_schema == 3
    assert log.skipped_lines.warning == (
        "the event lines have schema 3 and this version reads schema 1: 3 of them were skipped; "
        "update Paceline"
    )


def test_a_line_truncated_by_a_restart_counts_and_one_at_the_end_does_not():
    torn = lines(STEP)[0][:40]

    assert read_rank([*lines(START), torn + "\n", *lines(START, STEP)]).skipped_lines.lines == 1
    assert read_rank([*lines(START, STEP), torn]).skipped_lines.lines == 0


def test_an_older_end_line_whose_words_are_garbled_is_an_end_all_the_same():
    garbled = "no progress for abc s in step 3: waiting for other ranks"
    end = read_rank(lines(START, STEP, {**END, "status": "failed", "reason": garbled})).end

    assert end is not None and (end.reason, end.cause) == (garbled, "own_fault")


def test_numbers_that_overflow_make_a_line_invalid():
    huge = [f'{{"event": "step", "step": {"9" * 5000}}}\n', *lines({**STEP, "loss": 10**400})]

    assert read_rank([*huge, *lines(STEP)]).skipped_lines.lines == 2


def test_a_nan_loss_is_kept_as_nan():
    (step,) = read_rank([json.dumps({**STEP, "loss": float("nan")})]).steps
    assert step.loss is not None and step.loss != step.loss


@given(st.lists(st.text(max_size=60), max_size=10))
def test_any_text_is_read_without_an_exception(text: list[str]):
    assert list(read_events(text)) == []


@given(st.binary(max_size=300))
def test_cutting_a_file_anywhere_keeps_the_whole_lines(tail: bytes):
    whole = "".join(lines(START, STEP, {**STEP, "step": 2}))
    for cut in (len(whole) // 3, len(whole) // 2, len(whole) - 2):
        text = whole[:cut] + tail.decode("latin-1").replace("\n", " ")
        numbers = [s.index for s in read_rank(text.splitlines()).steps]
        assert numbers == [1, 2][: len(numbers)]
