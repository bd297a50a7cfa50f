"""A cause is a change of one input under which the cell follows to its last digit."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from paceline.audit.derivation import (
    AlternativeInputs,
    Cell,
    Change,
    Inputs,
    Relation,
    RowSpeed,
    explains,
    other_inputs,
    other_speeds,
    relation,
    rounded_speeds,
    slip_of_digits,
)
from paceline.core.printed import Interval, exactly, read_printed

INPUTS = Inputs(
    seq_len=8192,
    global_batch=128,
    num_devices=64,
    flops_per_sample=exactly(3.94e15),
    peak_flops_per_s=989e12,
    total_tokens=1e12,
)
OPTIONS = AlternativeInputs(
    peaks_flops_per_s={"half of the sparse one": 989.5e12, "the sparse one": 1979e12},
    flops_per_sample={"causal attention": 3.68e15},
)
SPEED = RowSpeed(14.72, Interval(14.715, 14.725))


def cell(column: str, text: str, unit: float = 1.0) -> Cell:
    printed = read_printed(text)
    assert printed is not None
    return Cell(column, printed, unit)


def how(column: str) -> Relation:
    derived = relation(column, INPUTS)
    assert derived is not None
    return derived


def words(changes: Iterable[Change], column: str, text: str, unit: float = 1.0) -> list[str]:
    figure = cell(column, text, unit)
    return [change.words for change in changes if explains(change, figure, how(column))]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "54.10%",
            "follows with a peak of 989.5 TFLOP/s, half of the sparse one, "
            "not the declared 989 TFLOP/s",
        ),
        (
            "27.05%",
            "follows with a peak of 1979 TFLOP/s, the sparse one, not the declared 989 TFLOP/s",
        ),
        ("50.55%", "follows with causal attention, which is -6.6% in FLOPs"),
        ("27.06%", "follows with a global batch of 64, not the declared 128"),
        ("27.06%", "follows with a number of devices of 128, not the declared 64"),
        ("53.57%", "follows with the FLOPs of a sequence rounded to 3.9E+15"),
    ],
)
def test_another_input_explains_a_cell(text: str, cause: str):
    assert cause in words(other_inputs(INPUTS, SPEED, OPTIONS), "mfu", text, 0.01)


def test_peaks_come_before_counts():
    causes = words(other_inputs(INPUTS, SPEED, OPTIONS), "mfu", "27.05%", 0.01)
    assert "peak" in causes[0]


def test_what_does_not_enter_a_cell_cannot_explain_it():
    assert words(other_inputs(INPUTS, SPEED, OPTIONS), "tokens_per_s", "71234") == []
    halved = words(other_inputs(INPUTS, SPEED, OPTIONS), "tokens_per_s", "35617")
    assert halved == ["follows with a global batch of 64, not the declared 128"]


def test_counts_stay_whole_and_positive():
    alone = Inputs(seq_len=1, global_batch=2, num_devices=1)
    changes = [c for c in other_inputs(alone, SPEED, AlternativeInputs()) if c.of_row]
    assert [c.words for c in changes if "batch of 0" in c.words or "devices of 0" in c.words] == []
    assert min(c.inputs.global_batch or 0 for c in changes) == 1


def test_another_rows_step_time_explains_alone_or_with_another_peak():
    changes = list(other_speeds(INPUTS, {"its neighbour": 14.92}, OPTIONS))
    assert words(changes, "tokens_per_s", "70280") == [
        "follows from 14.92 s, the step time of its neighbour"
    ]
    together = words(changes, "mfu", "53.37%", 0.01)
    assert together[0].startswith(
        "follows from 14.92 s, the step time of its neighbour, with a peak"
    )


def test_a_peak_is_not_called_in_where_it_does_not_enter():
    changes = other_speeds(INPUTS, {"its neighbour": 14.92}, OPTIONS)
    assert all("peak" not in word for word in words(changes, "tokens_per_s", "70280"))


def test_a_rounded_step_time_explains():
    changes = list(rounded_speeds(INPUTS, SPEED))
    assert words(changes, "tokens_per_s", "71332") == [
        "follows from the step time rounded to 14.7 s"
    ]


def test_only_the_nuances_of_a_table_are_asked_of_the_whole_column():
    changes = {c.words: c for c in other_inputs(INPUTS, SPEED, OPTIONS)}
    assert [c.of_column for w, c in changes.items() if "989.5" in w] == [True]
    assert [c.of_column for w, c in changes.items() if "1979" in w] == [False]
    assert [c.of_column for w, c in changes.items() if "causal" in w] == [False]


@pytest.mark.parametrize(
    ("text", "slip"),
    [
        ("17235", "two digits swapped: 71235 would be consistent"),
        ("71285", "one digit misprinted: 71235 would be consistent"),
        ("71236", None),
        ("712348", "the decimal point is 1 too far to the right"),
        ("712.35", "the decimal point is 2 too far to the left"),
        ("99999", None),
    ],
)
def test_slips_of_digits_are_named(text: str, slip: str | None):
    assert slip_of_digits(cell("tokens_per_s", text), how("tokens_per_s"), 14.72) == slip


def test_two_digits_are_too_few_for_a_misprint():
    twos = Relation(exactly(45), 0)
    assert slip_of_digits(cell("days", "55"), twos) is None
    assert (
        slip_of_digits(cell("days", "55.0"), twos)
        == "one digit misprinted: 45.0 would be consistent"
    )


def test_within_rounding_a_changed_input_may_use_the_step_times_that_round_alike():
    change = next(c for c in other_inputs(INPUTS, SPEED, OPTIONS) if "989.5" in c.words)
    figure = cell("mfu", "54.12%", 0.01)
    assert not explains(change, figure, how("mfu"))
    assert explains(change, figure, how("mfu"), within_rounding=True)
