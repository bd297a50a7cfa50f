"""Dropout: at its rate and scale, alike where ranks hold the same and apart where they do not."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.trainer.config import parse_config
from paceline.trainer.model.attention import causal_attention
from paceline.trainer.model.dropout import dropout, hash_bits, residual_dropout
from paceline.trainer.model.network import activation_checkpoint
from paceline.trainer.parallel.mesh import join_world
from paceline.trainer.parallel.tensor import NO_TP
from tests import forks
from tests.trainer import example
from tests.trainer.dropout_driver import run
from tests.trainer.example import places, settings, steps, train

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "zero3": {"dp": 2, "zero_stage": 3},
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sequence_parallel": True},
    "pp": {"pp": 2},
    "all-gather": {"cp": 2},
    "all-to-all": {"cp": 2, "cp_exchange": "all-to-all"},
}
RECOMPUTED = {"tp": ("full", "selective"), "sp": ("full", "selective"), "all-gather": ("full",)}
LIMIT_S = 100


def dropping(**changes: Any) -> dict[str, Any]:
    """trainer.json in fp64; everything is dropped by a half unless `changes` say otherwise."""
    usual = {
        "dtype": "fp64",
        "global_batch": 4,
        "dropout": 0.5,
        "seq_len": 64,
        "source": "synthetic",
    }
    dp = changes.get("dp", 1)
    return settings(**{**usual, "micro_batch": 4 // dp, "num_microbatches": 1, **changes})


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What the two ranks of every layout saw."""
    folder = tmp_path_factory.mktemp("dropout")
    cases = {name: dropping(**layout) for name, layout in LAYOUTS.items()}
    for name, kinds in RECOMPUTED.items():
        for kind in kinds:
            cases[f"{name} {kind}"] = dropping(**LAYOUTS[name], recompute=kind)
    cases["compiled tp"] = dropping(tp=2, compile="blocks", recompute="full")
    cases["stream of tp"] = dropping(tp=2, attention_dropout=0.0)
    (folder / "cases.json").write_text(json.dumps(cases))
    envs = [{**os.environ, **place} for place in places(2)]
    words = ["tests.trainer.dropout_driver", "cases.json", "outcome.pt"]
    streams = [os.devnull, os.devnull, str(folder / "errors")]
    code = forks.run(example.__name__, words, envs, folder, streams, LIMIT_S)
    assert code == 0, (folder / "errors").read_text()
    return torch.load(folder / "outcome.pt")


def same(ranks: list[dict[str, Any]], what: str) -> set[bool]:
    """Of everything that both ranks did in turn, whether it was the same."""
    pairs = [*zip(ranks[0][what], ranks[1][what], strict=True)]
    assert pairs
    return {torch.equal(a, b) for a, b in pairs}


