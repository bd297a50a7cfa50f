"""Models with latent attention, first dense layers and layers that predict more tokens."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from paceline.core.flops import FlopsInput, attention_per_token, linear_per_token
from paceline.core.layout import Layout
from paceline.core.memory import memory_per_device
from paceline.core.recompute import recomputed_linear_flops, saved_activations_per_token
from paceline.core.shape import DecoderShape, num_parameters, parameter_parts
from paceline.engines import engine
from paceline.engines.native import unsupported
from paceline.estimate.request import EstimateRequest
from paceline.files.recipe import load_recipe
from tests.core.shapes import run_of

V3 = load_recipe("deepseek-v3").model
assert isinstance(V3, DecoderShape)
LATENT = V3.latent_attention
assert LATENT is not None


def changed(**changes: Any) -> DecoderShape:
    return DecoderShape.model_validate({**V3.model_dump(), **changes})


MAIN = changed(mtp_layers=0)


def test_parameters_are_those_of_the_published_model() -> None:
    # arXiv:2412.19437: 671B, of which 37B for each token; the model card: 685B with the second
    # token's layer, whose embedding and head are counted twice there.
    assert num_parameters(MAIN) == pytest.approx(671e9, rel=1e-3)
    twice = 2 * V3.vocab_size * V3.hidden_size
    assert num_parameters(V3) + twice == pytest.approx(685e9, rel=1e-3)
    met = linear_per_token(FlopsInput(MAIN, 4096)) / 6
    assert met == pytest.approx(37e9, rel=0.015)


def test_parameters_are_those_of_kimi_k2() -> None:
    # arXiv:2507.20534, table 2, says 1.04T, of which 32.6B for each token.
    kimi = load_recipe("kimi-k2").model
    assert isinstance(kimi, DecoderShape)
    attention = 7168 * 1536 + 1536 * 64 * 192 + 7168 * 576 + 512 * 64 * 256 + 64 * 128 * 7168
    norms = 2 * 7168 + 1536 + 512
    experts = 385 * 3 * 7168 * 2048 + 384 * 7168
    whole = 61 * (attention + norms) + 3 * 7168 * 18432 + 60 * experts
    assert num_parameters(kimi) == whole + 2 * 163840 * 7168 + 7168 == 1_026_408_209_408
    assert num_parameters(kimi) == pytest.approx(1.04e12, rel=0.015)
    assert linear_per_token(FlopsInput(kimi, 4096)) / 6 == pytest.approx(32.6e9, rel=0.05)


def test_the_smaller_model_without_a_narrow_query_is_counted_too() -> None:
    # DeepSeek-V2-Lite: 15.7B, 2.4B for each token (arXiv:2405.04434, appendix B).
    latent = {**LATENT.model_dump(), "q_lora_rank": None}
    sizes = {"num_layers": 27, "hidden_size": 2048, "num_heads": 16, "ffn_size": 1408}
    experts = {"num_experts": 64, "experts_per_token": 6, "shared_ffn_size": 2816}
    dense = {"first_dense_layers": 1, "dense_ffn_size": 10944, "vocab_size": 102400}
    lite = changed(latent_attention=latent, mtp_layers=0, **sizes, **experts, **dense)
    assert num_parameters(lite) == pytest.approx(15.7e9, rel=3e-3)
    met = linear_per_token(FlopsInput(lite, 4096)) / 6 + lite.vocab_size * lite.hidden_size
    assert met == pytest.approx(2.66e9, rel=0.01)  # 2.4B without embedding and head's half


def test_dense_layers_are_as_wide_as_they_say() -> None:
    wider = changed(dense_ffn_size=2 * 18432)
    more = 3 * 3 * 7168 * 18432
    assert num_parameters(wider) - num_parameters(V3) == more
    of_step = linear_per_token(FlopsInput(wider, 4096)) - linear_per_token(FlopsInput(V3, 4096))
    assert of_step == 6 * more


def test_attention_counts_scores_and_values_of_their_own_width() -> None:
    # 4 h-wide products a pair of tokens: 192 for scores and 128 for values of each head.
    expected = 3 * 61 * 2 * 128 * (192 + 128) * 4096
    assert attention_per_token(FlopsInput(MAIN, 4096)) == expected
    assert attention_per_token(FlopsInput(V3, 4096)) == expected / 61 * 62


def test_a_layer_for_the_second_token_is_a_block_a_product_and_the_head() -> None:
    more = linear_per_token(FlopsInput(V3, 4096)) - linear_per_token(FlopsInput(MAIN, 4096))
    without = changed(mtp_layers=0, first_dense_layers=0, dense_ffn_size=None)
    head = V3.vocab_size * V3.hidden_size
    block = (linear_per_token(FlopsInput(without, 4096)) / 6 - head) / 61
    assert more / 6 == pytest.approx(block + 2 * 7168**2 + head)
    assert parameter_parts(V3)["mtp"] == num_parameters(V3) - num_parameters(MAIN)


def test_recomputation_does_the_narrow_products_again() -> None:
    plain = changed(latent_attention=None)
    more = recomputed_linear_flops(V3, "full") - recomputed_linear_flops(plain, "full")
    attention = LATENT.weights(7168, 128) + 128 * 128 * 7168 - 4 * 7168**2
    assert more == pytest.approx(2 * attention)


def test_a_block_keeps_queries_keys_values_output_and_narrow_vectors() -> None:
    layout = Layout()
    heads = 128 * (2 * 192 + 2 * 128) + 2 * (1536 + 512)
    ffn = 3 * (8 * 2048 + 2048)  # all layers alike: the dense ones are as wide
    assert saved_activations_per_token(V3, layout) == pytest.approx(4 * 7168 + heads + ffn)


def test_a_rank_holds_its_share_of_the_second_tokens_experts() -> None:
    layout = Layout(ep=8, zero_stage=1)
    with_it, without = (
        memory_per_device(run_of(shape, layout, 8, 4096, "bf16")) for shape in (V3, MAIN)
    )
    experts = 256 * 3 * 7168 * 2048
    held = parameter_parts(V3)["mtp"] - experts * 7 / 8
    assert with_it.gradients_bytes - without.gradients_bytes == pytest.approx(4 * held)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dense_ffn_size": None}, "first_dense_layers"),
        (
            {"first_dense_layers": 62},
            "62 is more than the number of layers that may have experts, 61",
        ),
        ({"num_experts": 1, "experts_per_token": 1}, "first_dense_layers"),
        ({"expert_groups": 7}, "expert_groups 7 must divide num_experts 256"),
        ({"num_kv_heads": 8}, "latent_attention cannot be combined"),
        ({"latent_attention": {"kv_lora_rank": 512}}, "qk_nope_head_dim"),
        (
            {"latent_attention": {**LATENT.model_dump(), "kv_lora_rank": 2**60}},
            "less than or equal",
        ),
    ],
)
def test_sizes_that_do_not_agree_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        changed(**changes)


def test_other_engines_name_the_one_that_trains_it_and_old_keys_stay() -> None:
    spec = EstimateRequest("tiny-llama", "H100-SXM", 1).spec
    latent = DecoderShape.model_validate(
        {**spec.model.model_dump(), "num_kv_heads": None, "latent_attention": LATENT}
    )
    other = spec.model_copy(update={"model": latent})
    for name in ("megatron", "megatron_deepspeed", "torchtitan", "hf_trainer"):
        refusals = engine(name).unsupported(other)
        told = [reason for reason in refusals if "only engines native and megatron" in reason]
        assert len(told) == 1 and "latent_attention" in told[0]
    assert not any("latent" in reason for reason in unsupported(spec))
    assert not any("latent" in reason for reason in unsupported(other))
    assert spec.key != other.key
