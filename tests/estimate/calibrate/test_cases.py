"""Which short trainings and products stand for a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.estimate.calibrate.cases import (
    attention_sizes,
    gemm_sizes,
    recipes_of,
    short_training,
    short_trainings,
)
from paceline.machines.probe.inventory import inventory
from tests.estimate.calibrate.micro import recipes


def test_every_axis_and_zero_stage_is_timed_on_two_ranks(tmp_path: Path):
    some = short_trainings(recipes(tmp_path), inventory(), "cpu", "fp32", 2)
    layouts = [short.spec.layout for short in some]
    assert {"tp", "pp", "cp"} == {
        axis for one in layouts for axis in ("tp", "pp", "cp") if getattr(one, axis) > 1
    }
    assert {one.zero_stage for one in layouts} == {0, 1, 2, 3}
    assert {short.spec.model.num_layers for short in some} == {2, 4}
    assert len({short.name for short in some}) == len(some)
    assert all(
        short.spec.world_size == 2 and short.spec.data.source == "synthetic" for short in some
    )


def test_one_rank_is_timed_with_few_and_many_samples_at_once(tmp_path: Path):
    some = short_trainings(recipes(tmp_path), inventory(), "cpu", "fp32", 1)
    assert {short.spec.layout.micro_batch for short in some} == {1, 8}
    assert "micro-batch 8" in some[-1].layout_label


def test_a_layout_that_cannot_run_is_left_out(tmp_path: Path):
    recipe = recipes(tmp_path)[0]
    assert short_training(recipe, inventory(), "cpu", "fp32", 2, 4, {"tp": 2, "pp": 2}) is None
    assert short_training(recipe, inventory(), "cpu", "fp16", 1, 4, {}) is None


def test_products_are_those_of_the_models_blocks_and_head(tmp_path: Path):
    sizes = gemm_sizes(recipes(tmp_path))
    assert (32, 192, 64) in sizes and (256, 128, 64) in sizes and (256, 64, 128) in sizes
    assert len(sizes) == len(set(sizes))
    assert attention_sizes(recipes(tmp_path)) == [(1, 32, 4, 4, 16), (8, 32, 4, 4, 16)]


def test_a_recipe_without_decoder_is_refused():
    with pytest.raises(UserError, match="is not a decoder"):
        recipes_of(["flux1-schnell-tiny"], "cpu")
    assert [one.name for one in recipes_of((), "cpu")] == ["tiny-llama", "gpt-1b3-tiny"]
