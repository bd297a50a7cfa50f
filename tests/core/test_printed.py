"""A printed number stands for all values that its digits leave open."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.printed import Interval, Printed, exactly, like, misprints, read_printed


def printed(text: str, step: float | None = None) -> Printed:
    cell = read_printed(text, step)
    assert cell is not None
    return cell


@pytest.mark.parametrize(
    ("text", "value", "step"),
    [
        ("54.10%", 54.1, 0.01),
        ("14.8", 14.8, 0.1),
        ("29", 29, 1),
        ("3.94E+15", 3.94e15, 1e13),
        ("136,902,082,560", 136_902_082_560, 1),
        ("16GB borderline OOM", 16, 1),
        ("14.", 14, 1),
        ("5e-3", 0.005, 0.001),
        ("1e12", 1e12, 1e12),
        ("12.50 s", 12.5, 0.01),
    ],
)
def test_the_first_number_of_a_cell_is_read_with_its_last_digit(
    text: str, value: float, step: float
):
    cell = printed(text)
    assert (cell.value, cell.text) == (value, text)
    assert cell.step == pytest.approx(step)


@pytest.mark.parametrize("text", ["", "x", "OOM", "-", "n/a", "1e999", "%"])
def test_a_cell_without_a_number_is_none(text: str):
    assert read_printed(text) is None


def test_a_figure_known_to_be_a_multiple_has_that_resolution():
    cell = printed("5248", step=128)
    assert cell.rounding_interval() == Interval(5248 - 64, 5248 + 64)
    assert printed("5248", step=0.1).step == 1


@pytest.mark.parametrize(
    ("text", "bound", "inside", "outside"),
    [
        ("over 98%", "at least", 98.5, 97.9),
        ("> 98", "at least", 99, 97),
        ("under 2 s", "at most", 1.5, 2.5),
        ("at most 5", "at most", 5, 6),
    ],
)
def test_a_bound_leaves_one_side_open(text: str, bound: str, inside: float, outside: float):
    cell = printed(text)
    assert cell.bound == bound
    assert cell.rounding_interval().meets(exactly(inside)) and not cell.rounding_interval().meets(
        exactly(outside)
    )
    assert cell.truncation_interval() == cell.rounding_interval()


def test_cut_digits_leave_larger_values_than_rounded_ones():
    assert printed("44.4").rounding_interval().meets(exactly(44.4499))
    assert not printed("44.4").rounding_interval().meets(exactly(44.4505))
    assert printed("44.4").truncation_interval().meets(exactly(44.4505))
    assert not printed("44.4").truncation_interval().meets(exactly(44.39))


@given(st.floats(1e-3, 1e9), st.integers(0, 6))
def test_a_value_lies_in_the_interval_of_its_own_print(value: float, decimals: int):
    text = f"{value:.{decimals}f}"
    cell = printed(text)
    assert cell.rounding_interval().meets(exactly(value))
    assert like(value, cell) == text


def test_like_keeps_commas_and_exponents():
    assert like(136_902_082_561.4, printed("136,902,082,560")) == "136,902,082,561"
    assert like(3.9439e15, printed("3.90E+15")) == "3.94E+15"


def test_intervals_meet_and_have_values_in_common():
    assert Interval(1, 2).common(Interval(1.5, 3)) == Interval(1.5, 2)
    assert Interval(1, 2).common(Interval(3, 4)) is None
    assert Interval(1, 2).times(10) == Interval(10, 20)
    assert Interval(99, 101).relative_width == pytest.approx(0.02)
    assert not Interval(1, 2).meets(Interval(2.001, 3))


def test_an_edge_met_exactly_counts_in_spite_of_binary_rounding():
    assert Interval(0.3, 1).meets(exactly(0.1 + 0.2))
    assert exactly(0.1 + 0.2).meets(exactly(0.3))


def test_swapped_digits_are_tried_before_replaced_ones():
    tried = [(how, number.digits) for how, number in misprints(printed("8129"))]
    assert tried.index(("two digits swapped", "8192")) < 3
    assert ("one digit misprinted", "8125") in tried
    assert len(tried) == len(set(tried)) == 3 + 4 * 9 - 1


def test_a_misprint_keeps_the_exponent_and_starts_with_no_zero():
    digits = {number.digits for _, number in misprints(printed("3.94E+15"))}
    assert all(text.endswith("E+15") for text in digits)
    assert not any(
        text.startswith("0") for _, p in misprints(printed("1029")) for text in [p.digits]
    )


@pytest.mark.parametrize(
    "text", ["1e-99999999999999999999999999", "0e99999999999999999999", "1e400"]
)
def test_an_absurd_exponent_is_no_number(text: str):
    assert read_printed(text) is None


def test_a_number_below_all_floats_is_none_of_a_last_digit_either():
    cell = read_printed("1e-999999999999")
    assert cell is not None and (cell.value, cell.step) == (0.0, 0.0)
