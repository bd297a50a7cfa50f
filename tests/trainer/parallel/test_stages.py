"""Pipelines: how layers are cut, and what a schedule demands."""

from __future__ import annotations

import pytest

from paceline.trainer.parallel.stages import local_stages, schedule_problems, stage_layers


def sizes(num_layers: int, pp: int, vp: int) -> list[int]:
    return [len(layers) for layers in stage_layers(num_layers, pp, vp)]


@pytest.mark.parametrize(
    ("num_layers", "pp", "vp", "wanted"),
    [
        (8, 4, 1, [2, 2, 2, 2]),
        (8, 2, 2, [2, 2, 2, 2]),
        (5, 1, 1, [5]),
        (6, 4, 1, [1, 2, 2, 1]),
        (2, 2, 2, [0, 1, 1, 0]),
        (2, 2, 1, [1, 1]),
    ],
)
def test_layers_are_cut_evenly_with_embedding_and_head_as_a_layer_each_where_needed(
    num_layers: int, pp: int, vp: int, wanted: list[int]
) -> None:
    assert sizes(num_layers, pp, vp) == wanted


def test_llama_405b_is_cut_as_its_own_training_cuts_it() -> None:
    assert sizes(126, 16, 8) == [0, *[1] * 126, 0]
    assert sizes(126, 8, 2) == [7, *[8] * 14, 7]


@pytest.mark.parametrize(("num_layers", "pp", "vp"), [(8, 4, 2), (14, 4, 1), (126, 8, 4)])
def test_every_layer_is_on_one_stage(num_layers: int, pp: int, vp: int) -> None:
    layers = [layer for stage in stage_layers(num_layers, pp, vp) for layer in stage]

    assert layers == list(range(num_layers))


def test_what_does_not_come_out_even_is_refused() -> None:
    with pytest.raises(ValueError, match="pp 4 x vp 1 divides neither num_layers 7 nor 9"):
        stage_layers(7, 4, 1)


def test_neighbouring_stages_lie_on_neighbouring_ranks() -> None:
    assert [local_stages(rank, 3, 2) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize(
    ("schedule", "vp", "num_microbatches", "reason"),
    [
        ("1f1b", 2, 9, "9 micro-batches into 2 equal rounds"),
        ("interleaved", 2, 13, "use a multiple of 4"),
        ("zero-bubble", 1, 11, "11 micro-batches into 2 equal rounds"),
    ],
)
def test_a_schedule_says_why_it_cannot_run_so_many_micro_batches(
    schedule: str, vp: int, num_microbatches: int, reason: str
) -> None:
    (problem,) = schedule_problems(schedule, 4, vp, num_microbatches)

    assert reason in problem


@pytest.mark.parametrize("num_microbatches", [1, 3, 5])
def test_gpipe_1f1b_and_a_single_stage_run_any_number(num_microbatches: int) -> None:
    assert schedule_problems("gpipe", 4, 1, num_microbatches) == []
    assert schedule_problems("1f1b", 4, 1, num_microbatches) == []
    assert schedule_problems("1f1b", 1, 1, num_microbatches) == []
