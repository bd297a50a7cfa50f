"""What a log says is kept as it was said, in little memory, and never makes anything fail."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.units import pluralize
from paceline.engines.log_reading.log_content import (
    MAX_CHARACTERS,
    MAX_REMARKS,
    LogContent,
    decimal_step,
    excerpt,
    numbers,
    whole_numbers,
)


def log_of(*index: int, **columns: list[float]) -> LogContent:
    log = LogContent()
    log.add_steps(np.array(index, np.int64), **{k: np.array(v) for k, v in columns.items()})
    return log


def test_a_column_that_comes_late_or_stops_is_unknown_elsewhere():
    log = log_of(1, 2, loss=[5.0, 4.0])
    log.add_steps(np.array([3]), step_time_s=np.array([0.5]))
    log.add_steps(np.array([4]), loss=np.array([3.0]), step_time_s=np.array([0.4]))
    steps = log.steps()

    np.testing.assert_array_equal(steps["loss"], [5.0, 4.0, np.nan, 3.0])
    np.testing.assert_array_equal(steps["step_time_s"], [np.nan, np.nan, 0.5, 0.4])
    assert np.isnan(steps["mfu"]).all()


def test_step_times_keep_all_their_digits():
    assert log_of(1, 2, step_time_s=[0.1, 0.2]).steps()["step_time_s"].tolist() == [0.1, 0.2]


def test_a_step_time_of_zero_or_less_says_nothing():
    times = [0.5, 0.0, -1.0, 1e-30, float("nan"), float("inf")]
    steps = log_of(1, 2, 3, 4, 5, 6, step_time_s=times, loss=[1.0] * 6).steps()

    np.testing.assert_array_equal(steps["step_time_s"], [0.5, *[np.nan] * 4, np.inf])


def test_columns_come_in_the_order_in_which_they_were_given():
    names = ["loss", "mfu", "grad_norm", "tokens", "samples", "busy_time_s", "seq_len"]

    assert list(log_of(1, **{name: [1.0] for name in names}).steps().columns) == names


def test_a_column_of_another_name_or_length_is_refused():
    with pytest.raises(KeyError, match="speed is not a column"):
        log_of(1, speed=[1.0])
    with pytest.raises(AssertionError, match="loss"):
        log_of(1, 2, loss=[1.0])


def test_a_log_without_steps_has_none():
    assert len(LogContent().steps()) == 0


@pytest.mark.parametrize(
    ("printed", "used"),
    [
        ([1, 2, 3], [1, 2, 3]),
        ([1, 2, 4, 3, 5], [1, 2, 3, 4, 5]),
        ([2, 1, 3, 5, 4], [1, 2, 3, 4, 5]),
        ([1, 1, 2, 2, 3, 3], [1, 2, 3]),
        ([7, 7, 7], [7]),
        ([*range(1, 7)] * 2, [*range(1, 7)] * 2),
        ([10, 20, 30, 5], [10, 20, 30, 5]),
        ([100, 200, 300, 400, 300, 400, 500], [100, 200, 300, 400, 300, 400, 500]),
    ],
)
def test_what_writers_confuse_is_put_right_and_restarts_stay(printed, used):
    steps = log_of(*printed, loss=list(map(float, printed)), mfu=[0.5] * len(printed)).steps()

    assert steps.index.tolist() == used
    assert steps["loss"].tolist() == list(map(float, used))
    assert steps["mfu"].tolist() == [0.5] * len(used)


def test_the_later_line_of_two_ranks_is_used_and_said_so():
    log = log_of(1, 1, 2, 2, 3, 3, loss=[1, 10, 2, 20, 3, 30], step_time_s=[1, 2, 1, 2, 1, 2])

    assert log.steps()["loss"].tolist() == [10, 20, 30]
    assert log.remarks == [
        "several ranks print each step: the last line counts, 3 lines are ignored"
    ]


def test_a_bar_that_is_drawn_again_counts_once():
    log = log_of(1, 2, 2, 2, 3, step_time_s=[1, 2, 2, 2, 3])

    assert log.steps().index.tolist() == [1, 2, 3]
    assert log.remarks == ["2 step lines repeat the previous one (ignored)"]


def test_a_restart_is_kept_and_said():
    log = log_of(1, 2, 3, 4, 5, 3, 4, 5, 6)

    assert log.steps().index.tolist() == [1, 2, 3, 4, 5, 3, 4, 5, 6]
    assert log.remarks[0].startswith("the step numbers start over 1 time (restarts")


def test_times_that_are_none_are_said():
    log = LogContent()
    times = numbers([b"1.5", b"nan", b"-0.5", b"", b"0", b"1.5"])
    log.add_steps(np.arange(6), step_time_s=times)

    assert int(np.isfinite(log.steps()["step_time_s"]).sum()) == 2
    assert log.remarks == ["invalid step times (zero, negative or NaN): 3"]


def test_swapped_neighbours_are_said():
    log = log_of(1, 3, 2, 4, 6, 5)
    log.steps()

    assert log.remarks == [
        "2 step lines were printed before the previous step's line; the order is restored"
    ]


def test_a_single_line_is_said_in_the_singular():
    again, exchanged = log_of(1, 2, 2, 3, step_time_s=[1, 2, 2, 3]), log_of(1, 3, 2, 4)
    for log in (again, exchanged):
        log.steps()

    assert again.remarks == ["1 step line repeats the previous one (ignored)"]
    assert exchanged.remarks == [
        "1 step line was printed before the previous step's line; the order is restored"
    ]


@given(st.lists(st.integers(0, 9)))
def test_whatever_the_order_each_row_keeps_its_own_values(printed):
    steps = log_of(*printed, loss=np.arange(len(printed), dtype=float).tolist()).steps()
    used = steps.index.tolist()

    assert set(used) <= set(printed) and bool(printed) == bool(used)
    assert all(printed[int(row)] == number for number, row in zip(used, steps["loss"], strict=True))


@given(st.lists(st.integers(0, 9)))
def test_steps_can_be_asked_for_twice(printed):
    log = log_of(*printed)

    assert log.steps().index.tolist() == log.steps().index.tolist()


def test_millions_of_lines_that_come_again_take_little_memory():
    tracemalloc.start()
    try:
        log, values = LogContent(), np.random.default_rng(0).random(10_000)
        for k in range(300):
            index = np.arange(10_000 * k, 10_000 * (k + 1)) // 2
            log.add_steps(index, step_time_s=values, loss=values, mfu=values, grad_norm=values)
        n = len(log.steps())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert n == 1_500_000
    assert peak < 3_000_000 * (8 + 8 + 4 + 4 + 4 + 24)


def test_a_remark_is_kept_once_and_no_more_than_a_screen_of_them():
    log = LogContent()
    for number in [1, 1, 2, *range(1000)]:
        log.remark(f"{pluralize(number, 'line', 'were')} torn")

    assert log.remarks[:2] == ["1 line was torn", "2 lines were torn"]
    assert len(log.remarks) == MAX_REMARKS


def test_the_largest_memory_figure_of_a_kind_is_kept():
    log = LogContent()
    for value in (5.0, 7.0, 6.0, float("nan"), float("inf")):
        log.peak("reserved", value)
    log.peak("allocated", float("nan"))

    assert log.memory_bytes == {"reserved": 7.0}


def test_printed_numbers_are_read():
    texts = [b"1.25e+3", b"-0.5", b"7", b"0"]

    assert numbers(texts).tolist() == [1250.0, -0.5, 7.0, 0.0]


def test_what_is_not_said_and_what_is_not_a_number_differ():
    read = numbers([b"", b"nan", b"NaN", b"inf", b"-inf", b"1e400", b"1e101", b"1.2.3", b"1e"])

    np.testing.assert_array_equal(read, [np.nan] + [np.inf] * 6 + [np.nan] * 2)
    np.testing.assert_array_equal(numbers([b"nan", b"1e400"]), [np.inf] * 2)
    np.testing.assert_array_equal(numbers([b"", b""]), [np.nan] * 2)


@given(st.lists(st.binary(max_size=30) | st.from_regex(rb"[0-9.eE+-]{0,24}", fullmatch=True)))
def test_no_text_makes_numbers_fail_or_overflow_later(texts):
    values = numbers(texts)

    assert len(values) == len(texts)
    finite = values[np.isfinite(values)]
    assert np.isfinite(finite * 1e24).all() and np.isfinite(finite**2).all()


@given(st.lists(st.from_regex(rb"[0-9]{1,60}", fullmatch=True)))
def test_no_digits_make_whole_numbers_fail(texts):
    expected = [min(int(text[:40]), 2**63 - 1) for text in texts]

    assert whole_numbers(texts).tolist() == expected


def test_thousands_of_digits_are_the_largest_number():
    assert whole_numbers([b"9" * 100_000, b"5"]).tolist() == [2**63 - 1, 5]


@pytest.mark.parametrize(
    ("text", "step"),
    [
        (b"5690.4", 0.1),
        (b"29", 1.0),
        (b"1.25e+3", 10.0),
        (b"5.", 1.0),
        (b".25", 0.01),
        (b"-0.125", 0.001),
        (b"2E-3", 0.001),
        (b"", 0.0),
        (b"nan", 0.0),
        (b"inf", 0.0),
        (b"1e", 0.0),
        (b"1e5e5", 0.0),
        (b"e+-", 0.0),
        (b".", 0.0),
        (b"1" * 9999 + b"x", 0.0),
    ],
)
def test_the_step_of_the_last_digit(text, step):
    assert decimal_step(text) == pytest.approx(step, rel=1e-12)


@given(st.from_regex(rb"[0-9.eE+-]{0,24}", fullmatch=True) | st.binary(max_size=30))
def test_no_text_makes_the_last_digit_fail(text):
    assert 0.0 <= decimal_step(text) <= 1e100


def test_an_excerpt_shows_no_control_characters():
    line = b"\x1b[31mtorch.OutOfMemoryError:\x1b[0m\x07 CUDA\x9b1m out\tof memory\r\n\xff"

    assert excerpt(line) == "torch.OutOfMemoryError: CUDA\ufffd1m out of memory \ufffd"


@given(st.binary(max_size=1000))
def test_an_excerpt_is_short_and_can_be_printed(line):
    shown = excerpt(line)

    assert len(shown) <= MAX_CHARACTERS
    assert shown.isprintable()


def test_another_rank_adds_settings_memory_and_the_end_but_no_steps():
    log, other = LogContent(), LogContent()
    log.facts, log.memory_bytes = {"tp": 2, "global_batch": 16}, {"reserved": 5.0}
    other.facts, other.memory_bytes = {"tp": 1, "seq_len": 128}, {"reserved": 7.0, "resident": 3.0}
    other.end_line = "[after training is done]"
    other.add_steps(np.array([1]), step_time_s=np.array([1.0]))
    log.add_rank(other)

    assert log.facts == {"tp": 2, "global_batch": 16, "seq_len": 128}
    assert log.memory_bytes == {"reserved": 7.0, "resident": 3.0}
    assert log.end_line == "[after training is done]" and len(log) == 0
