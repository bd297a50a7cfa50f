"""Pipelines pass by pass: the closed forms where they hold, and what they leave out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.core.layout import Schedule
from paceline.core.pipeline import bubble_fraction, stage_sizes
from paceline.estimate.model.pipeline import PipelineTime, pipeline_s
from tests.core.schedules import Pass, idle_fraction
from tests.core.test_pipeline import Order, gpipe, interleaved, one_f_one_b, zb_h1

SIZES = [(1, 1), (2, 1), (2, 2), (2, 8), (3, 7), (4, 2), (4, 16), (8, 64)]
"""Ranks, micro-batches."""
UNEVEN_F, UNEVEN_B = [1.5, 1.0, 1.25, 2.5], [2.0, 2.75, 2.0, 5.5]


def equal(pp: int, m: int, schedule: Schedule, vp: int = 1) -> PipelineTime:
    """A backward pass takes two forward passes, as in the closed forms."""
    return pipeline_s([1.0] * (pp * vp), [2.0] * (pp * vp), m, schedule, vp)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize(("pp", "m"), SIZES)
def test_equal_stages_wait_as_the_closed_form_says(schedule: Schedule, pp: int, m: int):
    if schedule == "zero-bubble" and m < pp:
        pytest.skip("the closed form is for filled pipelines")
    assert equal(pp, m, schedule).idle_fraction == pytest.approx(
        bubble_fraction(schedule, pp, 1, m)
    )


@pytest.mark.parametrize("schedule", ["interleaved", "gpipe"])
@pytest.mark.parametrize("vp", [2, 3, 5])
@pytest.mark.parametrize(("pp", "m"), [(2, 2), (2, 8), (4, 8), (8, 16)])
def test_chunks_divide_the_bubble(schedule: Schedule, vp: int, pp: int, m: int):
    timing = equal(pp, m, schedule, vp)
    assert timing.idle_fraction == pytest.approx(bubble_fraction(schedule, pp, vp, m))
    assert equal(pp, m, "1f1b", 2) == equal(pp, m, "interleaved", 2)


@pytest.mark.parametrize(
    ("schedule", "make"), [("gpipe", gpipe), ("1f1b", one_f_one_b), ("zero-bubble", zb_h1)]
)
@pytest.mark.parametrize("m", [1, 3, 4, 9])
def test_uneven_stages_wait_as_when_followed_another_way(
    schedule: Schedule, make: Callable[[int, int], list[Order]], m: int
):
    def duration(work: Pass) -> float:
        backward = UNEVEN_B[work.stage] * (0.5 if schedule == "zero-bubble" else 1.0)
        return UNEVEN_F[work.stage] if work.kind == "F" else backward

    timing = pipeline_s(UNEVEN_F, UNEVEN_B, m, schedule)
    assert timing.idle_fraction == pytest.approx(idle_fraction(make(4, m), duration))


@pytest.mark.parametrize(("m", "vp"), [(2, 2), (4, 2), (8, 3)])
def test_uneven_chunks_too(m: int, vp: int):
    forward = [1 + 0.1 * i for i in range(2 * vp)]

    def duration(work: Pass) -> float:
        return forward[work.stage] * (1 if work.kind == "F" else 2)

    timing = pipeline_s(forward, [2 * s for s in forward], m, "interleaved", vp)
    assert timing.idle_fraction == pytest.approx(idle_fraction(interleaved(2, vp, m), duration))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize("m", range(1, 14))
def test_no_number_of_micro_batches_locks_the_pipeline(schedule: Schedule, m: int):
    for pp in (2, 3, 4):
        timing = equal(pp, m, schedule, 2 if schedule == "interleaved" else 1)
        assert timing.total_s >= 3 * m and min(timing.idle) >= 0


def test_the_slowest_stage_sets_the_pace_and_the_others_wait():
    *others, last = map(float, stage_sizes(24, 4, 1))
    forward = [*others, last + 4.0]  # the head is on the last stage
    assert forward == [6, 6, 6, 10]
    timing = pipeline_s(forward, [2 * s for s in forward], 32)
    assert timing.total_s == pytest.approx(32 * 30 + 3 * 18)
    assert timing.idle[3] < 0.1 < 0.4 < timing.idle[0]


def test_exchanges_lengthen_the_fill_and_never_a_single_rank():
    without, slow = pipeline_s([1] * 4, [2] * 4, 1), pipeline_s([1] * 4, [2] * 4, 1, exchange_s=0.5)
    assert slow.total_s == pytest.approx(without.total_s + 6 * 0.5)
    assert slow.busy_s == without.busy_s
    assert pipeline_s([1, 1], [2, 2], 8, "interleaved", 2, 9.0).idle_fraction == 0


def test_putting_off_weight_gradients_shortens_a_step():
    times = [pipeline_s(UNEVEN_F, UNEVEN_B, 8, s).total_s for s in ("1f1b", "zero-bubble")]
    assert times[1] < times[0]


def test_many_events_are_followed():
    timing = equal(16, 160, "interleaved", 8)
    assert timing.total_s == pytest.approx(3 * (160 * 8 + 15))
    assert all(busy == pytest.approx(3 * 160 * 8) for busy in timing.busy_s)


def test_rounds_that_do_not_come_out_even_may_lock_and_that_is_told():
    with pytest.raises(ValueError, match="cycle"):
        equal(16, 156, "interleaved", 8)


@pytest.mark.parametrize(
    ("forward", "backward", "m", "schedule", "vp"),
    [
        ([1] * 3, [2] * 3, 4, "interleaved", 2), ([1], [2], 0, "1f1b", 1), ([], [], 1, "1f1b", 1),
        ([1, 1], [2], 2, "1f1b", 1), ([1] * 4, [2] * 4, 4, "zero-bubble", 2),
    ],
)  # fmt: skip
def test_what_is_no_pipeline_is_refused(
    forward: list[float], backward: list[float], m: int, schedule: Schedule, vp: int
):
    with pytest.raises(ValueError, match=r"stages|chunk"):
        pipeline_s(forward, backward, m, schedule, vp)
