"""The stages of a ramp-up: no sample is lost, and the trainer would take the same steps."""

from __future__ import annotations

import pytest

from paceline.core.training import RampUp
from paceline.layouts.rampup.timing import (
    BatchSteps,
    RampStage,
    doublings,
    stages_from_batches,
    stages_from_ramp_up,
)

BIGSCIENCE = RampUp(start=32, increment=32, samples=2_000_000)
BATCHES = [32, 64, 128, 256, 512]


def trainer_steps(ramp_up: RampUp, last: int, total: int) -> dict[int, int]:
    """Steps of each batch, one after the other as the trainer takes them."""
    counts: dict[int, int] = {}
    consumed = 0
    while consumed < total:
        batch = next((b for until, b in ramp_up.sizes(last) if consumed < until), last)
        counts[batch] = counts.get(batch, 0) + 1
        consumed += batch
    return counts


@pytest.mark.parametrize("ramp_up", [BIGSCIENCE, RampUp(start=16, increment=48, samples=99_999)])
def test_every_batch_takes_the_steps_that_the_trainer_takes(ramp_up: RampUp):
    batches = [ramp_up.start, 64, 256, 544]
    last = max(b for b in range(ramp_up.start, 545, ramp_up.increment))
    batches[-1] = last
    stages = stages_from_ramp_up(ramp_up, last, batches, 3_000_000, one_stage_per_batch=True)
    steps = {s.batch: s.steps for stage in stages for s in stage.parts}
    assert steps == trainer_steps(ramp_up, last, 3_000_000)


def test_a_stage_keeps_its_batch_until_the_ramp_up_has_come_to_the_next():
    stages = stages_from_ramp_up(BIGSCIENCE, 512, BATCHES, 1e7)
    assert [stage.batches for stage in stages] == [[32], [64], [128], [256], [512]]
    ends = [133_334, 3 * 133_333.34, 7 * 133_333.34, 2_000_000, 1e7]
    behind = 0
    for stage, end in zip(stages, ends, strict=True):
        assert stage.samples is not None
        behind += stage.samples
        assert end - 1 <= behind < end + stage.batch + 1


def test_a_first_stage_above_the_start_takes_over_what_lies_before():
    stages = stages_from_ramp_up(BIGSCIENCE, 512, [128, 512], 4e6)
    assert stages[0].samples == pytest.approx(2e6, abs=128)


def test_a_last_stage_below_the_whole_batch_keeps_its_batch_to_the_end():
    stages = stages_from_ramp_up(BIGSCIENCE, 512, [32, 128], 4e6)
    assert [stage.batches for stage in stages] == [[32], [128]]
    assert stages[0].samples == pytest.approx(4e5, abs=32)
    assert stages_from_ramp_up(BIGSCIENCE, 512, [32, 128], 4e6, True)[1].batches[-1] == 512


@pytest.mark.parametrize("batches", [[16, 512], [64, 32, 512], [32, 32], [32, 1024]])
def test_batches_outside_the_ramp_up_or_out_of_order_are_refused(batches: list[int]):
    with pytest.raises(ValueError, match="from 32 to at most 512"):
        stages_from_ramp_up(BIGSCIENCE, 512, batches, 4e6)


def test_a_training_of_unknown_length_has_a_last_stage_of_unknown_length():
    last = stages_from_ramp_up(BIGSCIENCE, 512, BATCHES, None)[-1]
    assert (
        last == RampStage((BatchSteps(512, None),)) and last.steps is None and last.samples is None
    )
    assert stages_from_batches([32, 64], [1000], None)[-1].steps is None


def test_a_training_that_ends_inside_the_ramp_up_has_no_later_steps():
    stages = stages_from_ramp_up(BIGSCIENCE, 512, BATCHES, 200_000)
    assert [stage.steps for stage in stages] == [4167, 1042, 0, 0, 0]


def test_samples_are_given_once_for_all_or_for_each():
    assert [s.steps for s in stages_from_batches([32, 64, 128], [6400], 25_600)] == [200, 100, 100]
    assert [s.steps for s in stages_from_batches([32, 64], [100, 640], None)] == [4, 10]
    with pytest.raises(ValueError, match="3 sample counts for 5 stages"):
        stages_from_batches(BATCHES, [1, 2, 3], None)
    with pytest.raises(ValueError, match="increase"):
        stages_from_batches([64, 32], [100], None)


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [(32, 512, BATCHES), (192, 2048, [192, 384, 768, 1536, 2048]), (8, 8, [8]), (8, 16, [8, 16])],
)
def test_doublings_end_with_the_whole_batch(first: int, last: int, expected: list[int]):
    assert doublings(first, last) == expected
