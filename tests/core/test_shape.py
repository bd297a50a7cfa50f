from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.core.shape import (
    DecoderShape,
    LoraSpec,
    adapted_weights,
    lora_parameters,
    num_parameters,
    parameter_parts,
    trainable_parameters,
)
from paceline.files.recipe import load_recipe
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


@pytest.mark.parametrize(
    ("recipe", "variant", "parameters"),
    [
        ("qwen3-8b", None, 8_190_735_360),
        ("mistral-7b", None, 7_248_023_552),
        ("mistral-7b", "v0.1", 7_241_732_096),
        ("phi4-mini", None, 3_836_021_760),
    ],
)
def test_a_recipe_has_the_parameters_of_the_hub(
    recipe: str, variant: str | None, parameters: int
) -> None:
    assert num_parameters(load_recipe(recipe, variant).model) == parameters


@pytest.mark.parametrize(
    ("recipe", "changes", "millions"),
    [
        ("qwen3-8b", {}, 6_950),
        ("gemma3-4b", {}, 3_209),
        (
            "gemma3-4b",
            {"num_layers": 48, "hidden_size": 3840, "num_heads": 16, "num_kv_heads": 8}
            | {"ffn_size": 15360},
            10_759,
        ),
    ],
    ids=["qwen3-8b", "gemma3-4b", "gemma3-12b"],
)
def test_what_is_no_embedding_is_what_the_reports_print(
    recipe: str, changes: dict[str, int], millions: int
) -> None:
    shape = load_recipe(recipe).model.model_copy(update=changes)
    parts = parameter_parts(shape)
    found = (num_parameters(shape) - parts["embedding"] - parts["head"]) / 1e6

    assert round(found, -1 if millions == 6_950 else 0) == millions


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sliding_window_pattern": 6}, "state sliding_window as well"),
        ({"partial_rotary_factor": 0.5}, "need positions rope"),
        ({"norm_zero_centered": True}, "needs norm rmsnorm"),
    ],
)
def test_an_option_without_effect_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        DecoderShape.model_validate(GPT_1B3.model_dump() | changes)


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        (LLAMA_8B, 8_030_261_248),
        (LLAMA_70B, 70_553_706_496),
        (LLAMA_405B, 405_853_388_800),
        (OPT_350M, 331_196_416),
        (OPT_13B, 12_853_473_280),
        (GPT_1B3, 1_315_723_264),
        (GPT_1B3_PADDED, 1_315_823_616),
    ],
    ids=["llama-8b", "llama-70b", "llama-405b", "opt-350m", "opt-13b", "gpt-1b3", "gpt-1b3-padded"],
)
def test_a_known_model_has_exactly_its_published_parameters(shape: DecoderShape, parameters: int):
    assert num_parameters(shape) == parameters


def test_parts_add_up_and_a_tied_head_is_not_counted_twice():
    parts = parameter_parts(OPT_13B)
    assert sum(parts.values()) == num_parameters(OPT_13B)
    assert parts["head"] == 0
    untied = OPT_13B.model_copy(update={"tied_embeddings": False})
    assert num_parameters(untied) - num_parameters(OPT_13B) == parts["embedding"]


def test_the_gpt_count_is_narayanans_equation():
    layers, h, vocab, s = 24, 2048, 50257, 2048
    assert num_parameters(GPT_1B3) == layers * (12 * h**2 + 13 * h) + vocab * h + s * h + 2 * h


def test_opt_350m_counts_its_narrow_embedding_and_both_projections():
    parts = parameter_parts(OPT_350M)
    assert parts["embedding"] == 50272 * 512
    assert parts["projections"] == 2 * 512 * 1024
    assert parts["positions"] == (2048 + 2) * 1024
    assert parts["norms"] == 0


def test_lora_on_opt_13b_trains_adapters_and_everything_that_carries_none():
    assert lora_parameters(OPT_13B, OPT_13B_LORA) == 471_859_200
    assert trainable_parameters(OPT_13B, OPT_13B_LORA) == 742_420_480


def test_lora_alone_trains_nothing_but_adapters():
    alone = OPT_13B_LORA.model_copy(update={"train_rest": False})
    assert trainable_parameters(OPT_13B, alone) == lora_parameters(OPT_13B, alone)
    assert trainable_parameters(OPT_13B) == num_parameters(OPT_13B)


def test_a_target_that_the_shape_lacks_adds_nothing():
    gated = LoraSpec(rank=8, alpha=8, targets=("q", "gate"))
    assert lora_parameters(TINY, gated) == TINY.num_layers * 8 * (64 + 64)
    assert adapted_weights(TINY, gated) == TINY.num_layers * 64 * 64


@pytest.mark.parametrize(("tp", "rows"), [(1, 50304), (2, 50432), (4, 50688)])
def test_megatron_pads_the_vocabulary_to_a_multiple_of_128_tp(tp: int, rows: int):
    assert GPT_1B3_PADDED.padded_vocab(tp) == rows


def test_without_a_multiple_no_row_is_added():
    assert GPT_1B3.padded_vocab(8) == 50257


@given(vocab=st.integers(1, 10**6), multiple=st.integers(2, 512), tp=st.integers(1, 64))
def test_padding_is_the_least_multiple_that_holds_the_vocabulary(
    vocab: int, multiple: int, tp: int
):
    shape = TINY.model_copy(update={"vocab_size": vocab, "vocab_multiple": multiple})
    padded = shape.padded_vocab(tp)
    assert padded % (multiple * tp) == 0
    assert vocab <= padded < vocab + multiple * tp


@given(layers=st.integers(1, 200))
def test_every_layer_costs_the_same(layers: int):
    def count(n: int) -> int:
        return num_parameters(LLAMA_8B.model_copy(update={"num_layers": n}))

    assert count(layers + 1) - count(layers) == count(2) - count(1)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_heads": 7}, "hidden_size 64 is not a multiple of num_heads 7"),
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"positions": "rope", "head_size": 3}, "rope needs an even head size, not 3"),
        ({"hidden": 64}, "hidden"),
    ],
)
def test_an_impossible_shape_is_refused_with_its_numbers(change: dict[str, object], complaint: str):
    with pytest.raises(ValidationError, match=complaint):
        DecoderShape.model_validate(TINY.model_dump() | change)
