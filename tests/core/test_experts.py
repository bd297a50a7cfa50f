"""Models with experts: parameters, FLOPs, memory and layouts, and who refuses them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from paceline.core.flops import FlopsInput, linear_per_token
from paceline.core.layout import Layout
from paceline.core.layout_checks import layout_problems
from paceline.core.parallel_run import ParallelRun
from paceline.core.recompute import saved_activations_per_token
from paceline.core.shape import DecoderShape, block_parameters, num_parameters
from paceline.engines.native import unsupported
from paceline.estimate.request import EstimateRequest
from paceline.layouts.search.space import SearchSpace, feasible_layouts, replica_layouts

# Mixtral 8x7B: 46.7 billion parameters, of which a token meets 12.9 billion.
MIXTRAL = DecoderShape(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    ffn_size=14336,
    vocab_size=32000,
    gated_ffn=True,
    activation="silu",
    norm="rmsnorm",
    positions="rope",
    bias=False,
    tied_embeddings=False,
    num_experts=8,
    experts_per_token=2,
)
DENSE = MIXTRAL.model_copy(update={"num_experts": 1, "experts_per_token": 1})


def test_parameters_are_those_of_a_published_model():
    assert num_parameters(MIXTRAL) == pytest.approx(46.7e9, rel=0.001)
    more = 7 * 3 * 4096 * 14336 + 8 * 4096
    assert block_parameters(MIXTRAL) - block_parameters(DENSE) == more


def test_biases_and_sinks_are_parameters_of_a_block() -> None:
    more = {"bias": True, "attention_sinks": True}
    biased = MIXTRAL.model_copy(update=more)
    attention = 2 * 4096 + 2 * 8 * 128
    experts = 8 * (2 * 14336 + 4096)
    assert block_parameters(biased) - block_parameters(MIXTRAL) == attention + experts + 8 + 32


def test_a_token_costs_the_experts_that_it_meets():
    met = linear_per_token(FlopsInput(MIXTRAL, 4096)) / 6
    assert met == pytest.approx(12.9e9 - 32000 * 4096, rel=0.002)
    shared = MIXTRAL.model_copy(update={"shared_ffn_size": 1024})
    more = linear_per_token(FlopsInput(shared, 4096)) / 6 - met
    assert more == pytest.approx(32 * 3 * 4096 * 1024)


def test_activations_grow_with_the_experts_of_a_token():
    layout = Layout()
    assert 2 * saved_activations_per_token(MIXTRAL, layout) - 2 * saved_activations_per_token(
        DENSE, layout
    ) == pytest.approx(2 * 3 * 14336)


def test_more_experts_met_than_there_are_is_no_model():
    with pytest.raises(ValidationError, match="experts_per_token 9"):
        DecoderShape.model_validate({**MIXTRAL.model_dump(), "experts_per_token": 9})


@pytest.mark.parametrize(("ep", "problem"), [(8, None), (3, "8 experts"), (16, "8 experts")])
def test_expert_ranks_hold_equally_many_experts(ep: int, problem: str | None):
    problems = " ".join(
        map(str, layout_problems(ParallelRun(Layout(ep=ep), MIXTRAL, 48, 48, 4096)))
    )
    assert (problem in problems) if problem else "experts" not in problems


def test_a_search_varies_expert_parallelism_of_such_models_alone():
    assert {layout.ep for layout in replica_layouts(MIXTRAL, 16, SearchSpace())} == {1, 2, 4, 8}
    assert {layout.ep for layout in replica_layouts(MIXTRAL, 16, SearchSpace(max_ep=2))} == {1, 2}
    assert {layout.ep for layout in replica_layouts(DENSE, 16, SearchSpace())} == {1}
    layouts, _ = feasible_layouts(
        MIXTRAL, 16, 64, 4096, SearchSpace(micro_batches=(1,), zero_stages=(1,))
    )
    assert all((layout.dp(16) * layout.cp) % layout.ep == 0 for layout in layouts) and layouts


def test_the_trainer_takes_experts_and_refuses_biases_of_shared_ones() -> None:
    spec = EstimateRequest("tiny-llama", "H100-SXM", 1).spec
    experts = {"num_experts": 4, "experts_per_token": 2}
    with_experts = spec.model_copy(update={"model": spec.model.model_copy(update=experts)})
    biased, shared = (
        spec.model_copy(update={"model": spec.model.model_copy(update={**experts, **more})})
        for more in ({"bias": True}, {"bias": True, "shared_ffn_size": 64})
    )
    assert unsupported(with_experts) == unsupported(biased) == unsupported(spec)
    assert any("model.bias is not supported with shared" in text for text in unsupported(shared))
    assert spec.key != with_experts.key
