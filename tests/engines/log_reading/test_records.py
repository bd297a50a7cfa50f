"""Fields are found by name, and what a log says of its end is kept.

Running totals: what was added between two lines, a step.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from paceline.engines.log_reading.log_content import LogContent
from paceline.engines.log_reading.records import (
    RecordColumn,
    Records,
    RunningTotals,
    column,
    field,
    last_match,
    note_decimals,
    note_resolution,
    out_of_memory_line,
    product,
    significant_step,
    store_whole_numbers,
    watch_end,
    without_colors,
)

A, B = field(rb"a="), field(rb"b=")


def test_fields_may_stand_in_any_order():
    records = Records([b"a=1, b=2", b"b=3, a=4"])
    assert records.texts(A) == [b"1", b"4"]
    assert records.texts(B) == [b"2", b"3"]


def test_a_field_that_some_lack_keeps_its_rows():
    records = Records([b"a=1", b"b=2", b"a=3 a=9", b""])
    assert records.texts(A) == [b"1", b"", b"3", b""]
    assert records.texts(field(rb"c=")) is None


def test_a_field_that_stands_twice_does_not_push_the_rows_apart():
    assert Records([b"a=1 a=2", b"b=3", b"a=4"]).texts(A) == [b"1", b"", b"4"]


def test_columns_are_scaled_and_leave_out_what_nobody_says():
    records = Records([b"a=1.5", b"a=nan", b"b=2"])
    columns = records.columns({"loss": column(rb"a=", scale=10), "mfu": column(rb"c=")})
    assert columns.keys() == {"loss"}
    np.testing.assert_array_equal(columns["loss"], [15, np.inf, np.nan])


def test_of_several_names_the_first_one_counts():
    columns = Records([b"a=1 b=2", b"b=3", b"c=4"]).columns({"loss": RecordColumn((A, B))})
    np.testing.assert_array_equal(columns["loss"], [1, 3, np.nan])


def run(blocks: list[bytes], torn: re.Pattern[bytes] | None = None) -> tuple[bytes, LogContent]:
    log = LogContent()
    return b"".join(watch_end(blocks, log, b"All done", torn)), log


def test_whole_lines_pass_unchanged():
    text, log = run([b"step 1\n", b"step 2\r", b"step 3\n"])
    assert text == b"step 1\nstep 2\rstep 3\n"
    assert (log.end_line, log.incomplete_reason, log.out_of_memory) == (None, None, None)


def test_a_number_at_the_very_end_may_have_lost_digits():
    assert run([b"step 1\n", b"loss: 2.1"])[0] == b"step 1\nloss: "


def test_the_last_word_is_quoted_without_its_colours():
    _, log = run([b"x\n\x1b[32mAll done\x1b[0m in 5 s\nmore\n"])
    assert log.end_line == "All done in 5 s"


@pytest.mark.parametrize(
    "line",
    [
        b"torch.OutOfMemoryError: CUDA out of memory.",
        b"RuntimeError: HIP out of memory. Tried to allocate",
        b"RuntimeError: XPU out of memory. Tried to allocate 2.00 GiB",
        b"RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB",
        b"RuntimeError: CUDA error: out of memory",
        b"RuntimeError: CUDA driver error: out of memory",
        b"node-7: NCCL WARN Cuda failure 2 'out of memory'",
        b"node-7: NCCL WARN Cuda failure 'out of memory'",
        b"slurmstepd: error: Detected 1 oom-kill event(s)",
        b"slurmstepd: error: Detected 1 oom_kill event in StepId=7.0",
        b"[ 512.3] Out of memory: Killed process 4711 (python3) total-vm:9kB",
        b"[ 512.3] Out of memory: Kill process 4711 (python3) score 907",
        b"[ 512.3] Memory cgroup out of memory: Killed process 4711 (python3)",
        b"jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9",
        b"RESOURCE_EXHAUSTED: XLA:TPU compile error. Ran out of memory in memory space hbm.",
        b"RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9",
        b"terminate called after throwing an instance of 'std::bad_alloc'",
    ],
)
def test_the_first_sign_of_running_out_of_memory_is_quoted(line: bytes):
    later = b"torch.OutOfMemoryError: later\n"
    _, log = run([b"fine\n", b"to avoid out of memory\n" + line + b"\n" + later, later])
    assert log.out_of_memory == line.decode()


HARMLESS = (
    b"WARNING: retrying with half the batch to avoid out of memory",
    b"UserWarning: to prevent out of memory set expandable_segments:True",
    b"Out of memory estimates are printed every 100 steps",
    b"Allocator (GPU_0_bfc) ran out of memory trying to allocate 2.00GiB. The caller indicates "
    b"that this is not a failure",
    b"If you see torch.OutOfMemoryError, lower the micro-batch or shard the optimizer.",
    b"except torch.cuda.OutOfMemoryError:",
    b"OutOfMemoryErrors of the last run are gone",
    b"Hint: batches of 8 gave CUDA out of memory on this card (XPU out of memory as well).",
    b"[rank0]: HIP out of memory errors often come from fragmentation",
    b"# avoids 'CUDA error: out of memory' in the first step",
    b"room for zoom: killed process 7, can't allocate memory pool names, bad_alloc_retries=0",
)


@pytest.mark.parametrize("line", HARMLESS)
def test_a_warning_of_memory_is_not_its_end(line: bytes):
    assert run([b"step 1\n" + line + b"\n", line])[1].out_of_memory is None


def test_of_several_signs_the_first_in_the_text_is_quoted():
    signs = [b"x: HIP out of memory", b"y: std::bad_alloc", b"z: oom_kill"]
    for first in signs:
        others = [sign for sign in signs if sign != first]
        assert out_of_memory_line(b"\r".join([*HARMLESS, first, *others])) == first.decode()


def test_a_record_in_an_unfinished_last_line_is_torn():
    begun = re.compile(rb"step \d+(?!.*loss)")
    assert run([b"step 1 loss 2\nstep 2 lo"], begun)[1].incomplete_reason is not None
    assert run([b"step 1 loss 2\nstep 2 lo\n"], begun)[1].incomplete_reason is None
    assert run([b"step 1 loss 2\nstep 2 loss 3"], begun)[1].incomplete_reason is None
    assert run([], begun)[1].incomplete_reason is None


def test_colours_are_taken_away():
    assert without_colors(b"\x1b[38;2;180;60;0mred\x1b[0m") == b"red"


@pytest.mark.parametrize(
    ("value", "digits", "step"),
    [
        (11.2, 3, 0.1),
        (5.9, 3, 0.01),
        (6.08, 4, 0.001),
        (123.4, 4, 0.1),
        (0.189, 4, 1e-4),
        (0.0, 3, 0.0),
        (-2.0, 3, 0.0),
        (float("inf"), 3, 0.0),
        (float("nan"), 3, 0.0),
    ],
)
def test_the_step_of_the_last_significant_digit(value: float, digits: int, step: float):
    assert significant_step(value, digits) == pytest.approx(step)


def test_the_last_known_time_sets_the_resolution():
    log = LogContent()
    note_resolution(log, {"step_time_s": np.array([5.0, 20.0, np.nan])}, 3)
    assert log.resolution_s == pytest.approx(0.1)
    note_resolution(log, {"step_time_s": np.array([np.nan])}, 3)
    note_resolution(log, {}, 3)
    assert log.resolution_s == pytest.approx(0.1)
    note_decimals(log, [b"2.167", b""])
    assert log.resolution_s == pytest.approx(0.001)
    note_decimals(log, [])
    assert log.resolution_s == pytest.approx(0.001)


def test_settings_are_whole_numbers_above_zero():
    log = LogContent()
    statements = [(b"n", b"1,024"), (b"m", b"0"), (b"k", b"-3"), (b"x", b"5"), (b"n", b"2,048")]
    store_whole_numbers(log, {b"n": "global_batch", b"m": "tp", b"k": "pp"}, statements)
    store_whole_numbers(log, {b"n": "seq_len"}, [(b"n", b"9" * 19), (b"n", b"9" * 40)])
    assert log.facts == {"global_batch": 2048}


def test_a_product_needs_every_factor():
    assert product(8, 4, 2) == 64
    assert product(8, None) is None
    assert product(8, 0) is None
    assert product(8, 2.5) is None


def test_the_last_match_is_that_of_the_restart():
    match = last_match(re.compile(rb"tp=(\d)"), b"tp=1 tp=2")
    assert match is not None and match[1] == b"2"
    assert last_match(re.compile(rb"pp=(\d)"), b"tp=1") is None


NAN = float("nan")


def rates(index: list[int], totals: list[float], pieces: int = 1) -> tuple[list[bool], list[float]]:
    """Lines that count and the increase per step, read in several pieces."""
    running, new, added = RunningTotals(), list[bool](), list[float]()
    for part in np.array_split(np.arange(len(index)), pieces):
        kept, (values,) = running.rates(np.array(index)[part], np.array(totals)[None, part])
        new += kept.tolist()
        added += values.tolist()
    return new, added


@pytest.mark.parametrize("pieces", [1, 2, 3, 5])
def test_a_step_is_a_share_of_what_came_between(pieces: int):
    new, added = rates([1, 2, 4, 10, 20], [1.0, 3.0, 4.0, 10.0, 30.0], pieces)
    assert new == [True] * 5
    assert added == pytest.approx([1.0, 2.0, 0.5, 1.0, 2.0])


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_a_first_line_that_is_not_step_one_has_nothing_before_it(pieces: int):
    _, added = rates([0, 10, 20], [5.0, 6.0, 8.0], pieces)
    assert added == pytest.approx([NAN, 0.1, 0.2], nan_ok=True)


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_a_step_that_is_printed_again_is_left_out(pieces: int):
    new, added = rates([1, 1, 2, 2], [1.0, 1.1, 2.0, 2.1], pieces)
    assert new == [True, False, True, False]
    assert added == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_a_total_that_falls_or_is_unknown_tells_nothing(pieces: int):
    _, added = rates([1, 2, 3, 4], [1.0, 0.5, NAN, 2.0], pieces)
    assert added == pytest.approx([1.0, NAN, NAN, NAN], nan_ok=True)


def test_numbers_that_begin_again_tell_nothing():
    _, added = rates([8, 9, 1, 2], [8.0, 9.0, 10.0, 11.0])
    assert added == pytest.approx([NAN, 1.0, NAN, 1.0], nan_ok=True)


def test_what_is_infinite_is_unknown():
    with np.errstate(all="raise"):
        _, added = rates([1, 2, 3], [float("inf"), float("inf"), 3.0])
    assert all(np.isnan(added))
