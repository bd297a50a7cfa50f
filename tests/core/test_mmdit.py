"""An MMDiT's parameters and FLOPs are what arithmetic says, and its sizes must fit together."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.core.flops import (
    FlopsInput,
    flops_per_sample,
    flops_per_token,
    hardware_flops_per_token,
)
from paceline.core.layout import Layout
from paceline.core.memory import memory_per_device, min_devices_to_fit
from paceline.core.mmdit import MMDiTShape
from paceline.core.recompute import saved_activations_per_token
from paceline.core.shape import num_parameters, parameter_parts, trainable_parameters
from tests.core.shapes import FLUX, FLUX_TINY, run_of

INPUT = FlopsInput(FLUX, FLUX.seq_len)


def changed(**fields: Any) -> MMDiTShape:
    return MMDiTShape(**{**FLUX.model_dump(), **fields})


def test_flux_has_its_published_number_of_parameters():
    assert num_parameters(FLUX) == trainable_parameters(FLUX) == 11_891_178_560


def test_blocks_are_36_and_15_squares_of_the_width_and_their_biases_and_norms():
    h, double, single = 3072, 19, 38
    matrices = h**2 * (36 * double + 15 * single)
    biases = h * (2 * (6 + 3 + 1 + 4 + 1) * double + (3 + 7 + 1) * single)
    norms = 128 * (4 * double + 2 * single)

    assert parameter_parts(FLUX)["blocks"] == matrices + biases + norms


def test_a_sample_costs_what_the_closed_form_says():
    """6 x 12 h^2 S L + 12 h S^2 L + 6 h^2 (12 D + 3 s), and 0.1% in the first and last layers."""
    h, seq, layers = 3072, 512, 57
    blocks = 72 * h**2 * seq * layers + 6 * h**2 * (12 * 19 + 3 * 38)
    attention = 12 * h * seq**2 * layers
    flops = flops_per_sample("full-attention", INPUT)

    assert flops == pytest.approx(20.41e12, rel=5e-4)
    assert 0 < flops / (blocks + attention) - 1 < 1e-3


def test_full_recomputation_adds_one_forward_pass_of_the_blocks():
    again = FlopsInput(FLUX, FLUX.seq_len, recompute="full")
    extra = hardware_flops_per_token("full-attention", again) - flops_per_token(
        "full-attention", INPUT
    )

    assert extra * FLUX.seq_len == FLUX.block_forward_flops + 4 * 3072 * 512**2 * 57


@given(double=st.integers(1, 8), single=st.integers(1, 8))
def test_more_blocks_never_cost_less(double: int, single: int):
    smaller = changed(num_double_blocks=double, num_single_blocks=single)
    deeper = changed(num_double_blocks=double + 1, num_single_blocks=single)
    longer = changed(num_double_blocks=double, num_single_blocks=single + 1)

    for other in (deeper, longer):
        assert num_parameters(other) > num_parameters(smaller)
        assert other.linear_flops > smaller.linear_flops


def test_256_pixels_give_256_tokens_of_64_numbers_and_text_as_many():
    assert (FLUX.image_tokens, FLUX.in_channels, FLUX.seq_len) == (256, 64, 512)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_heads": 7}, "not a multiple of num_heads 7"),
        ({"rope_axes": (16, 56, 58)}, "add up to the head's 128"),
        ({"rope_axes": (15, 57, 56)}, "are not even numbers"),
        ({"latent_size": 33}, "not a multiple of patch_size 2"),
        ({"num_single_blocks": 0}, "greater than 0"),
        ({"text_dropout": 1.0}, "less than 1"),
        ({"kind": "decoder"}, "'mmdit'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fields: dict[str, Any], reason: str):
    with pytest.raises(ValidationError, match=reason):
        changed(**fields)


def test_training_states_take_16_bytes_a_parameter():
    memory = memory_per_device(run_of(FLUX, Layout(), 1, FLUX.seq_len, "bf16"))

    assert memory.states_bytes == pytest.approx(16 * num_parameters(FLUX), rel=1e-12)
    assert memory.logits_bytes == 0


def test_twelve_billion_parameters_need_more_than_one_large_device():
    assert min_devices_to_fit(FLUX, FLUX.seq_len, "bf16", 141e9) == 2
    assert min_devices_to_fit(FLUX_TINY, FLUX_TINY.seq_len, "bf16", 141e9) == 1


def test_a_single_block_keeps_fewer_tensors_than_a_double_one():
    single = changed(num_double_blocks=1, num_single_blocks=50)
    double = changed(num_double_blocks=50, num_single_blocks=1)

    assert 2 * saved_activations_per_token(single, Layout()) < 2 * saved_activations_per_token(
        double, Layout()
    )
