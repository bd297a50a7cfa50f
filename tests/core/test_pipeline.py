"""The bubble formulas against pipelines that are followed pass by pass."""

from __future__ import annotations

import pytest

from paceline.core.layout import Schedule
from paceline.core.pipeline import bubble_fraction
from tests.core.schedules import Pass, idle_fraction

UNIT = {"F": 1.0, "B": 1.0, "W": 1.0, "BW": 2.0}
Order = list[Pass]

SIZES = [(1, 1), (2, 2), (2, 8), (3, 7), (4, 4), (4, 16), (8, 8), (8, 64)]
"""Stages, micro-batches."""


def equal(work: Pass) -> float:
    """Equal stages whose F, B and W take as long as each other."""
    return UNIT[work.kind]


def passes(kind: str, stage: int, num: int) -> Order:
    """One kind of pass of the first `num` micro-batches."""
    return [Pass(kind, stage, i) for i in range(num)]  # type: ignore[arg-type]


def gpipe(pp: int, num: int) -> list[Order]:
    """All forward passes, then all backward passes."""
    return [passes("F", stage, num) + passes("BW", stage, num) for stage in range(pp)]


def one_f_one_b(pp: int, num: int) -> list[Order]:
    """As many forward passes ahead as there are stages behind, then one of each in turn."""
    return [_in_turn(stage, min(pp - 1 - stage, num), num, "BW") for stage in range(pp)]


def zb_h1(pp: int, num: int) -> list[Order]:
    """As 1f1b, weights' gradients as many micro-batches later as there are stages before."""
    orders: list[Order] = []
    for stage in range(pp):
        order: Order = []
        for work in _in_turn(stage, min(pp - 1 - stage, num), num, "B"):
            order.append(work)
            if work.kind == "B" and work.microbatch >= stage:
                order.append(Pass("W", stage, work.microbatch - stage))
        orders.append(order + passes("W", stage, num)[max(0, num - stage) :])
    return orders


def _in_turn(stage: int, ahead: int, num: int, backward: str) -> Order:
    forwards, backwards = passes("F", stage, num), passes(backward, stage, num)
    turns = zip(forwards[ahead:], backwards, strict=False)
    steady = [work for turn in turns for work in turn]
    return forwards[:ahead] + steady + backwards[num - ahead :]


def interleaved(pp: int, vp: int, num: int, breadth_first: bool = False) -> list[Order]:
    """Stages rank, rank + pp, ... in turn for groups of pp micro-batches, or for all of them."""
    group = num if breadth_first else pp
    orders: list[Order] = []
    for rank in range(pp):
        chunks = [
            (start + i, chunk)
            for start in range(0, num, group)
            for chunk in range(vp)
            for i in range(group)
        ]
        forwards = [Pass("F", chunk * pp + rank, i) for i, chunk in chunks]
        backwards = [Pass("BW", (vp - 1 - chunk) * pp + rank, i) for i, chunk in chunks]
        ahead = vp * num if breadth_first else min(2 * (pp - 1 - rank) + (vp - 1) * pp, vp * num)
        turns = zip(forwards[ahead:], backwards, strict=False)
        steady = [work for turn in turns for work in turn]
        orders.append(forwards[:ahead] + steady + backwards[vp * num - ahead :])
    return orders


@pytest.mark.parametrize(("pp", "num"), SIZES)
@pytest.mark.parametrize(("schedule", "make"), [("gpipe", gpipe), ("1f1b", one_f_one_b)])
def test_gpipe_and_1f1b_wait_as_long(schedule: Schedule, make: object, pp: int, num: int) -> None:
    followed = idle_fraction(make(pp, num), equal)  # type: ignore[operator]

    assert bubble_fraction(schedule, pp, 1, num) == pytest.approx(followed)
    assert followed == pytest.approx((pp - 1) / (num + pp - 1))


@pytest.mark.parametrize(("pp", "num"), SIZES)
def test_zero_bubble_h1_leaves_a_third_of_that(pp: int, num: int) -> None:
    assert bubble_fraction("zero-bubble", pp, 1, num) == pytest.approx(
        idle_fraction(zb_h1(pp, num), equal)
    )


@pytest.mark.parametrize("vp", [1, 2, 4])
@pytest.mark.parametrize(("pp", "num"), [(2, 2), (2, 8), (4, 8), (4, 16), (8, 8)])
def test_chunks_divide_the_bubble(pp: int, num: int, vp: int) -> None:
    formula = (pp - 1) / (vp * num + pp - 1)

    assert idle_fraction(interleaved(pp, vp, num), equal) == pytest.approx(formula)
    assert idle_fraction(interleaved(pp, vp, num, True), equal) == pytest.approx(formula)
    assert bubble_fraction("interleaved", pp, vp, num) == pytest.approx(formula)
    assert bubble_fraction("gpipe", pp, vp, num) == pytest.approx(formula)


def test_one_stage_never_waits() -> None:
    assert bubble_fraction("1f1b", 1, 1, 8) == 0
    assert idle_fraction(one_f_one_b(1, 8), equal) == 0


def test_an_unequal_stage_makes_the_others_wait() -> None:
    def slow_last(work: Pass) -> float:
        return equal(work) * (1.5 if work.stage == 3 else 1.0)

    assert idle_fraction(one_f_one_b(4, 8), slow_last) > bubble_fraction("1f1b", 4, 1, 8) + 0.1


def test_orders_that_wait_for_each_other_are_refused() -> None:
    first, second = [Pass("BW", 0, 0), Pass("F", 0, 0)], [Pass("F", 1, 0), Pass("BW", 1, 0)]

    with pytest.raises(ValueError, match="deadlock"):
        idle_fraction([first, second], equal)
