"""Every way to attend within documents is the definition's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from paceline.trainer.model.attention import causal_attention
from paceline.trainer.model.document_attention import (
    attend_masked,
    attend_varlen,
    document_attention,
    document_kernel,
)
from paceline.trainer.model.windowed_attention import load_kernels
from tests.trainer.gpu import GPUS
from tests.trainer.model.test_windowed_attention import with_gradients

BOUNDS = torch.tensor([[0, 1, 7, 7, 40, 40], [0, 20, 21, 33, 39, 40]], dtype=torch.int32)
WINDOWS = [None, 1, 5, 64]
Attend = Callable[..., Tensor]


def plainly(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, window: int | None) -> Tensor:
    """The same by its definition, score by score."""
    tokens, groups = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    scores = torch.einsum("bqnd,bknd->bnqk", q, k) * q.shape[-1] ** -0.5
    seen = torch.zeros(len(q), 1, tokens, tokens, dtype=torch.bool)
    for sample, bounds in enumerate(documents.tolist()):
        for begin, end in pairwise(bounds):
            for at in range(begin, end):
                seen[sample, 0, at, max(begin, at + 1 - (window or tokens)) : at + 1] = True
    weights = scores.masked_fill(~seen.to(q.device), -torch.inf).softmax(-1)
    return torch.einsum("bnqk,bknd->bqnd", weights, v)


def line_of_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    bounds_k: Tensor,
    longest: int,
    longest_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What torch.nn.attention.varlen.varlen_attn promises, which has no kernel for a CPU."""
    assert torch.equal(bounds, bounds_k) and longest == longest_k >= int(bounds.diff().max())
    assert bounds.dtype == torch.int32 and window_size[1] == 0
    assert enable_gqa == (q.shape[1] > k.shape[1])
    window = None if window_size[0] < 0 else window_size[0] + 1
    return torch.cat(
        [
            causal_attention(q[None, a:b], k[None, a:b], v[None, a:b], window=window)[0]
            for a, b in pairwise(bounds.tolist())
            if a < b
        ]
    )


WAYS: dict[str, Callable[[int | None], Attend]] = {
    "per document": lambda window: lambda *qkv: document_attention(*qkv, BOUNDS, window=window),
    "masked": lambda window: lambda q, k, v: attend_masked(q, k, v, BOUNDS, 0.0, window),
    "varlen": lambda window: (
        lambda q, k, v: attend_varlen(line_of_documents, q, k, v, BOUNDS, window)
    ),
}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("way", WAYS)
def test_output_and_gradients_are_those_of_the_definition(way: str, window: int | None) -> None:
    q = torch.randn(2, 40, 4, 8, dtype=torch.float64)
    k, v = (torch.randn(2, 40, 2, 8, dtype=torch.float64) for _ in range(2))

    found = with_gradients(WAYS[way](window), q, k, v)
    wanted = with_gradients(lambda q, k, v: plainly(q, k, v, BOUNDS, window), q, k, v)

    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


def test_what_no_kernel_computes_is_masked() -> None:
    cuda = torch.device("cuda")

    assert document_kernel(torch.device("cpu"), torch.bfloat16, 0.1) == "per document"
    assert document_kernel(cuda, torch.float32, 0.0) == "masked"
    assert document_kernel(cuda, torch.bfloat16, 0.1) == "masked"


@pytest.mark.gpu
@pytest.mark.skipif(GPUS == 0, reason="no GPU that this PyTorch can use")
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_keeps_to_documents(dtype: torch.dtype, window: int | None) -> None:
    load_kernels(torch.device("cuda"))
    documents = BOUNDS.cuda() * 25
    q = torch.randn(2, 1000, 8, 64, device="cuda", dtype=dtype)
    k, v = (torch.randn(2, 1000, 2, 64, device="cuda", dtype=dtype) for _ in range(2))

    found = with_gradients(
        lambda q, k, v: document_attention(q, k, v, documents, window=window), q, k, v
    )
    wanted = with_gradients(
        lambda q, k, v: plainly(q, k, v, documents, window), *(x.float() for x in (q, k, v))
    )

    for one, other in zip(found, wanted, strict=True):
        assert (one.float() - other).norm() < 0.02 * other.norm()
