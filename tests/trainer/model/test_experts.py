"""Experts: what the router chooses, what rows cost, and what a recomputed block keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.training import expert_weights
from paceline.trainer.config import parse_config
from paceline.trainer.model import grouped_gemm
from paceline.trainer.model.decoder import Decoder, LayerSetting
from paceline.trainer.model.experts import (
    Router,
    RoutingSetting,
    StackedExperts,
    count_rows,
    inverse,
    sort_by_expert,
    weighted_sum,
)
from paceline.trainer.model.grouped_gemm import grouped_linear
from paceline.trainer.model.network import init_weights
from paceline.trainer.model_config import ModelConfig
from paceline.trainer.parallel.mesh import Mesh
from paceline.trainer.trainer import load_record
from tests.trainer.example import settings

SEQ_LEN, BATCH = 16, 2


def model_of(**changes: Any) -> ModelConfig:
    """A tiny decoder of eight experts, two for each token."""
    sizes = {"num_experts": 8, "experts_per_token": 2, "num_layers": 2, **changes}
    model = parse_config(settings(**sizes, seq_len=SEQ_LEN)).model
    assert isinstance(model, ModelConfig)
    return model


def decoder(recompute: str = "none", **changes: Any) -> Decoder:
    """The same with weights, in fp64."""
    setting = LayerSetting(SEQ_LEN, torch.float64, recompute)
    made = Decoder(model_of(**changes), setting).double()
    init_weights(made, {n: p.shape for n, p in made.named_parameters()}, 3, Mesh())
    made.scale = 1 / (BATCH * SEQ_LEN)
    return made


def router_of(setting: RoutingSetting | None = None, **changes: Any) -> Router:
    """A router with random weights."""
    model = model_of(**changes)
    router = Router(model, setting) if setting else Router(model)
    torch.nn.init.normal_(router.weight)
    return router.double()


def scores_of(router: Router, x: Tensor) -> Tensor:
    return (x @ router.weight.T).sigmoid()


@pytest.mark.parametrize("counts", [[3, 0, 4, 1], [0, 0, 8, 0]])
def test_each_expert_multiplies_its_own_rows(counts: list[int]) -> None:
    rows = torch.randn(sum(counts), 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    numbers = torch.tensor(counts)

    out = grouped_linear(rows, weight, numbers)

    pieces = zip(rows.split(counts), weight, strict=True)
    wanted = torch.cat([piece @ matrix.T for piece, matrix in pieces])
    assert torch.allclose(out, wanted)
    up = torch.randn_like(out)
    found = torch.autograd.grad(out, (rows, weight), up)
    for gradient, same in zip(found, torch.autograd.grad(wanted, (rows, weight), up), strict=True):
        assert torch.allclose(gradient, same)


def test_padded_groups_of_the_grouped_gemm_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    experts = StackedExperts(model_of())
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    experts.bfloat16()
    counts = torch.tensor([3, 0, 40, 16, 1, 0, 0, 20])
    width = experts.down.shape[1]
    rows = torch.randn(80, width, dtype=torch.bfloat16, requires_grad=True)
    up = torch.randn(80, width, dtype=torch.bfloat16)
    inputs = [rows, *experts.parameters()]

    plain = experts(rows, counts)
    wanted = torch.autograd.grad(plain, inputs, up)
    monkeypatch.setattr(grouped_gemm, "GROUPED_DEVICES", ("cpu",))
    out = experts(rows, counts)
    found = torch.autograd.grad(out, inputs, up)

    assert torch.allclose(out.float(), plain.float(), rtol=0.02, atol=1e-3)
    for gradient, same in zip(found, wanted, strict=True):
        assert (gradient - same).norm() < 0.01 * same.norm()


def test_rows_come_back_to_their_tokens() -> None:
    tokens = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    experts = torch.tensor([[3, 1], [0, 2], [1, 0], [3, 2], [1, 3], [2, 1]])
    weights = torch.rand(6, 2, dtype=torch.float64, requires_grad=True)

    rows, order, counts = sort_by_expert(tokens, experts, 5)
    factors = torch.arange(1.0, 6.0, dtype=torch.float64).repeat_interleave(counts)
    out = weighted_sum(rows * factors[:, None], order, weights)

    wanted = tokens * ((experts + 1) * weights).sum(1, keepdim=True)
    assert counts.tolist() == [2, 4, 3, 3, 0]
    assert torch.allclose(out, wanted)
    up = torch.randn_like(out)
    for found, same in zip(
        torch.autograd.grad(out, (tokens, weights), up),
        torch.autograd.grad(wanted, (tokens, weights), up),
        strict=True,
    ):
        assert torch.allclose(found, same)
    assert inverse(order)[order].tolist() == [*range(12)]


def test_groups_with_the_best_pairs_limit_the_choice() -> None:
    router = router_of(
        num_experts=8, experts_per_token=3, expert_groups=4, groups_per_token=2,
        router_score="sigmoid",
    )  # fmt: skip
    x = torch.randn(50, router.weight.shape[1], dtype=torch.float64)

    routing = router(x)

    scores = scores_of(router, x).detach()
    pairs = scores.unflatten(1, (4, 2)).sum(-1)
    for token in range(50):
        groups = set(pairs[token].topk(2).indices.tolist())
        allowed = torch.tensor([s if e // 2 in groups else -1 for e, s in enumerate(scores[token])])
        assert set(routing.experts[token].tolist()) == set(allowed.topk(3).indices.tolist())
    assert torch.allclose(routing.weights.sum(1), torch.ones(50, dtype=torch.float64))


def test_the_choice_bias_balances_a_skewed_router_without_a_gradient() -> None:
    torch.manual_seed(0)
    biased = {"router_choice_bias": True, "router_score": "sigmoid"}
    router = router_of(RoutingSetting(bias_update_rate=0.01), **biased)
    with torch.no_grad():
        router.weight *= 0.1
    x = torch.randn(512, router.weight.shape[1], dtype=torch.float64)
    # All tokens have a part in common, which makes some experts everyone's favourites.
    x += 4 * router.weight[0].detach() / router.weight[0].norm()
    overload: list[float] = []
    for _ in range(200):
        load = count_rows(router(x).experts, 8)
        overload.append((load.max() / load.double().mean()).item())
        router.update_choice_bias(load)

    assert overload[0] > 3
    assert max(overload[-20:]) < 1.3
    assert not dict(router.named_parameters()).get("choice_bias")
    routing = router(x)
    scores = scores_of(router, x).gather(1, routing.experts)
    assert torch.allclose(routing.weights, scores / scores.sum(-1, keepdim=True))


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_step_of_the_choice_bias_is_the_rate_and_has_the_sign_of_the_load_that_is_missing(
    rate: float,
) -> None:
    router = router_of(RoutingSetting(bias_update_rate=rate), router_choice_bias=True)

    router.update_choice_bias(torch.tensor([9, 4, 4, 4, 4, 4, 3, 0]))

    assert router.choice_bias is not None
    assert router.choice_bias.tolist() == [-rate, 0, 0, 0, 0, 0, rate, rate]


def test_forced_routing_is_balanced_and_continues_from_rank_to_rank() -> None:
    tokens, ranks = 6, 4
    chosen = []
    for rank in range(ranks):
        router = router_of(RoutingSetting(forced=True, rank=rank))
        x = torch.randn(tokens, router.weight.shape[1], dtype=torch.float64)
        routing = router(x)
        assert all(len({*row}) == 2 for row in routing.experts.tolist())
        chosen.append(routing.experts)

    assert count_rows(torch.cat(chosen), 8).tolist() == [6] * 8
    # The weights are still the router's, so it learns.
    assert routing.weights.requires_grad


@pytest.mark.parametrize("pattern", ["3,1", "3,3,2,1,0,1,1,1", "5,1,1,4,1,1,1,1", "2,1,1,1"])
def test_a_pattern_gives_experts_exactly_its_loads_over_the_ranks(pattern: str) -> None:
    weights, ranks = expert_weights(f"pattern:{pattern}", 8, 2), 2
    chosen = []
    for rank in range(ranks):
        router = router_of(RoutingSetting(weights=weights, rank=rank))
        x = torch.randn(sum(weights), router.weight.shape[1], dtype=torch.float64)
        chosen.append(router(x).experts)
        assert all(len({*row}) == 2 for row in chosen[-1].tolist())

    rows_per_weight = ranks * 2
    assert count_rows(torch.cat(chosen), 8).tolist() == [w * rows_per_weight for w in weights]


@pytest.mark.parametrize("recompute", ["full", "activation"])
def test_a_recomputed_block_keeps_the_choice_and_the_gradients(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.randint(320, (BATCH, SEQ_LEN + 1))
    found: dict[str, dict[str, Tensor]] = {}
    for level in ("none", recompute):
        model = decoder(level)
        model(ids[:, :-1], ids[:, 1:].contiguous()).backward()
        found[level] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        loads = [layer.take_load() for layer in model.expert_layers.values()]
        assert [load.sum().item() for load in loads] == [BATCH * SEQ_LEN * 2] * 2

    assert all(torch.equal(found["none"][n], g) for n, g in found[recompute].items())


def test_the_choice_is_that_of_the_forward_pass_where_scores_round_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = decoder("full")
    ids = torch.randint(320, (BATCH, SEQ_LEN + 1))
    choices: list[Tensor] = []
    choose = Router.choose

    def counted(self: Router, scores: Tensor) -> Tensor:
        choices.append(choose(self, scores))
        return choices[-1]

    monkeypatch.setattr(Router, "choose", counted)
    model(ids[:, :-1], ids[:, 1:].contiguous()).backward()

    assert len(choices) == 2, "one for each layer, none while it is recomputed"


def test_the_spread_of_a_load_is_described_by_layer() -> None:
    rows = torch.tensor([[2, 2, 2, 2], [0, 0, 8, 0]])
    record = load_record([1, 4], rows)
    assert load_record([1, 4], rows, ep=2) == {**record, "rank_overload": [1.0, 2.0]}

    assert record["layers"] == [1, 4] and record["experts"] == 4
    assert record["overload"] == [1.0, 4.0]
    assert record["variation"] == pytest.approx([0.0, 3**0.5])
    assert record["dead"] == [0, 3]


def test_own_losses_have_the_gradients_of_their_formulas() -> None:
    router = router_of(RoutingSetting(aux_loss=0.3, z_loss=0.2))
    router.loss_scale = 1 / 20
    x = torch.randn(10, router.weight.shape[1], dtype=torch.float64)

    router(x).weights.detach()
    routing = router(x)
    (found,) = torch.autograd.grad(routing.weights.sum() * 0, router.weight)

    logits = x @ router.weight.T
    share = torch.zeros(8, dtype=torch.float64)
    for expert in routing.experts.flatten().tolist():
        share[expert] += 1 / 10
    balance = 8 / 2 * (share * logits.softmax(-1).mean(0)).sum()
    wanted = 0.3 * balance + 0.2 * logits.logsumexp(-1).square().mean()
    (gradient,) = torch.autograd.grad(wanted / 2, router.weight)
    assert torch.allclose(found, gradient)
