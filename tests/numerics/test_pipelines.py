"""Every schedule of a pipeline trains alike, holds what it should and waits where its bubble is."""

from __future__ import annotations

import pytest

from tests.nightly import NIGHTLY
from tests.numerics.pipelines import cases, outcome

RANKS = (2, 4) if NIGHTLY else (2,)
CASES = [(ranks, name) for ranks in RANKS for name, row in cases(ranks).items() if not row["fault"]]
EXACT, ROUNDED = 1e-9, {"fp32": 1e-5, "bf16": 2e-2}


@pytest.mark.parametrize("ranks", RANKS)
def test_pytorch_refuses_just_what_we_refuse(ranks: int) -> None:
    assert outcome(ranks)["refused"] == []


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_loss_and_gradients_are_the_single_process_s(ranks: int, name: str) -> None:
    found = outcome(ranks)[name]
    limit = ROUNDED.get(cases(ranks)[name]["settings"]["training"]["dtype"], EXACT)

    assert found["missing"] == 0
    assert max(found["loss"], found["gradient"], found["norm"]) < limit


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_no_receive_buffer_outlives_a_step(ranks: int, name: str) -> None:
    assert outcome(ranks)[name]["buffers"] == 0


def test_gradients_divided_by_the_micro_batches_are_noticed() -> None:
    assert outcome(2)["divided"]["gradient"] == pytest.approx(0.75)


@pytest.mark.parametrize("ranks", RANKS)
def test_gpipe_holds_all_micro_batches_and_1f1b_as_many_as_stages_follow(ranks: int) -> None:
    alive = outcome(ranks)["alive"]

    assert alive["gpipe"] == [8] * ranks
    assert alive["1f1b"] == list(range(ranks, 0, -1))
    assert max(alive["zero-bubble"]) <= ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_fewer_micro_batches_than_stages_are_all_that_a_stage_holds(ranks: int) -> None:
    for num, alive in outcome(ranks)["alive few"].items():
        assert alive == [min(int(num), ranks - rank) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", RANKS)
def test_every_pass_of_a_micro_batch_is_a_beat(ranks: int) -> None:
    """A forward pass beats at its start and at its end, each part of a backward pass at its end."""
    beats = outcome(ranks)["beats"]

    assert beats["gpipe"] == beats["1f1b"] == [4 * 3, 4 * 3]
    assert beats["zero-bubble"] == [4 * 4, 4 * 4]


@pytest.mark.parametrize("ranks", RANKS)
def test_the_bubble_counts_as_waiting(ranks: int) -> None:
    seconds = outcome(ranks)["waits"]

    assert seconds["wait"] > 0.9 * seconds["bubble"]
    assert seconds["wait"] < seconds["step"] - seconds["work"]
