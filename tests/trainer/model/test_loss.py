"""The chunked loss is cross-entropy, gradients included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from paceline.trainer.model import loss
from paceline.trainer.model.loss import (
    IGNORE_INDEX,
    balanced_chunk_tokens,
    chunked_cross_entropy,
    compiled_chunk,
    max_chunk_tokens,
)
from tests.trainer.worlds import DTYPES, LOSS_FAULTS, outcome

TOKENS, WIDTH, VOCAB, SCALE = 33, 16, 50, 0.25


@pytest.fixture(params=[1, 7, 1000])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tokens in a chunk: one, some with a rest, all."""
    monkeypatch.setitem(loss.CHUNK_BYTES, "cpu", request.param * VOCAB * 8)
    return request.param


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, WIDTH, dtype=dtype, generator=generator).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, dtype=dtype, generator=generator).requires_grad_()
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    targets[[0, 20, TOKENS - 1]] = IGNORE_INDEX
    return hidden, weight, targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, scale: float) -> Tensor:
    logits = functional.linear(hidden, weight)
    return scale * functional.cross_entropy(logits, targets, reduction="sum")


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_loss_and_gradients_are_exact(chunk: int, factor: float) -> None:
    hidden, weight, targets = inputs(torch.float64)
    found = chunked_cross_entropy(hidden, weight, targets, SCALE)
    wanted = plain(hidden, weight, targets, SCALE)

    assert found.item() == pytest.approx(wanted.item(), rel=1e-12)
    for a, b in zip(
        torch.autograd.grad(factor * found, (hidden, weight)),
        torch.autograd.grad(factor * wanted, (hidden, weight)),
        strict=True,
    ):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_fused_logits_are_the_plain_ones(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loss.CHUNK_BYTES, "cpu", 7 * VOCAB * 8)
    monkeypatch.setattr(loss, "COMPILER", "eager")
    monkeypatch.setattr(loss, "compiled_chunk", compiled_chunk.__wrapped__)
    results: list[list[Tensor]] = []
    for compiled in (False, True):
        hidden, weight, targets = inputs(dtype)
        found = chunked_cross_entropy(hidden, weight, targets, SCALE, compiled=compiled)
        results.append([found.detach(), *torch.autograd.grad(found, (hidden, weight))])

    for plain_result, fused in zip(*results, strict=True):
        assert plain_result.dtype == fused.dtype
        assert (plain_result - fused).norm() <= 8e-3 * plain_result.norm()
        if dtype == torch.float64:
            assert torch.allclose(plain_result, fused, rtol=1e-10, atol=1e-13)


def test_chunks_are_even() -> None:
    assert balanced_chunk_tokens(8192, 2668) == 2048
    assert balanced_chunk_tokens(33, 7) == 7
    assert balanced_chunk_tokens(10, 1000) == 10
    assert balanced_chunk_tokens(0, 5) == 1


def test_half_precision_keeps_the_loss_in_full_precision(chunk: int) -> None:
    hidden, weight, targets = inputs(torch.bfloat16)

    found = chunked_cross_entropy(hidden, weight, targets, SCALE)

    assert found.dtype == torch.float32
    wanted = plain(hidden.float(), weight.float(), targets, SCALE).item()
    assert found.item() == pytest.approx(wanted, rel=5e-3)


def test_full_precision_weights_get_full_precision_gradients() -> None:
    hidden, weight, targets = inputs(torch.float32)

    found = chunked_cross_entropy(hidden.bfloat16(), weight, targets, SCALE)
    (gradient,) = torch.autograd.grad(found, weight)

    (wanted,) = torch.autograd.grad(plain(hidden, weight, targets, SCALE), weight)
    assert gradient.dtype == torch.float32
    assert (gradient - wanted).norm() < 0.01 * wanted.norm()


def test_a_loss_over_padding_alone_is_zero() -> None:
    hidden, weight, targets = inputs(torch.float64)

    found = chunked_cross_entropy(hidden, weight, torch.full_like(targets, IGNORE_INDEX), SCALE)

    assert found.item() == 0
    assert not any(g.any() for g in torch.autograd.grad(found, (hidden, weight)))


def test_the_scale_keeps_small_fp16_gradients_alive() -> None:
    hidden, weight, targets = inputs(torch.float16)
    tiny = 1e-9

    (lost,) = torch.autograd.grad(chunked_cross_entropy(hidden, weight, targets, tiny), hidden)
    (kept,) = torch.autograd.grad(
        chunked_cross_entropy(hidden, weight, targets, tiny * 65536), hidden
    )

    assert lost.count_nonzero() == 0 < kept.count_nonzero()


def test_a_chunk_holds_at_least_one_token() -> None:
    assert max_chunk_tokens("cpu", vocab=2**40, element_bytes=4) == 1
    assert max_chunk_tokens("cpu", vocab=8192, element_bytes=4) == 512
    assert max_chunk_tokens("cuda", vocab=8192, element_bytes=4) > 512


def test_the_scale_may_be_a_tensor() -> None:
    hidden, weight, targets = inputs(torch.float32)
    scale = torch.tensor(SCALE, dtype=torch.float64)

    found = chunked_cross_entropy(hidden, weight, targets, scale)

    assert found.dtype == torch.float32
    assert torch.equal(found, chunked_cross_entropy(hidden, weight, targets, SCALE))


SLICED = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 0.02}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_with_slices_of_the_vocabulary_get_the_loss_of_one(ranks: int, dtype: str) -> None:
    errors = outcome(ranks)[f"loss {dtype}"]

    assert set(errors) == {"loss", "hidden", "weight"}
    assert max(errors.values()) < SLICED[dtype]


@pytest.mark.parametrize("ranks", [2, 4])
def test_slices_share_a_scale_that_is_a_tensor(ranks: int) -> None:
    assert max(outcome(ranks)["loss tensor"].values()) < SLICED["float64"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_slices_far_below_the_largest_logit_stay_finite(ranks: int) -> None:
    assert max(outcome(ranks)["loss far"].values()) < 1e-4


@pytest.mark.parametrize("fault", LOSS_FAULTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_comparison_of_slices_finds_a_fault(ranks: int, fault: str) -> None:
    assert min(outcome(ranks)[f"loss fault {fault}"].values()) > SLICED["bfloat16"] / 2
