"""The space of layouts: nothing valid is missing, nothing invalid is in it."""

from __future__ import annotations

import pytest

from paceline.core.layout import Layout
from paceline.core.layout_sizes import layout_problems
from paceline.layouts.search.space import Space, candidates, feasible
from tests.core.shapes import FLUX, LLAMA_8B, LLAMA_70B, LLAMA_405B

SMALL = Space(most_tp=4, most_cp=2, micro_batches=(1, 2))


def test_what_is_feasible_can_run_and_what_is_refused_cannot():
    layouts, refused = feasible(LLAMA_8B, 16, 24, 8192, SMALL)
    every = list(candidates(LLAMA_8B, 16, SMALL))
    assert len(layouts) + refused == len(every) and refused > 0
    for layout in every:
        runs = not layout_problems(layout, LLAMA_8B, 16, 24, 8192)
        assert runs == (layout in layouts)


def test_the_layouts_that_publications_chose_are_among_them():
    nvidia = Layout(tp=4, pp=4, cp=2, vp=5, zero_stage=1, sequence_parallel=True)
    layouts, _ = feasible(LLAMA_70B, 64, 128, 8192, Space())
    assert nvidia in layouts
    meta = Layout(tp=8, pp=16, vp=8, zero_stage=1, sequence_parallel=True)
    layouts, _ = feasible(LLAMA_405B, 16384, 2048, 8192, Space())
    assert meta in layouts


def test_what_is_next_to_a_layout_has_its_micro_batch():
    layouts, _ = feasible(LLAMA_8B, 2, 96, 8192, SMALL.around(Layout(micro_batch=12)))
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
    layouts, _ = feasible(FLUX, 8, 64, FLUX.seq_len, SMALL)
    assert layouts and all(layout.pp == 1 and not layout.sequence_parallel for layout in layouts)
