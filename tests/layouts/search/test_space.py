"""The space of layouts: nothing valid is missing, nothing invalid is in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from paceline.core.layout import Layout
from paceline.core.layout_checks import layout_problems
from paceline.core.parallel_run import ParallelRun
from paceline.core.shape import Shape
from paceline.layouts.search.space import SearchSpace, feasible_layouts, replica_layouts
from tests.core.shapes import FLUX, LLAMA_8B, LLAMA_70B, LLAMA_405B

EXPERTS = LLAMA_8B.model_copy(update={"num_experts": 8, "experts_per_token": 2})
SMALL = SearchSpace(max_tp=4, max_cp=2, micro_batches=(1, 2))


def candidates(shape: Shape, devices: int, space: SearchSpace) -> Iterator[Layout]:
    """Every combination of axes, valid or not, one after the other."""
    for plain in replica_layouts(shape, devices, space):
        schedules = space.schedules if plain.pp > 1 and plain.vp == 1 else ("1f1b",)
        for micro, zero, recompute, schedule in product(
            space.micro_batches, space.zero_stages, space.recompute, schedules
        ):
            changes = {"micro_batch": micro, "zero_stage": zero, "schedule": schedule}
            yield plain.model_copy(update={**changes, "recompute": recompute})


@pytest.mark.parametrize(
    ("shape", "devices", "batch"),
    [(LLAMA_8B, 16, 24), (LLAMA_70B, 48, 60), (EXPERTS, 16, 32), (FLUX, 8, 24)],
)
def test_what_is_feasible_can_run_and_what_is_refused_cannot(
    shape: Shape, devices: int, batch: int
):
    space = replace(SMALL, schedules=("1f1b", "gpipe", "zero-bubble"))
    layouts, refused = feasible_layouts(shape, devices, batch, 8192, space)
    every = list(candidates(shape, devices, space))
    running = [x for x in every if not layout_problems(ParallelRun(x, shape, devices, batch, 8192))]
    assert layouts == running and layouts and refused == len(every) - len(running) > 0


def test_the_layouts_that_publications_chose_are_among_them():
    nvidia = Layout(tp=4, pp=4, cp=2, vp=5, zero_stage=1, sequence_parallel=True)
    layouts, _ = feasible_layouts(LLAMA_70B, 64, 128, 8192, SearchSpace())
    assert nvidia in layouts
    meta = Layout(tp=8, pp=16, vp=8, zero_stage=1, sequence_parallel=True)
    layouts, _ = feasible_layouts(LLAMA_405B, 16384, 2048, 8192, SearchSpace())
    assert meta in layouts


def test_what_is_next_to_a_layout_has_its_micro_batch():
    layouts, _ = feasible_layouts(LLAMA_8B, 2, 96, 8192, SMALL.around(Layout(micro_batch=12)))
    assert {layout.micro_batch for layout in layouts} == {1, 2, 12}
    assert Layout(pp=2, micro_batch=12) in layouts
    assert SMALL.around(Layout(micro_batch=2)) == SMALL


def test_no_layout_comes_twice():
    every = list(candidates(LLAMA_405B, 128, SMALL))
    assert len(set(map(repr, every))) == len(every)


@pytest.mark.parametrize("devices", [1, 6, 8])
def test_replicas_fill_the_devices(devices: int):
    for layout in candidates(LLAMA_8B, devices, SMALL):
        assert devices % layout.model_devices == 0


def test_a_diffusion_transformer_has_no_stages_and_no_sequence_parallelism():
    layouts, _ = feasible_layouts(FLUX, 8, 64, FLUX.seq_len, SMALL)
    assert layouts and all(layout.pp == 1 and not layout.sequence_parallel for layout in layouts)
