"""A batch that grows: as Megatron's formula says, the same in every layout and across a restart."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.ranks import merge_ranks
from paceline.core.steps import Steps
from paceline.core.training import RampUp
from paceline.core.window import steady_window
from paceline.files.events import read_rank
from paceline.trainer.config import parse_config
from paceline.trainer.config_checks import config_problems
from paceline.trainer.schedule import BatchSizes
from tests.trainer.example import lines, log, settings, train, world_size

RAMP_UP = RampUp(start=2, increment=2, samples=18).sizes(8)
"""2 samples a step until 6 are behind, 4 until 12, 6 until 18."""
GROWING = [2, 2, 2, 4, 4, 6, 8, 8, 8]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12), st.integers(1, 3000))
def test_every_step_has_the_batch_of_megatrons_formula(
    start: int, increment: int, n: int, samples: int
) -> None:
    whole = start + n * increment
    sizes = BatchSizes(
        RampUp(start=start, increment=increment, samples=samples).sizes(whole), whole
    )

    consumed = 0
    for step in range(60):
        grown = int(consumed / Fraction(samples, n))
        expected = whole if consumed > samples else start + grown * increment
        assert (sizes.samples_before(step), sizes.batch(step)) == (consumed, expected)
        consumed += expected


def test_a_batch_that_does_not_grow_is_always_the_whole_one() -> None:
    sizes = BatchSizes([], 8)

    assert [(sizes.batch(step), sizes.samples_before(step)) for step in (0, 1, 9)] == [
        (8, 0),
        (8, 8),
        (8, 72),
    ]


def test_bigsciences_batch_reaches_512_after_two_million_samples() -> None:
    sizes = BatchSizes(RampUp(start=32, increment=32, samples=2_000_000).sizes(512), 512)
    first_whole = next(step for step in range(20_000) if sizes.batch(step) == 512)

    assert sizes.batch(0) == 32
    assert 2_000_000 <= sizes.samples_before(first_whole) < 2_000_000 + 480


def test_a_batch_that_is_no_whole_micro_batches_is_refused() -> None:
    raw = settings(2, global_batch=16, micro_batch=4, ramp_up=[[20, 12]])

    assert config_problems(parse_config(raw), 2) == [
        "training.global_batch 16: dp 2 x micro_batch 4 x num_microbatches 2 is 16, and every "
        "batch is a multiple of dp x micro_batch"
    ]


def trained(folder: Path, ranks: int = 1, **changes: Any) -> Steps:
    """The merged steps of a training whose batch grows."""
    raw = settings(
        ranks,
        len(GROWING),
        source="stdlib",
        global_batch=8,
        micro_batch=1,
        num_layers=4,
        ramp_up=RAMP_UP,
        memory_parts=False,
        **changes,
    )
    assert train(folder, raw) == 0, log(folder)
    files = [folder / "steps" / f"rank-{r:05d}.jsonl" for r in range(world_size(raw))]
    read = [read_rank(file.read_text().splitlines()) for file in files]
    assert not any(of_rank.skipped_lines.lines for of_rank in read)
    return merge_ranks({rank: Steps.of(found.steps) for rank, found in enumerate(read)})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Steps]:
    """One process; its folder holds the checkpoint after step 5, inside the ramp-up."""
    folder = tmp_path_factory.mktemp("alone")
    every = {"every": 5, "resume": None, "asynchronous": False}
    return folder, trained(folder, checkpoint=every)


def test_step_lines_carry_the_steps_own_batch(alone: tuple[Path, Steps]) -> None:
    steps = alone[1]

    assert steps["global_batch"].tolist() == steps["samples"].tolist() == GROWING
    assert (steps["tokens"] / steps["samples"]).tolist() == [32] * len(GROWING)


LAYOUTS: list[dict[str, Any]] = [
    {"ranks": 2, "zero_stage": 2},
    {"pp": 2},
    {"pp": 2, "vp": 2},
    {"pp": 2, "schedule": "zero-bubble"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_growing_batch_trains_alike_in_every_layout(
    tmp_path: Path, alone: tuple[Path, Steps], layout: dict[str, Any]
) -> None:
    steps = trained(tmp_path, **layout)

    assert steps["global_batch"].tolist() == steps["samples"].tolist() == GROWING
    assert steps["loss"] == pytest.approx(alone[1]["loss"], rel=1e-5)
    assert steps["grad_norm"] == pytest.approx(alone[1]["grad_norm"], rel=1e-4)


def test_a_training_goes_on_inside_the_ramp_up(tmp_path: Path, alone: tuple[Path, Steps]) -> None:
    resume = str(alone[0] / "checkpoints" / "step-000005")
    steps = trained(tmp_path, checkpoint={"every": None, "resume": resume, "asynchronous": False})

    assert steps.index.tolist() == [6, 7, 8, 9]
    assert steps["global_batch"].tolist() == GROWING[5:]
    assert steps["loss"] == pytest.approx(alone[1]["loss"][5:], rel=1e-6)


def test_another_ramp_up_is_another_training(tmp_path: Path, alone: tuple[Path, Steps]) -> None:
    every = {"every": None, "resume": str(alone[0]), "asynchronous": False}
    raw = settings(
        1, 20, source="stdlib", global_batch=8, micro_batch=1, num_layers=4, checkpoint=every
    )

    assert train(tmp_path, raw) == 1
    assert "training.ramp_up is [[6, 2], [12, 4], [18, 6]] in the checkpoint, but []" in str(
        lines(tmp_path)[-1]["reason"]
    )


def test_the_steady_window_never_mixes_batches(alone: tuple[Path, Steps]) -> None:
    window = steady_window(alone[1])

    assert len({*alone[1]["global_batch"][window.rows].tolist()}) == 1
    assert window.record.global_batch in GROWING
