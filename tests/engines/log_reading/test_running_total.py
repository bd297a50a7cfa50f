"""Running totals: what was added between two lines, a step."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.engines.log_reading.records import RunningTotals

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
