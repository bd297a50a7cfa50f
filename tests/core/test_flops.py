from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.flops import (
    CONVENTIONS,
    FlopsInput,
    attention_per_token,
    flops_per_sample,
    flops_per_token,
    hardware_flops_per_token,
    model_flops_per_token,
)
from paceline.core.layout import Recompute
from paceline.core.shape import DecoderShape, num_parameters
from tests.core.shapes import (
    GPT_1B3,
    GPT_1B3_PADDED,
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_405B,
    OPT_13B,
    OPT_13B_LORA,
    OPT_350M,
    TINY,
)

SEQ = 8192
GPT = FlopsInput(GPT_1B3_PADDED, 2048)
GPT_FULL = replace(GPT, recompute="full")


@pytest.mark.parametrize(
    ("shape", "flops"),
    [(LLAMA_8B, 4.744e14), (LLAMA_70B, 3.9439e15), (LLAMA_405B, 2.151e16)],
    ids=["8b", "70b", "405b"],
)
def test_one_llama_sequence_costs_the_published_flops(shape: DecoderShape, flops: float):
    assert flops_per_sample("full-attention", FlopsInput(shape, SEQ)) == pytest.approx(
        flops, rel=2e-4
    )


@pytest.mark.parametrize(
    ("shape", "ratio"),
    [(LLAMA_8B, 0.889), (LLAMA_70B, 0.933), (LLAMA_405B, 0.961)],
    ids=["8b", "70b", "405b"],
)
def test_the_causal_mask_saves_the_known_share_at_8192(shape: DecoderShape, ratio: float):
    x = FlopsInput(shape, SEQ)
    saved = flops_per_token("causal", x) / flops_per_token("full-attention", x)
    assert saved == pytest.approx(ratio, abs=5e-4)


def test_full_attention_is_nvidias_closed_form():
    layers, h, f, g, a, vocab = 80, 8192, 28672, 8, 64, 128256
    attention = 12 * layers * h**2 * (1 + g / a + SEQ / h)
    closed = attention + 18 * layers * f * h + 6 * vocab * h
    assert flops_per_token("full-attention", FlopsInput(LLAMA_70B, SEQ)) == closed


def test_six_n_counts_the_nominal_parameters_if_given_else_the_exact_ones():
    assert flops_per_token("six-n", replace(GPT, nominal_parameters=1.3e9)) == 6 * 1.3e9
    assert flops_per_token("six-n", GPT) == 6 * num_parameters(GPT_1B3_PADDED)


@pytest.mark.parametrize("name", sorted(CONVENTIONS))
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_name_means_the_same_however_much_is_recomputed(name: str, recompute: Recompute):
    x = replace(GPT, recompute=recompute)
    assert flops_per_token(name, x) == model_flops_per_token(name, x)
    assert flops_per_token(name, x) == flops_per_token(name, GPT)
    assert flops_per_token(f"{name}+recompute", x) == hardware_flops_per_token(name, x)


def test_six_n_with_recompute_is_8_p_of_full_recomputation_and_6_p_of_less():
    study = replace(GPT_FULL, nominal_parameters=1.3e9)
    assert flops_per_token("six-n", study) == 6 * 1.3e9
    assert flops_per_token("six-n+recompute", study) == 8 * 1.3e9
    selective = replace(study, recompute="selective")
    assert flops_per_token("six-n+recompute", selective) == 6 * 1.3e9


def test_the_older_name_of_narayanans_form_counts_recomputation():
    assert flops_per_token("narayanan-hw", GPT_FULL) == flops_per_token(
        "narayanan+recompute", GPT_FULL
    )
    assert model_flops_per_token("narayanan-hw", GPT_FULL) == flops_per_token("narayanan", GPT)


def test_narayanans_form_is_full_attention_for_a_gpt():
    assert flops_per_token("narayanan", GPT) == pytest.approx(
        flops_per_token("full-attention", GPT), rel=1e-12
    )


def test_narayanans_form_with_recompute_is_the_hardware_form_of_full_attention():
    assert hardware_flops_per_token("narayanan", GPT_FULL) == pytest.approx(
        hardware_flops_per_token("full-attention", GPT_FULL), rel=1e-12
    )


def test_the_deepspeed_dialect_undercounts_only_the_head_and_only_without_recompute():
    assert hardware_flops_per_token("megatron-deepspeed", GPT_FULL) == pytest.approx(
        hardware_flops_per_token("narayanan", GPT_FULL), rel=1e-12
    )
    missing = flops_per_token("narayanan", GPT) - flops_per_token("megatron-deepspeed", GPT)
    assert missing == pytest.approx(1.5 * 50304 * 2048)


def test_the_nominal_count_misses_a_seventh_of_a_small_gpt():
    study = hardware_flops_per_token("six-n", replace(GPT_FULL, nominal_parameters=1.3e9))
    assert study / hardware_flops_per_token("narayanan", GPT_FULL) == pytest.approx(0.875, abs=1e-3)


def test_opt_350m_counts_its_narrow_head_and_both_projections():
    x = FlopsInput(OPT_350M, 512)
    blocks = 6 * 24 * 12 * 1024**2
    ends = 6 * (50272 * 512 + 2 * 512 * 1024)
    assert flops_per_token("full-attention", x) == blocks + ends + 12 * 24 * 1024 * 512


def test_lora_counts_4_per_frozen_weight_6_per_trained_one_and_6_per_adapter_weight():
    x = FlopsInput(OPT_13B, 512, lora=OPT_13B_LORA)
    frozen, adapters, head = 12_582_912_000, 471_859_200, 50272 * 5120
    attention = 12 * 40 * 5120 * 512
    assert flops_per_token("full-attention", x) == 4 * frozen + 6 * (adapters + head) + attention
    assert flops_per_token("causal", x) == flops_per_token("full-attention", x) - attention / 2


