"""A window bounds what a query sees, for whole sequences and for the queries at an end of one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.core.flops import attended_keys
from paceline.trainer.config import parse_config
from paceline.trainer.model.attention import causal_attention
from paceline.trainer.model.windowed_attention import band, load_kernels
from paceline.trainer.train import attention_name
from tests.core.shapes import TINY
from tests.trainer.example import settings
from tests.trainer.gpu import GPUS

# Queries, keys, heads, key/value heads, window
CASES = [
    (130, 130, 4, 2, 1),
    (130, 130, 4, 2, 7),
    (200, 200, 3, 3, 90),
    (70, 200, 4, 1, 33),
    (9, 40, 2, 2, 39),
    (64, 64, 2, 1, 63),
]


def plainly(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """The same by its definition."""
    groups, past = q.shape[2] // k.shape[2], k.shape[1] - q.shape[1]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    scores = torch.einsum("bqnd,bknd->bnqk", q, k) * q.shape[-1] ** -0.5
    query = torch.arange(q.shape[1], device=q.device).unsqueeze(1) + past
    key = torch.arange(k.shape[1], device=q.device)
    hidden = (key > query) | (key <= query - window)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bnqk,bknd->bqnd", weights, v)


def with_gradients(attend: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attend(*leaves)
    above = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
    return [out, *torch.autograd.grad(out, leaves, above.view(out.shape))]


@pytest.mark.parametrize(("queries", "keys", "heads", "kv_heads", "window"), CASES)
def test_output_and_gradients_are_those_of_the_definition(
    queries: int, keys: int, heads: int, kv_heads: int, window: int
) -> None:
    q = torch.randn(2, queries, heads, 8, dtype=torch.float64)
    k, v = (torch.randn(2, keys, kv_heads, 8, dtype=torch.float64) for _ in range(2))

    found = with_gradients(lambda *x: causal_attention(*x, window=window), q, k, v)
    wanted = with_gradients(lambda *x: plainly(*x, window), q, k, v)

    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


def test_a_window_of_all_keys_is_none() -> None:
    q, k, v = (torch.randn(1, 50, n, 8) for n in (4, 2, 2))

    assert torch.equal(causal_attention(q, k, v, window=50), causal_attention(q, k, v))


@pytest.mark.parametrize(("seq_len", "window"), [(64, 9), (64, 64), (64, 100), (37, 1), (10, 9)])
def test_flops_count_every_pair_that_attends_and_half_of_the_diagonal(
    seq_len: int, window: int
) -> None:
    shape = TINY.model_copy(update={"sliding_window": window})
    pairs = band(seq_len, seq_len, window, torch.device("cpu")).sum().item()

    assert seq_len * attended_keys(shape, seq_len) == 2 * (pairs - seq_len / 2)


def test_layers_without_a_window_count_whole_sequences() -> None:
    changes = {"num_layers": 12, "sliding_window": 8, "sliding_window_pattern": 6}
    shape = TINY.model_copy(update=changes)
    local = attended_keys(shape.model_copy(update={"sliding_window_pattern": None}), 64)

    assert attended_keys(shape, 64) == pytest.approx((10 * local + 2 * 64) / 12)


@pytest.mark.parametrize(
    ("window", "pattern", "kernels"),
    [
        (None, None, "blocked"),
        (32, None, "blocked"),
        (31, None, "windowed"),
        (8, 2, "blocked, windowed"),
        (8, 3, "windowed"),
    ],
)
def test_the_start_line_says_whether_windows_bound_all_layers(
    window: int | None, pattern: int | None, kernels: str
) -> None:
    changes = {"sliding_window": window, "sliding_window_pattern": pattern}
    config = parse_config(settings(num_layers=2, seq_len=32, **changes))

    assert attention_name(config, torch.device("cpu")) == kernels


@pytest.mark.gpu
@pytest.mark.skipif(GPUS == 0, reason="no GPU that this PyTorch can use")
@pytest.mark.parametrize("queries", [300, 1024])
def test_the_flash_kernel_keeps_to_the_window(queries: int) -> None:
    load_kernels(torch.device("cuda"))
    q = torch.randn(2, queries, 8, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 1024, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    found = with_gradients(lambda *x: causal_attention(*x, window=100), q, k, v)
    wanted = with_gradients(lambda *x: plainly(*x, 100), *(x.float() for x in (q, k, v)))

    for one, other in zip(found, wanted, strict=True):
        assert (one.float() - other).norm() < 0.02 * other.norm()
