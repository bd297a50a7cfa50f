"""Columns keep what was appended, however it came, in little memory."""

from __future__ import annotations

import itertools
import os
import tracemalloc
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.engines.log_reading.column import GrowingColumn

ANY_NUMBER = st.floats(width=32) | st.sampled_from([0.0, 1.0, float("nan"), float("inf")])


@given(st.lists(st.lists(ANY_NUMBER, max_size=4)), st.sampled_from([np.float32, np.float64]))
def test_a_column_gives_back_what_was_appended_however_it_came(parts, dtype):
    column = GrowingColumn(dtype)
    for part in parts:
        column.extend(np.array(part, np.float64))

    values = list(itertools.chain.from_iterable(parts))
    assert len(column) == len(values)
    np.testing.assert_array_equal(column.read(), np.array(values))


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, 1, 2**31 - 1, 2**31])))
def test_whole_numbers_are_kept_exactly(values):
    column = GrowingColumn(np.int64)
    for value in values:
        column.extend(np.array([value], np.int64))

    assert column.read().tolist() == values


@given(st.lists(st.sampled_from([0.0, 1.5, float("nan")]), min_size=1), st.data())
def test_a_column_keeps_chosen_rows_in_their_order(values, data):
    rows = data.draw(st.permutations(range(len(values))))
    kept = rows[: data.draw(st.integers(0, len(rows)))]
    column = GrowingColumn(np.float32)
    column.extend(np.array(values))
    column.keep(np.array(kept, np.int32))

    np.testing.assert_array_equal(column.read(), np.array([values[row] for row in kept]))


def test_a_column_of_one_value_takes_no_memory():
    tracemalloc.start()
    try:
        column, values = GrowingColumn(np.float64), np.full(10_000, 7.0)
        for _ in range(300):
            column.extend(values)
        read = column.read()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(read) == 3_000_000 and read[-1] == 7.0
    assert peak < 1 << 20


def test_a_number_too_large_for_its_column_is_infinite():
    column = GrowingColumn(np.float32)
    column.extend(np.array([1e60]))
    column.extend(np.array([1e60, 1.0]))

    assert column.read().tolist() == [np.inf, np.inf, 1.0]


def test_a_column_takes_no_more_than_its_values():
    column, values = GrowingColumn(np.float32), np.random.default_rng(0).random(10_000)
    column.extend(values)
    before = resident_bytes()
    for _ in range(2_000):
        column.extend(values)

    assert len(column.read()) == 20_010_000
    assert resident_bytes() - before < 1.2 * 4 * 20_000_000


def test_step_numbers_take_32_bit_each():
    column, n = GrowingColumn(np.int64), 4_000_000
    before = resident_bytes()
    for start in range(0, n, 10_000):
        column.extend(np.arange(start, start + 10_000))

    assert column.read()[-1] == n - 1
    assert resident_bytes() - before < 1.3 * 4 * n


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