def test_lora_without_the_rest_freezes_the_head_as_well():
    alone = OPT_13B_LORA.model_copy(update={"train_rest": False})
    difference = flops_per_token(
        "causal", FlopsInput(OPT_13B, 512, lora=OPT_13B_LORA)
    ) - flops_per_token("causal", FlopsInput(OPT_13B, 512, lora=alone))
    assert difference == 2 * 50272 * 5120


def test_lora_costs_about_two_thirds_of_full_training():
    small = OPT_13B_LORA.model_copy(update={"rank": 1, "train_rest": False})
    full = flops_per_token("causal", FlopsInput(OPT_13B, 512))
    assert flops_per_token("causal", FlopsInput(OPT_13B, 512, lora=small)) / full == pytest.approx(
        2 / 3, abs=0.01
    )


def test_hfu_adds_one_forward_of_the_blocks_and_not_of_the_head():
    extra = hardware_flops_per_token("causal", GPT_FULL) - flops_per_token("causal", GPT_FULL)
    assert extra == 2 * 24 * 12 * 2048**2 + attention_per_token(GPT) / 6


def test_hfu_recomputes_adapters_too():
    x = FlopsInput(OPT_13B, 512, recompute="full", lora=OPT_13B_LORA)
    extra = hardware_flops_per_token("full-attention", x) - flops_per_token("full-attention", x)
    assert extra == 2 * (12_582_912_000 + 471_859_200) + attention_per_token(x) / 3


def test_hfu_with_selective_recompute_adds_attention_only():
    x = replace(GPT, recompute="selective")
    extra = hardware_flops_per_token("full-attention", x) - flops_per_token("full-attention", x)
    assert extra == attention_per_token(x) / 3


@pytest.mark.parametrize("name", sorted(CONVENTIONS))
def test_hfu_is_mfu_without_recompute(name: str):
    assert hardware_flops_per_token(name, GPT) == flops_per_token(name, GPT)


def test_an_unknown_convention_is_an_error():
    with pytest.raises(KeyError):
        flops_per_token("six-m", GPT)


def test_every_convention_says_what_it_is():
    for name, convention in CONVENTIONS.items():
        assert convention.name == name
        assert convention.describes


shapes = st.builds(
    lambda layers, heads, groups, width, ffn, gated: TINY.model_copy(
        update={
            "num_layers": layers,
            "num_heads": heads * groups,
            "num_kv_heads": groups,
            "hidden_size": heads * groups * width,
            "ffn_size": ffn,
            "gated_ffn": gated,
        }
    ),
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from([8, 64, 128]),
    st.integers(8, 8192),
    st.booleans(),
)


@given(shape=shapes, seq_len=st.integers(1, 65536))
def test_causal_counts_more_than_half_and_less_than_all_of_full_attention(
    shape: DecoderShape, seq_len: int
):
    x = FlopsInput(shape, seq_len)
    full = flops_per_token("full-attention", x)
    assert full / 2 < flops_per_token("causal", x) < full


@pytest.mark.parametrize("name", sorted(CONVENTIONS))
@given(shape=shapes, seq_len=st.integers(1, 65536))
def test_more_layers_or_longer_sequences_never_cost_less(
    name: str, shape: DecoderShape, seq_len: int
):
    flops = flops_per_sample(name, FlopsInput(shape, seq_len))
    deeper = shape.model_copy(update={"num_layers": shape.num_layers + 1})
    assert flops_per_sample(name, FlopsInput(deeper, seq_len)) > flops
    assert flops_per_sample(name, FlopsInput(shape, seq_len + 1)) > flops


@pytest.mark.parametrize("name", sorted(CONVENTIONS))
@given(shape=shapes, seq_len=st.integers(1, 65536))
def test_recompute_never_costs_less(name: str, shape: DecoderShape, seq_len: int):
    none, selective, full = (
        hardware_flops_per_token(name, FlopsInput(shape, seq_len, recompute=kind))
        for kind in ("none", "selective", "full")
    )
    assert none <= selective <= full


@given(shape=shapes, seq_len=st.integers(1, 4096))
def test_grouped_queries_only_save_projections(shape: DecoderShape, seq_len: int):
    plain = shape.model_copy(update={"num_kv_heads": None})
    saved = flops_per_token("causal", FlopsInput(plain, seq_len)) - flops_per_token(
        "causal", FlopsInput(shape, seq_len)
    )
    fewer = 2 * shape.hidden_size * (plain.kv_size - shape.kv_size)
    assert saved == 6 * shape.num_layers * fewer


def test_padding_the_vocabulary_costs_its_rows():
    padded = replace(GPT, shape=GPT_1B3.model_copy(update={"vocab_multiple": 128}))
    exact = replace(GPT, shape=GPT_1B3)
    extra = flops_per_token("causal", padded) - flops_per_token("causal", exact)
    assert extra == 6 * (50304 - 50257) * 2048


@pytest.mark.parametrize("name", CONVENTIONS)
def test_documents_that_do_not_see_each_other_cost_what_short_sequences_do(name: str):
    """Four of equal length leave a quarter of the pairs."""
    for recompute in ("none", "selective", "full"):
        packed = FlopsInput(LLAMA_8B, 8192, recompute, attended_share=0.25)
        alone = FlopsInput(LLAMA_8B, 2048, recompute)
        assert hardware_flops_per_token(name, packed) == hardware_flops_per_token(name, alone)
        assert flops_per_token(name, packed) == flops_per_token(name, alone)
