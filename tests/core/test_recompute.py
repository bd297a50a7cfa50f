"""A recompute budget is met, fully used, and spent on the most expensive operations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.flops import flops_input, hardware_flops_per_token, model_flops_per_token
from paceline.core.layout import Layout
from paceline.core.memory import memory_per_device
from paceline.core.recompute import (
    RECOMPUTE_LEVELS,
    block_levels,
    saved_activations_per_token,
    stage_levels,
)
from paceline.core.shape import DecoderShape
from tests.core.shapes import GPT_1B3_PADDED, LLAMA_8B, LLAMA_70B, OPT_350M, run_of

SHAPES = (LLAMA_8B, LLAMA_70B, GPT_1B3_PADDED, OPT_350M)
shapes, budgets = st.sampled_from(SHAPES), st.floats(0, 1)
tensors = st.sampled_from([(1, False), (4, False), (4, True)])


def by_budget(
    budget: float, tensor: tuple[int, bool] = (1, False), pp: int = 1, vp: int = 1
) -> Layout:
    tp, sequence = tensor
    return Layout(
        tp=tp, sequence_parallel=sequence, recompute="budget", recompute_budget=budget, pp=pp, vp=vp
    )


def kept(shape: DecoderShape, layout: Layout) -> float:
    """Numbers a token that all blocks keep, as a share between full recomputation and none."""
    least, most = (saved_activations_per_token(shape, layout, level) for level in ("full", "none"))
    numbers = [
        saved_activations_per_token(shape, layout, level) for level in block_levels(shape, layout)
    ]
    return (sum(numbers) / len(numbers) - least) / (most - least)


@given(shape=shapes, budget=budgets, tensor=tensors)
def test_a_budget_is_met_and_no_block_more_would_fit(
    shape: DecoderShape, budget: float, tensor: tuple[int, bool]
):
    layout = by_budget(budget, tensor)
    levels = block_levels(shape, layout)

    assert kept(shape, layout) <= budget + 1e-6
    assert len(set(levels)) <= 2 and [RECOMPUTE_LEVELS.index(x) for x in levels] == sorted(
        RECOMPUTE_LEVELS.index(x) for x in levels
    )
    if levels[0] != "none":
        first = RECOMPUTE_LEVELS.index(levels[0])
        step = saved_activations_per_token(shape, layout, RECOMPUTE_LEVELS[first + 1])
        step -= saved_activations_per_token(shape, layout, levels[0])
        whole = saved_activations_per_token(shape, layout) - saved_activations_per_token(
            shape, layout, "full"
        )
        assert kept(shape, layout) + step / whole / shape.num_layers > budget - 1e-6


@given(shape=shapes, pair=st.tuples(budgets, budgets), tensor=tensors)
def test_more_budget_keeps_no_less_and_does_no_more_again(
    shape: DecoderShape, pair: tuple[float, float], tensor: tuple[int, bool]
):
    less, more = (by_budget(budget, tensor) for budget in sorted(pair))
    memories = [
        memory_per_device(run_of(shape, x, 1, 2048, "bf16")).total_bytes for x in (less, more)
    ]
    again = [hardware_flops_per_token("causal", flops_input(shape, 2048, x)) for x in (less, more)]

    assert kept(shape, less) <= kept(shape, more) + 1e-9
    # The first blocks that keep more are those whose inputs are freed before the next recompute.
    one_input = 2 * 2048 * saved_activations_per_token(shape, less, "full")
    assert memories[0] <= memories[1] * (1 + 1e-9) + one_input
    assert again[0] >= again[1] * (1 - 1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_ends_are_full_recomputation_and_none(shape: DecoderShape):
    for budget, kind in ((0.0, "full"), (1.0, "none")):
        layout = by_budget(budget)
        other = layout.model_copy(update={"recompute": kind, "recompute_budget": None})
        assert block_levels(shape, layout) == (kind,) * shape.num_layers
        assert memory_per_device(run_of(shape, layout, 1, 2048, "bf16")) == memory_per_device(
            run_of(shape, other, 1, 2048, "bf16")
        )


def test_attention_is_not_done_twice_where_all_of_it_fits():
    step = saved_activations_per_token(LLAMA_8B, Layout(), "ffn") - LLAMA_8B.hidden_size
    share = step / (saved_activations_per_token(LLAMA_8B, Layout()) - LLAMA_8B.hidden_size)

    assert "full" not in block_levels(LLAMA_8B, by_budget(share))
    assert "full" in block_levels(LLAMA_8B, by_budget(0.99 * share))
    assert share < 0.3


def test_every_stage_of_a_pipeline_spends_its_own_budget():
    layout = by_budget(0.5, pp=4, vp=2)

    assert len({stage_levels(LLAMA_8B, layout, [stage]) for stage in range(8)}) == 1


@pytest.mark.parametrize("convention", ["causal", "full-attention", "palm", "six-n", "narayanan"])
def test_every_convention_counts_between_nothing_and_one_more_pass(convention: str):
    more = [
        hardware_flops_per_token(convention, flops_input(GPT_1B3_PADDED, 2048, layout))
        for layout in (Layout(recompute="full"), by_budget(0.0), by_budget(0.3), by_budget(1.0))
    ]

    assert more == sorted(more, reverse=True) and more[0] > more[1] > more[2]
    assert more[-1] == model_flops_per_token(convention, flops_input(GPT_1B3_PADDED, 2048))