def equal_steps(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    """Whether loss and gradients are equal bit by bit on every rank."""
    return all(
        torch.equal(a["loss"], b["loss"])
        and a["gradients"].keys() == b["gradients"].keys()
        and all(torch.equal(a["gradients"][n], b["gradients"][n]) for n in a["gradients"])
        for a, b in zip(some, others, strict=True)
    )


def test_tensor_ranks_drop_the_same_of_the_stream_and_other_probabilities(outcomes: Any) -> None:
    ranks = outcomes["tp"]

    assert same(ranks, "masks") == {True} and same(ranks, "attention") == {False}
    assert torch.equal(ranks[0]["after"], ranks[1]["after"])
    assert len(ranks[0]["masks"]) == 1 + 2 * 2 and len(ranks[0]["attention"]) == 2


def test_with_sequence_parallel_they_drop_other_tokens_features(outcomes: Any) -> None:
    ranks = outcomes["sp"]

    assert same(ranks, "masks") == same(ranks, "attention") == {False}
    assert torch.equal(ranks[0]["after"], ranks[1]["after"])


@pytest.mark.parametrize("layout", ["dp", "zero3", "all-gather", "all-to-all"])
def test_ranks_with_other_tokens_drop_apart(outcomes: Any, layout: str) -> None:
    ranks = outcomes[layout]

    assert same(ranks, "masks") == same(ranks, "attention") == {False}


def test_stages_drop_apart(outcomes: Any) -> None:
    first, last = outcomes["pp"]

    assert len(first["masks"]) == 3 and len(last["masks"]) == 2
    assert not any(torch.equal(a, b) for a in first["masks"] for b in last["masks"])


def test_no_two_draws_of_a_rank_are_the_same(outcomes: Any) -> None:
    for ranks in outcomes.values():
        for a, b in pairwise(ranks[0]["masks"][:5]):
            assert not torch.equal(a, b)


@pytest.mark.parametrize(
    "name", [f"{n} {kind}" for n, kinds in RECOMPUTED.items() for kind in kinds]
)
def test_what_is_computed_again_drops_what_it_dropped(outcomes: Any, name: str) -> None:
    assert equal_steps(outcomes[name], outcomes[name.split()[0]])
    assert len(outcomes[name][0]["attention"]) > len(outcomes[name.split()[0]][0]["attention"])


def test_compiled_blocks_drop_and_compute_again_the_same(outcomes: Any) -> None:
    for compiled, plain in zip(outcomes["compiled tp"], outcomes["tp"], strict=True):
        assert compiled["loss"].item() == pytest.approx(plain["loss"].item(), rel=1e-12)
        for name, gradient in plain["gradients"].items():
            assert torch.allclose(compiled["gradients"][name], gradient, rtol=1e-9, atol=1e-12)


def test_tensor_ranks_that_drop_of_the_stream_alone_do_what_one_process_does(outcomes: Any) -> None:
    alone = run(parse_config(dropping(attention_dropout=0.0)), join_world("cpu"))
    ranks = outcomes["stream of tp"]
    norm = "blocks.0.attention_norm.weight"

    assert not alone["attention"]
    assert ranks[0]["loss"].item() == pytest.approx(alone["loss"].item(), rel=1e-12)
    assert torch.allclose(ranks[1]["gradients"][norm], alone["gradients"][norm], rtol=1e-9)
    assert [mask.float().mean() for mask in alone["masks"]] == pytest.approx([0.5] * 5, abs=0.05)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_one_process_computes_again_what_it_dropped(recompute: str) -> None:
    kept, again, whole = (
        run(parse_config(dropping(**changes)), join_world("cpu"))
        for changes in ({}, {"recompute": recompute}, {"dropout": 0.0})
    )

    assert equal_steps([kept], [again])
    assert not whole["masks"] and not whole["attention"]
    assert abs(kept["loss"].item() / whole["loss"].item() - 1) > 1e-4


def test_a_share_becomes_0_and_the_others_grow_by_it() -> None:
    x = torch.ones(200, 1000)

    out = residual_dropout(x, 0.1, NO_TP)

    assert out.unique().tolist() == pytest.approx([0.0, 1 / 0.9])
    assert (out == 0).float().mean().item() == pytest.approx(0.1, abs=0.004)
    assert out.mean().item() == pytest.approx(1.0, abs=0.004)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*istutils:UserWarning")
@pytest.mark.parametrize("again", [False, True])
def test_compiled_it_drops_the_same_of_a_gradient_and_other_elements_each_time(again: bool) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return activation_checkpoint(
            lambda y: dropout(y, 0.1).sin(), x, preserve_rng=True, enabled=again
        )

    compiled, x = torch.compile(block, fullgraph=True), torch.ones(500, 400, requires_grad=True)
    torch.manual_seed(5)
    first, second = compiled(x), compiled(x)
    (gradient,) = torch.autograd.grad(second.sum(), x)
    torch.manual_seed(5)

    assert torch.equal(compiled(x), first)
    assert torch.equal(gradient == 0, second == 0)
    kept = torch.tensor(1 / 0.9)
    assert torch.allclose(second[second != 0], kept.sin())
    assert torch.allclose(gradient[gradient != 0], kept.cos() / 0.9)
    dropped = first == 0, second == 0, (first == 0) == (second == 0)
    shares = [each.float().mean().item() for each in dropped]
    assert shares == pytest.approx([0.1, 0.1, 0.1**2 + 0.9**2], abs=0.004)


def test_hashed_numbers_are_random_in_every_bit() -> None:
    """Also compared with the next number, the next row, and a neighbouring seed."""
    n, seeds = 2**18, torch.tensor([7, -3], dtype=torch.int32)
    index = torch.arange(n, dtype=torch.int32)
    rows = [
        hash_bits(index, seeds),
        *(hash_bits(index, seeds + torch.eye(2)[i].int()) for i in (0, 1)),
    ]
    bits = [(row.unsqueeze(1) >> torch.arange(32)) & 1 for row in rows]
    pairs = [(bits[0][:-step], bits[0][step:]) for step in (1, 2, 256, 1024)]

    assert all((b.float().mean(0) - 0.5).abs().max() < 6 * 0.5 / n**0.5 for b in bits)
    for a, b in [*pairs, (bits[0], bits[1]), (bits[0], bits[2]), (bits[1], bits[2])]:
        assert ((a == b).float().mean(0) - 0.5).abs().max() < 6 * 0.5 / len(a) ** 0.5


@pytest.mark.parametrize(("queries", "kv_heads"), [(48, 4), (48, 2), (24, 2)])
def test_attention_that_drops_is_on_average_attention(queries: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(1, n, heads, 8, generator=generator)
        for n, heads in ((queries, 4), (48, kv_heads), (48, kv_heads))
    )
    torch.manual_seed(3)
    drawn = causal_attention(*(x.expand(800, -1, -1, -1) for x in (q, k, v)), dropout=0.25)
    off = (drawn.mean(0) - causal_attention(q, k, v)[0]).abs() / (drawn.std(0) / 800**0.5 + 1e-6)

    assert off.max() < 6 and drawn.std(0)[-1].min() > 0.01


def test_a_training_that_drops_goes_on_from_a_checkpoint_as_if_never_stopped(
    tmp_path: Path,
) -> None:
    raw = dropping(tp=2, steps=4, dtype="fp32", source="stdlib", dropout=0.2)
    raw["checkpoint"]["every"] = 2
    assert train(tmp_path / "whole", raw) == 0
    resume = {"resume": str(tmp_path / "whole/checkpoints/step-000002")}
    assert train(tmp_path / "rest", {**raw, "checkpoint": {**raw["checkpoint"], **resume}}) == 0

    whole, rest = (
        [(line["loss"], line["grad_norm"]) for line in steps(tmp_path / name)]
        for name in ("whole", "rest")
    )
    assert rest == whole[2:] and len(rest) == 2
